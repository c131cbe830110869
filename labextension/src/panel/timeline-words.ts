/** The timeline in words: what happened, for tooltips, lists and screen readers. Pure. */

import { formatBytes } from '../model/format';
import type { IHistoryEntry } from '../model/types';

import { nameOf } from './people';
import type { IRow, IWindow, SpanKind, Zoom } from './timeline-model';
import { counted, formatDuration, formatSpeed } from './words';

export function isMove(entry: IHistoryEntry): boolean {
  return entry.kind === 'out' || entry.kind === 'in';
}

export const DID: Readonly<Record<SpanKind, string>> = {
  held: 'had the GPU',
  waited: 'waited for the GPU',
  suspended: 'was suspended in mid-cell'
};

export const DOES: Readonly<Record<SpanKind, string>> = {
  held: 'has the GPU',
  waited: 'waits for the GPU',
  suspended: 'is suspended in mid-cell'
};

/** What happened, as the end of a sentence about it. */
export function what(entry: IHistoryEntry, now: number): string {
  const lasted_s = (entry.ended_at ?? now) - entry.began_at;
  const lasted = formatDuration(lasted_s);
  if (entry.kind !== 'out' && entry.kind !== 'in') {
    const verb = (entry.ended_at === null ? DOES : DID)[entry.kind];
    return `${verb} for ${lasted}`;
  }
  const way = entry.kind === 'out' ? 'out to system RAM' : 'back into the GPU';
  if (entry.ended_at === null) {
    return `memory is moving ${way}, for ${lasted} so far`;
  }
  if (!entry.ok) {
    return `memory could not be moved ${way} (after ${lasted})`;
  }
  const speed = formatSpeed(entry.bytes_moved, lasted_s);
  const ahead = entry.hinted ? ', ahead of use' : '';
  const size = formatBytes(entry.bytes_moved);
  return `${size} moved ${way} in ${lasted}${speed && `, ${speed}`}${ahead}`;
}

export function lastMove(entries: readonly IHistoryEntry[], now: number): string {
  const moves = entries.filter(entry => isMove(entry) && entry.ended_at !== null && entry.ok);
  const last = moves.sort((a, b) => (b.ended_at ?? 0) - (a.ended_at ?? 0))[0];
  return last === undefined ? '' : `Last move: ${nameOf(last)}, ${what(last, now)}.`;
}

export function rowText(name: string, entries: readonly IHistoryEntry[], window: IWindow): string {
  const parts: string[] = [];
  for (const kind of ['held', 'waited', 'suspended'] as const) {
    const those = entries.filter(entry => entry.kind === kind);
    const sum_s = those.reduce((sum, entry) => sum + inWindow_s(entry, window), 0);
    if (those.length > 0) {
      parts.push(`${DID[kind]} for ${formatDuration(sum_s)}`);
    }
  }
  const moves = entries.filter(isMove).length;
  if (moves > 0) {
    parts.push(`its memory moved ${counted(moves, 'time')}`);
  }
  return `${name} ${parts.join(', ')}`;
}

function inWindow_s(entry: IHistoryEntry, { from, to }: IWindow): number {
  return Math.max(0, (entry.ended_at ?? to) - Math.max(from, entry.began_at));
}

export function spoken(rows: readonly IRow[], zoom_s: Zoom): string {
  const span = zoom_s === 60 ? 'minute' : `${zoom_s / 60} minutes`;
  if (rows.length === 0) {
    return `Timeline: nobody used the GPU in the last ${span}.`;
  }
  return `Timeline of the last ${span}: ${rows.map(each => each.text).join('; ')}.`;
}
