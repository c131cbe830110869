/** The timeline as shapes: history entries in, rows of spans and marks in percent out. Pure. */

import type { IGpu, IHistory } from '../model/types';

import { LOOKS, heirOf, isNamed, lookOf, marksOwn, nameOf, sessionOf } from './people';
import { gathered, isCoarse, sharesOf } from './timeline-buckets';
import { marksOf, percent, spans } from './timeline-shapes';
import type { IMark, ISpan, IWindow, SpanKind, Zoom } from './timeline-shapes';
import { rowText, timelineText } from './timeline-words';
import { formatClock } from './words';

/** Seconds between the lines of the axis, and between the labels: as many as fit 240 px. */
const TICK_S: Readonly<Record<Zoom, number>> = { 60: 10, 300: 60, 1800: 300 };
const LABEL_S: Readonly<Record<Zoom, number>> = { 60: 20, 300: 120, 1800: 600 };

/** The distance (percent of the width) of a label from the left edge, where it would be cut, and
 * from the right edge, where "now" is. The labels of one minute have seconds, so they are longer. */
const EDGE_PERCENT: Readonly<Record<Zoom, number>> = { 60: 12, 300: 8, 1800: 8 };
const NOW_PERCENT: Readonly<Record<Zoom, number>> = { 60: 24, 300: 19, 1800: 19 };

/** Number of rows drawn until the user asks for more. */
export const FEW_ROWS = 6;

export interface IRow {
  /** The session of the notebook's kernel, or of its last one. */
  readonly session: string;
  readonly name: string;
  readonly look: number;
  readonly mine: boolean;
  readonly spans: readonly ISpan[];
  readonly marks: readonly IMark[];
  /** The content of the row, in one sentence. */
  readonly text: string;
}

/** Marks of the picture that its key must explain. */
export type KeyName = SpanKind | 'out' | 'in' | 'failed' | 'share' | 'unrecorded';

export interface ITick {
  readonly key: number;
  readonly x: number;
  readonly label: string;
}

export interface ITimeline {
  readonly rows: readonly IRow[];
  /** Rows that were left out. */
  readonly hidden: number;
  readonly ticks: readonly ITick[];
  readonly key: readonly KeyName[];
  /** Nothing is recorded left of this percentage. */
  readonly unrecorded: number;
  readonly text: string;
}

/** `now`: Unix seconds, the right edge. `history_s`: how far back the server remembers. */
export function timeline(
  gpu: IGpu,
  now: number,
  zoom_s: Zoom,
  history_s: number,
  most_rows: number = FEW_ROWS
): ITimeline {
  const window: IWindow = { from: now - zoom_s, to: now, zoom_s };
  const entries = gpu.history.filter(entry => touches(entry, window));
  const byNotebook = joined(gpu, grouped(entries));
  const shown = chosen(gpu, byNotebook, most_rows);
  const rows = shown.map(id => row(gpu, id, byNotebook.get(id) ?? [], window));
  const unrecorded = Math.max(0, 100 * (1 - history_s / zoom_s));
  return {
    rows,
    hidden: byNotebook.size - rows.length,
    ticks: ticks(window),
    unrecorded,
    key: keyOf(rows, isCoarse(window), unrecorded > 0),
    text: timelineText(rows, zoom_s)
  };
}

/** How often the picture must be drawn again so that it moves by about a pixel, in seconds. */
export function redrawEvery_s(zoom_s: Zoom): number {
  return Math.max(1, zoom_s / 300);
}

// --- rows ---------------------------------------------------------------------------------------

function touches(entry: IHistory, { from, to }: IWindow): boolean {
  return (entry.ended_at ?? to) >= from && entry.began_at <= to;
}

function grouped(entries: readonly IHistory[]): Map<string, IHistory[]> {
  const groups = new Map<string, IHistory[]>();
  for (const entry of entries) {
    const group = groups.get(entry.session);
    if (group === undefined) {
      groups.set(entry.session, [entry]);
    } else {
      group.push(entry);
    }
  }
  return groups;
}

/** A notebook is one row, also after its kernel was restarted, or shut down and started again:
 * the entries of an ended session go to the session that has replaced it, under that session's
 * id. */
function joined(gpu: IGpu, bySession: Map<string, IHistory[]>): Map<string, IHistory[]> {
  const rows = new Map<string, IHistory[]>();
  const ended = new Map<string, string>();
  const newestFirst = [...bySession].sort((a, b) => compare(began(b[1]), began(a[1])));
  for (const [session, entries] of newestFirst) {
    let id = session;
    const [entry] = entries;
    if (entry !== undefined && sessionOf(gpu, session) === undefined && isNamed(entry)) {
      const notebook = entry.path ?? entry.name;
      id = heirOf(gpu, entry)?.id ?? ended.get(notebook) ?? session;
      ended.set(notebook, id);
    }
    rows.set(id, [...(rows.get(id) ?? []), ...entries]);
  }
  return rows;
}

function began(entries: readonly IHistory[]): number {
  return Math.max(...entries.map(entry => entry.began_at));
}

/** Returns the notebooks that get a row: up to half of the rows are the reader's own, then the
 * most recently active ones. Rows are drawn in the order in which sessions became known, so that
 * they keep their places. */
function chosen(gpu: IGpu, groups: Map<string, IHistory[]>, most: number): string[] {
  const rank = new Map(gpu.sessions.map((session, index) => [session.id, index]));
  const order = (id: string) => rank.get(id) ?? gpu.sessions.length;
  const last = (id: string) =>
    Math.max(...(groups.get(id) ?? []).map(entry => entry.ended_at ?? Infinity));
  const recent = [...groups.keys()].sort((a, b) => compare(last(b), last(a)));
  const own = recent.filter(id => sessionOf(gpu, id)?.mine).slice(0, Math.ceil(most / 2));
  return [...new Set([...own, ...recent])].slice(0, most).sort((a, b) => order(a) - order(b));
}

/** Compares like a difference, also for infinities. */
function compare(a: number, b: number): number {
  return a === b ? 0 : a < b ? -1 : 1;
}

function row(gpu: IGpu, id: string, entries: IHistory[], window: IWindow): IRow {
  const session = sessionOf(gpu, id);
  const byTime = [...entries].sort((a, b) => a.began_at - b.began_at);
  const name = nameOf(session ?? byTime[byTime.length - 1]);
  return {
    session: id,
    name,
    look: session === undefined ? LOOKS : lookOf(gpu, id),
    mine: (session?.mine ?? false) && marksOwn(gpu),
    spans: isCoarse(window) ? sharesOf(byTime, window) : spans(byTime, window),
    marks: isCoarse(window) ? gathered(byTime, window) : marksOf(byTime, window),
    text: rowText(name, byTime, window)
  };
}

// --- key ----------------------------------------------------------------------------------------

const KEY: readonly KeyName[] = [
  'held',
  'waited',
  'suspended',
  'share',
  'out',
  'in',
  'failed',
  'unrecorded'
];

function keyOf(rows: readonly IRow[], coarse: boolean, unrecorded: boolean): KeyName[] {
  const found = new Set<KeyName>();
  for (const { spans, marks } of rows) {
    spans.forEach(span => found.add(span.kind));
    marks.forEach(mark => found.add(mark.ok ? mark.direction : 'failed'));
    if (coarse && spans.length > 0) {
      found.add('share');
    }
  }
  if (unrecorded) {
    found.add('unrecorded');
  }
  return KEY.filter(name => found.has(name));
}

// --- axis ---------------------------------------------------------------------------------------

function ticks(window: IWindow): ITick[] {
  const { zoom_s } = window;
  const step_s = TICK_S[zoom_s];
  const found: ITick[] = [];
  for (let at = Math.ceil(window.from / step_s) * step_s; at <= window.to; at += step_s) {
    const x = percent(at, window);
    const fits = x >= EDGE_PERCENT[zoom_s] && x <= 100 - NOW_PERCENT[zoom_s];
    const has = fits && at % LABEL_S[zoom_s] === 0;
    found.push({ key: at, x, label: has ? formatClock(at, zoom_s === 60) : '' });
  }
  return found;
}
