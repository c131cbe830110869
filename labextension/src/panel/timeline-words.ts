/** The timeline in words: what happened, for tooltips, lists and screen readers. Pure. */

import { formatBytes } from '../model/format';
import type { IGpu, IHistory } from '../model/types';
import { trans } from '../model/translation';

import { nameOf } from './people';
import type { IRow } from './timeline-model';
import type { IWindow, SpanKind, Zoom } from './timeline-shapes';
import { formatClock, formatDuration, formatSoFar, formatSpeed } from './words';

export function isMove(entry: IHistory): boolean {
  return entry.kind === 'out' || entry.kind === 'in';
}

export function did(kind: SpanKind): string {
  return {
    held: trans.__('had the GPU'),
    waited: trans.__('waited for the GPU'),
    suspended: trans.__('was suspended in mid-cell')
  }[kind];
}

export function does(kind: SpanKind): string {
  return {
    held: trans.__('has the GPU'),
    waited: trans.__('waits for the GPU'),
    suspended: trans.__('is suspended in mid-cell')
  }[kind];
}

/** Returns what happened, as the predicate of a sentence about the notebook. */
export function what(entry: IHistory, now: number): string {
  const goesOn = entry.ended_at === null;
  const lasted_s = (entry.ended_at ?? now) - entry.began_at;
  const lasted = goesOn ? formatSoFar(lasted_s) : formatDuration(lasted_s);
  if (entry.kind !== 'out' && entry.kind !== 'in') {
    const verb = goesOn ? does(entry.kind) : did(entry.kind);
    // "for 0 s" says nothing about what has just begun.
    return goesOn && lasted_s < 1 ? verb : trans.__('%1 for %2', verb, lasted);
  }
  const out = entry.kind === 'out';
  if (goesOn) {
    const moves = out
      ? trans.__('pages its memory out to system RAM')
      : trans.__('pages its memory in again');
    return lasted_s < 1 ? moves : trans.__('%1, for %2 so far', moves, lasted);
  }
  if (!entry.ok) {
    return out
      ? trans.__('could not page its memory out (after %1)', lasted)
      : trans.__('could not page its memory in (after %1)', lasted);
  }
  const size = formatBytes(entry.bytes_moved);
  const moved = out
    ? trans.__('paged %1 out in %2', size, lasted)
    : trans.__('paged %1 in, in %2', size, lasted);
  const speed = formatSpeed(entry.bytes_moved, lasted_s);
  const ahead = entry.hinted ? trans.__('ahead of use') : '';
  return [moved, speed, ahead].filter(text => text !== '').join(', ');
}

/** A line of "what happened". */
export interface IListed {
  readonly key: string;
  readonly time: string;
  readonly name: string;
  readonly what: string;
}

/** Short cells of one notebook in a row are listed as one. */
interface IGroup {
  readonly latest: IHistory;
  first: IHistory;
  count: number;
}

/** Lists what happened in the time shown, newest first, at most `most` lines. */
export function listed(gpu: IGpu, now: number, zoom_s: Zoom, most = 40): IListed[] {
  const from = now - zoom_s;
  const newest = gpu.history
    .filter(entry => (entry.ended_at ?? now) >= from && entry.began_at <= now)
    .sort((a, b) => b.began_at - a.began_at);
  const groups: IGroup[] = [];
  for (const entry of newest) {
    const last = groups[groups.length - 1];
    if (last !== undefined && repeats(last.first, entry)) {
      last.first = entry;
      last.count += 1;
    } else if (groups.length === most) {
      break;
    } else {
      groups.push({ latest: entry, first: entry, count: 1 });
    }
  }
  return groups.map(({ latest, first, count }) => ({
    key: latest.id,
    time: formatClock(first.began_at, true),
    name: nameOf(latest),
    what: count === 1 ? what(latest, now) : often(latest, first, count, now)
  }));
}

/** Returns whether `before` and `entry` are two short cells of one notebook. */
function repeats(entry: IHistory, before: IHistory): boolean {
  const same = entry.session === before.session && entry.kind === 'held' && before.kind === 'held';
  return same && before.ended_at !== null && entry.began_at - before.ended_at < SOON_S;
}

/** Longest pause between two cells of one notebook that are listed as one. */
const SOON_S = 10;

function often(latest: IHistory, first: IHistory, count: number, now: number): string {
  const lasted = formatDuration((latest.ended_at ?? now) - first.began_at);
  return trans._n('had the GPU %1 time within %2', 'had the GPU %1 times within %2', count, lasted);
}

export function rowText(name: string, entries: readonly IHistory[], window: IWindow): string {
  const parts: string[] = [];
  for (const kind of ['held', 'waited', 'suspended'] as const) {
    const those = entries.filter(entry => entry.kind === kind);
    const sum_s = those.reduce((sum, entry) => sum + inWindow_s(entry, window), 0);
    if (those.length > 0) {
      parts.push(trans.__('%1 for %2', did(kind), formatDuration(sum_s)));
    }
  }
  const moves = entries.filter(isMove).length;
  if (moves > 0) {
    parts.push(trans._n('its memory moved %1 time', 'its memory moved %1 times', moves));
  }
  return `${name} ${parts.join(', ')}`;
}

function inWindow_s(entry: IHistory, { from, to }: IWindow): number {
  return Math.max(0, (entry.ended_at ?? to) - Math.max(from, entry.began_at));
}

export function timelineText(rows: readonly IRow[], zoom_s: Zoom): string {
  const minutes = zoom_s / 60;
  if (rows.length === 0) {
    return trans._n(
      'Timeline: nobody used the GPU in the last minute.',
      'Timeline: nobody used the GPU in the last %1 minutes.',
      minutes
    );
  }
  return trans._n(
    'Timeline of the last minute: %2.',
    'Timeline of the last %1 minutes: %2.',
    minutes,
    rows.map(each => each.text).join('; ')
  );
}
