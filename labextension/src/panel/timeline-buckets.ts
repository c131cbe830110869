/**
 * A timeline of half an hour. A pixel is eight seconds of it, so short cells cannot be drawn one by
 * one. Instead each half minute is a column, as high as the share of that time. Pure.
 */

import { formatBytes } from '../model/format';
import type { IHistory } from '../model/types';
import { trans } from '../model/translation';

import { nameOf } from './people';
import { mark, percent } from './timeline-shapes';
import type { IMark, ISpan, IWindow, SpanKind } from './timeline-shapes';
import { did, isMove } from './timeline-words';
import { formatClock, formatDuration } from './words';

/** Columns begin at multiples of this time, so that they do not change while they move to the left. */
export const BUCKET_S = 30;

/** Moves of memory within as much time are one mark: at 240 px an arrow is half as wide. */
const GATHER_S = 120;

/** No share is drawn lower than this: a short turn must not vanish. */
const LEAST_SHARE = 0.2;

/** The order of the shares, from below. */
const KINDS: readonly SpanKind[] = ['held', 'suspended', 'waited'];

export function isCoarse({ zoom_s }: IWindow): boolean {
  return zoom_s === 1800;
}

interface IColumn {
  readonly from: number;
  readonly to: number;
  readonly sums_s: Record<SpanKind, number>;
  times: number;
}

/** Returns the columns of one row, as stacked shares. */
export function sharesOf(entries: readonly IHistory[], window: IWindow): ISpan[] {
  const columns = new Map<number, IColumn>();
  for (const entry of entries) {
    if (entry.kind !== 'out' && entry.kind !== 'in') {
      add(columns, entry, entry.kind, window);
    }
  }
  const name = nameOf(entries[entries.length - 1]);
  return [...columns.values()].flatMap(column => stacked(column, name, window));
}

function add(
  columns: Map<number, IColumn>,
  entry: IHistory,
  kind: SpanKind,
  window: IWindow
): void {
  const began = Math.max(entry.began_at, window.from);
  const ended = Math.min(entry.ended_at ?? window.to, window.to);
  for (let at = Math.floor(began / BUCKET_S) * BUCKET_S; at <= ended; at += BUCKET_S) {
    const from = Math.max(at, window.from);
    const to = Math.min(at + BUCKET_S, window.to);
    const column = columns.get(at) ?? {
      from,
      to,
      sums_s: { held: 0, waited: 0, suspended: 0 },
      times: 0
    };
    columns.set(at, column);
    column.sums_s[kind] += Math.max(0, Math.min(ended, to) - Math.max(began, from));
    column.times += kind === 'held' ? 1 : 0;
  }
}

function stacked(column: IColumn, name: string, window: IWindow): ISpan[] {
  const { from, to, sums_s } = column;
  const x = percent(from, window);
  const title = titleOf(column, name);
  let height = 0;
  const spans: ISpan[] = [];
  for (const kind of KINDS) {
    if (sums_s[kind] <= 0) {
      continue;
    }
    const share = Math.max(LEAST_SHARE, sums_s[kind] / Math.max(1, to - from));
    spans.push({
      key: `${kind}-${from}`,
      kind,
      x,
      width: percent(to, window) - x,
      from: Math.min(height, 1 - LEAST_SHARE),
      share: Math.min(share, Math.max(LEAST_SHARE, 1 - height)),
      title
    });
    height += share;
  }
  return spans;
}

function titleOf({ from, to, sums_s, times }: IColumn, name: string): string {
  const parts = KINDS.filter(kind => sums_s[kind] > 0).map(kind => {
    const lasted = formatDuration(sums_s[kind]);
    return kind === 'held' && times > 1
      ? trans._n(
          '%2 %1 time, in all for %3',
          '%2 %1 times, in all for %3',
          times,
          did(kind),
          lasted
        )
      : trans.__('%1 for %2', did(kind), lasted);
  });
  return `${name}, ${formatClock(from, true)} – ${formatClock(to, true)}: ${parts.join(', ')}`;
}

// --- moves of memory ----------------------------------------------------------------------------

/** Joins moves in one direction that are close to each other into one mark. */
export function gathered(entries: readonly IHistory[], window: IWindow): IMark[] {
  const groups = new Map<string, IHistory[]>();
  for (const entry of entries.filter(isMove)) {
    const begin = Math.floor(entry.began_at / GATHER_S) * GATHER_S;
    const key = `${entry.kind}-${entry.ok || entry.ended_at === null}-${begin}`;
    groups.set(key, [...(groups.get(key) ?? []), entry]);
  }
  return [...groups.values()].flatMap(group => together(group, window));
}

function together(group: readonly IHistory[], window: IWindow): IMark[] {
  const [first, ...more] = group;
  if (first === undefined) {
    return [];
  }
  const one = mark(first, window);
  if (more.length === 0) {
    return [one];
  }
  const to = Math.max(...group.map(entry => percent(entry.ended_at ?? window.to, window)));
  const bytes = group.reduce((sum, entry) => sum + entry.bytes_moved, 0);
  const all = trans._n('%2 %1 time', '%2 %1 times', group.length, movedTogether(one));
  const done = `${formatClock(first.began_at, true)} ${nameOf(first)}: ${all}`;
  const title = one.ok && bytes > 0 ? trans.__('%1, %2 in all', done, formatBytes(bytes)) : done;
  return [{ ...one, x: (one.from + to) / 2, width: to - one.from, title }];
}

function movedTogether({ direction, ok }: IMark): string {
  if (direction === 'out') {
    return ok ? trans.__('memory paged out') : trans.__('memory could not be paged out');
  }
  return ok ? trans.__('memory paged in') : trans.__('memory could not be paged in');
}
