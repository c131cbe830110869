/** The timeline as shapes: history entries in, rows of spans and marks in percent out. Pure. */

import type { HistoryKind, IGpu, IHistoryEntry } from '../model/types';

import { LOOKS, heirOf, isNamed, lookOf, marksOwn, nameOf, sessionOf } from './people';
import { DID, DOES, isMove, lastMove, rowText, spoken, what } from './timeline-words';
import { formatClock, formatDuration } from './words';

/** How many seconds are shown. */
export const ZOOMS = [60, 300, 1800] as const;
export type Zoom = (typeof ZOOMS)[number];

/** Ticks of the axis: what still fits 240 px. */
const TICK_S: Readonly<Record<Zoom, number>> = { 60: 15, 300: 60, 1800: 300 };

/** Rows drawn unless asked for more. */
export const FEW_ROWS = 6;

/** Spans of one kind closer than this (percent of the width) are drawn as one: less than a pixel
 * lies between them, and half an hour of short cells stays a few hundred shapes. */
const MERGE_PERCENT = 0.25;

/** No span is drawn narrower than this: a short turn must not vanish. */
const LEAST_PERCENT = 0.6;

/** A label of the axis keeps this far (percent) from either edge, where it would be cut. */
const EDGE_PERCENT = 7;

/** The axis' last label, "now", keeps other labels this far away. */
const NOW_PERCENT = 14;

export type SpanKind = Exclude<HistoryKind, 'out' | 'in'>;

export interface ISpan {
  readonly key: string;
  readonly kind: SpanKind;
  readonly x: number;
  readonly width: number;
  readonly title: string;
}

export interface IMark {
  readonly key: string;
  readonly direction: 'out' | 'in';
  /** Of the arrow: the middle of the move. */
  readonly x: number;
  readonly from: number;
  readonly width: number;
  readonly ok: boolean;
  readonly title: string;
}

export interface IRow {
  /** Of the notebook's kernel, or of its last one. */
  readonly session: string;
  readonly name: string;
  readonly look: number;
  readonly mine: boolean;
  readonly spans: readonly ISpan[];
  readonly marks: readonly IMark[];
  /** What the row shows, in one sentence. */
  readonly text: string;
}

export interface ITick {
  readonly key: number;
  readonly x: number;
  readonly label: string;
}

export interface IListed {
  readonly key: string;
  readonly time: string;
  readonly name: string;
  readonly what: string;
}

export interface ITimeline {
  readonly rows: readonly IRow[];
  /** Rows that were left out. */
  readonly hidden: number;
  readonly ticks: readonly ITick[];
  /** The newest finished move in sight, with its speed: what a tooltip says, without a mouse. */
  readonly lastMove: string;
  /** Percent at the left of which nothing is recorded. */
  readonly unrecorded: number;
  readonly text: string;
}

export interface IWindow {
  readonly from: number;
  readonly to: number;
  readonly zoom_s: Zoom;
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
  return {
    rows,
    hidden: byNotebook.size - rows.length,
    ticks: ticks(window),
    unrecorded: Math.max(0, 100 * (1 - history_s / zoom_s)),
    lastMove: lastMove(entries, now),
    text: spoken(rows, zoom_s)
  };
}

/** The newest `most` entries as lines of a list, newest first. */
export function listed(gpu: IGpu, now: number, zoom_s: Zoom, most = 40): IListed[] {
  const window: IWindow = { from: now - zoom_s, to: now, zoom_s };
  return gpu.history
    .filter(entry => touches(entry, window))
    .sort((a, b) => b.began_at - a.began_at)
    .slice(0, most)
    .map(entry => ({
      key: entry.id,
      time: formatClock(entry.began_at, true),
      name: nameOf(entry),
      what: what(entry, now)
    }));
}

/** How often the picture must be drawn again so that it moves by about a pixel, in seconds. */
export function redrawEvery_s(zoom_s: Zoom): number {
  return Math.max(1, zoom_s / 300);
}

// --- rows ---------------------------------------------------------------------------------------

function touches(entry: IHistoryEntry, { from, to }: IWindow): boolean {
  return (entry.ended_at ?? to) >= from && entry.began_at <= to;
}

function grouped(entries: readonly IHistoryEntry[]): Map<string, IHistoryEntry[]> {
  const groups = new Map<string, IHistoryEntry[]>();
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

/** A notebook is one row, also after its kernel was restarted, or shut down and started anew: what
 * an ended session did goes to the one that has taken its place, by that one's id. */
function joined(gpu: IGpu, bySession: Map<string, IHistoryEntry[]>): Map<string, IHistoryEntry[]> {
  const rows = new Map<string, IHistoryEntry[]>();
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

function began(entries: readonly IHistoryEntry[]): number {
  return Math.max(...entries.map(entry => entry.began_at));
}

/** Which notebooks get a row: half of them for the reader's own, then who did something last; drawn
 * in the order in which sessions are known, so that rows keep their places. */
function chosen(gpu: IGpu, groups: Map<string, IHistoryEntry[]>, most: number): string[] {
  const rank = new Map(gpu.sessions.map((session, index) => [session.id, index]));
  const order = (id: string) => rank.get(id) ?? gpu.sessions.length;
  const last = (id: string) =>
    Math.max(...(groups.get(id) ?? []).map(entry => entry.ended_at ?? Infinity));
  const recent = [...groups.keys()].sort((a, b) => compare(last(b), last(a)));
  const own = recent.filter(id => sessionOf(gpu, id)?.mine).slice(0, Math.ceil(most / 2));
  return [...new Set([...own, ...recent])].slice(0, most).sort((a, b) => order(a) - order(b));
}

/** Like a difference, also of infinities. */
function compare(a: number, b: number): number {
  return a === b ? 0 : a < b ? -1 : 1;
}

function row(gpu: IGpu, id: string, entries: IHistoryEntry[], window: IWindow): IRow {
  const session = sessionOf(gpu, id);
  const byTime = [...entries].sort((a, b) => a.began_at - b.began_at);
  const name = nameOf(session ?? byTime[byTime.length - 1]);
  return {
    session: id,
    name,
    look: session === undefined ? LOOKS : lookOf(gpu, id),
    mine: (session?.mine ?? false) && marksOwn(gpu),
    spans: spans(byTime, window),
    marks: byTime.filter(isMove).map(entry => mark(entry, window)),
    text: rowText(name, byTime, window)
  };
}

function percent(at: number, { from, zoom_s }: IWindow): number {
  return Math.min(100, Math.max(0, (100 * (at - from)) / zoom_s));
}

// --- spans --------------------------------------------------------------------------------------

interface IRun {
  readonly first: IHistoryEntry;
  readonly kind: SpanKind;
  count: number;
  from: number;
  to: number;
  ended_at: number | null;
}

function spans(entries: readonly IHistoryEntry[], window: IWindow): ISpan[] {
  const runs: IRun[] = [];
  for (const entry of entries) {
    if (entry.kind === 'out' || entry.kind === 'in') {
      continue;
    }
    const from = percent(entry.began_at, window);
    const to = percent(entry.ended_at ?? window.to, window);
    const last = runs[runs.length - 1];
    if (last !== undefined && last.kind === entry.kind && from - last.to < MERGE_PERCENT) {
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
  const width = Math.max(LEAST_PERCENT, run.to - run.from);
  return {
    key: run.first.id,
    kind: run.kind,
    x: Math.min(run.from, 100 - width),
    width,
    title: spanTitle(run, window.to)
  };
}

function spanTitle(run: IRun, now: number): string {
  const goesOn = run.ended_at === null;
  const verb = (goesOn ? DOES : DID)[run.kind];
  const times = run.count > 1 ? `, ${run.count} times within` : ' for';
  const lasted = formatDuration((run.ended_at ?? now) - run.first.began_at);
  const since = `${formatClock(run.first.began_at, true)} – ${
    run.ended_at === null ? 'now' : formatClock(run.ended_at, true)
  }`;
  return `${nameOf(run.first)} ${verb}${times} ${lasted} (${since})`;
}

// --- moves of memory ----------------------------------------------------------------------------

function mark(entry: IHistoryEntry, window: IWindow): IMark {
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

// --- axis ---------------------------------------------------------------------------------------

function ticks(window: IWindow): ITick[] {
  const step_s = TICK_S[window.zoom_s];
  const found: ITick[] = [];
  for (let at = Math.ceil(window.from / step_s) * step_s; at <= window.to; at += step_s) {
    const x = percent(at, window);
    const fits = x >= EDGE_PERCENT && x <= 100 - NOW_PERCENT;
    found.push({ key: at, x, label: fits ? formatClock(at, step_s < 60) : '' });
  }
  return found;
}
