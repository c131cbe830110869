/** The shapes of a row: spans and marks in percent of the width. Pure. */

import type { HistoryKind, IHistory } from '../model/types';
import { trans } from '../model/translation';

import { nameOf } from './people';
import { did, does, isMove, what } from './timeline-words';
import { formatClock, formatDuration } from './words';

/** Number of seconds shown. */
export const ZOOMS = [60, 300, 1800] as const;
export type Zoom = (typeof ZOOMS)[number];

export interface IWindow {
  readonly from: number;
  readonly to: number;
  readonly zoom_s: Zoom;
}

/** Spans of one kind with a smaller gap between them are drawn as one: in a sidebar the gap is about
 * a pixel. */
const MERGED_GAP_PERCENT = 0.25;

/** The least width of a span: a short turn must not vanish. */
const SPAN_LEAST_PERCENT = 0.6;

export type SpanKind = Exclude<HistoryKind, 'out' | 'in'>;

export interface ISpan {
  readonly key: string;
  readonly kind: SpanKind;
  readonly x: number;
  readonly width: number;
  /** Where the span begins, from below, and how high it is, as parts of the row's height. 0 and
   * 1, except in half an hour, which shows shares of time (timeline-buckets.ts). */
  readonly from: number;
  readonly share: number;
  readonly title: string;
}

export interface IMark {
  readonly key: string;
  readonly direction: 'out' | 'in';
  /** Position of the arrow: the middle of the move. */
  readonly x: number;
  readonly from: number;
  readonly width: number;
  readonly ok: boolean;
  readonly title: string;
}

export function percent(at: number, { from, zoom_s }: IWindow): number {
  return Math.min(100, Math.max(0, (100 * (at - from)) / zoom_s));
}

// --- spans --------------------------------------------------------------------------------------

interface IRun {
  readonly first: IHistory;
  readonly kind: SpanKind;
  count: number;
  from: number;
  to: number;
  ended_at: number | null;
}

export function spans(entries: readonly IHistory[], window: IWindow): ISpan[] {
  const runs: IRun[] = [];
  for (const entry of entries) {
    if (entry.kind === 'out' || entry.kind === 'in') {
      continue;
    }
    const from = percent(entry.began_at, window);
    const to = percent(entry.ended_at ?? window.to, window);
    const last = runs[runs.length - 1];
    if (last !== undefined && last.kind === entry.kind && from - last.to < MERGED_GAP_PERCENT) {
      last.to = Math.max(last.to, to);
      last.ended_at = entry.ended_at;
      last.count += 1;
    } else {
      const { kind, ended_at } = entry;
      runs.push({ first: entry, kind, count: 1, from, to, ended_at });
    }
  }
  return runs.map(run => span(run, window));
}

function span(run: IRun, window: IWindow): ISpan {
  const width = Math.max(SPAN_LEAST_PERCENT, run.to - run.from);
  return {
    key: run.first.id,
    kind: run.kind,
    x: Math.min(run.from, 100 - width),
    width,
    from: 0,
    share: 1,
    title: spanTitle(run, window.to)
  };
}

function spanTitle(run: IRun, now: number): string {
  const goesOn = run.ended_at === null;
  const verb = goesOn ? does(run.kind) : did(run.kind);
  const lasted = formatDuration((run.ended_at ?? now) - run.first.began_at);
  const since = `${formatClock(run.first.began_at, true)} – ${
    run.ended_at === null ? trans.__('now') : formatClock(run.ended_at, true)
  }`;
  const predicate =
    run.count > 1
      ? trans._n('%2, %1 time within %3', '%2, %1 times within %3', run.count, verb, lasted)
      : trans.__('%1 for %2', verb, lasted);
  return `${nameOf(run.first)} ${predicate} (${since})`;
}

// --- moves of memory ----------------------------------------------------------------------------

export function marksOf(entries: readonly IHistory[], window: IWindow): IMark[] {
  return entries.filter(isMove).map(entry => mark(entry, window));
}

export function mark(entry: IHistory, window: IWindow): IMark {
  const from = percent(entry.began_at, window);
  const to = percent(entry.ended_at ?? window.to, window);
  return {
    key: entry.id,
    direction: entry.kind === 'in' ? 'in' : 'out',
    x: (from + to) / 2,
    from,
    width: to - from,
    ok: entry.ok || entry.ended_at === null,
    title: `${formatClock(entry.began_at, true)} ${nameOf(entry)}: ${what(entry, window.to)}`
  };
}
