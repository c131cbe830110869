/** The segments of the two memory bars; their sizes add up to the whole. Pure. */

import { formatBytes } from '../model/format';
import { outsideText } from '../model/phrases';
import type { IGpu, ISession } from '../model/types';
import { UNNAMED_LEAST_BYTES, outside, unnamed } from '../model/terms';
import { trans } from '../model/translation';

import { lookOf, marksOwn, nameOf } from './people';

export interface ISegment {
  readonly key: string;
  readonly label: string;
  readonly bytes: number;
  readonly share: number;
  /** 0 … LOOKS-1 for a notebook; otherwise the kind of memory. */
  readonly look: number | 'rest' | 'outside' | 'free';
  /** True if marked as the reader's own. */
  readonly mine: boolean;
  /** A second figure, of the bar's second column; '': none. */
  readonly beside: string;
  readonly title: string;
}

export interface IBar {
  readonly title: string;
  /** Heads of the legend's columns if there are two; [] if there is one. */
  readonly columns: readonly string[];
  /** "1.5 of 8 GiB used", for the right end of the title. */
  readonly summary: string;
  readonly segments: readonly ISegment[];
  /** All of it in one sentence, for users who cannot see the bar. */
  readonly text: string;
}

/** More notebooks than this are drawn as one: a dozen slivers cannot be read. */
const MOST_SEGMENTS = 5;

type Amount = 'resident_bytes' | 'paged_out_bytes';

/** The GPU's own memory: by notebook, outside Kiwi, free. */
export function gpuBar(gpu: IGpu): IBar {
  const total = Math.max(1, gpu.memory.total_bytes);
  const segments = byNotebook(gpu, 'resident_bytes', total);
  segments.push(...outsideOf(gpu, total));
  const free = Math.max(0, gpu.memory.free_bytes);
  segments.push(segment('free', trans.__('Free'), free, total, 'free'));
  const summary = trans.__('%1 free of %2', formatBytes(free), formatBytes(total));
  return bar(trans.__('GPU memory'), summary, segments);
}

/** Number of programs outside Kiwi that are named, the largest; the rest is one segment. */
const MOST_OUTSIDE = 3;

/** Returns the memory of programs outside Kiwi: by program where NVML names them. */
function outsideOf(gpu: IGpu, total: number): ISegment[] {
  const named = gpu.outside.slice(0, MOST_OUTSIDE);
  const segments = named.map(program => {
    const name = outsideText(program);
    const title = trans.__('%1: %2, held outside Kiwi', name, formatBytes(program.used_bytes));
    const key = `outside-${program.pid}`;
    return segment(key, name, program.used_bytes, total, 'outside', { title });
  });
  const known = named.reduce((sum, program) => sum + program.used_bytes, 0);
  const rest = gpu.memory.outside_bytes - known;
  const more = gpu.outside.length > MOST_OUTSIDE;
  if (more || rest >= UNNAMED_LEAST_BYTES) {
    const title = `${formatBytes(rest)} ${more ? outside() : unnamed()}`;
    segments.push(segment('outside', trans.__('Outside Kiwi'), rest, total, 'outside', { title }));
  }
  return segments;
}

/** System RAM: the paged-out memory by notebook, against its limit, and beside it all the RAM of
 * the reader's own notebooks. null: nothing to show. */
export function hostBar(gpu: IGpu): IBar | null {
  const out = gpu.sessions.reduce((sum, session) => sum + session.paged_out_bytes, 0);
  const some = gpu.sessions.some(session => session.ram_bytes !== null);
  if (out <= 0 && !some) {
    return null;
  }
  const budget = Math.max(out, gpu.memory.host_budget_bytes, 1);
  const segments = byNotebook(gpu, 'paged_out_bytes', budget);
  segments.push(...onlyRam(gpu));
  if (out > 0) {
    segments.push(segment('free', trans.__('Room'), budget - out, budget, 'free'));
  }
  const summary =
    out > 0
      ? trans.__('room for %1 of %2', formatBytes(budget - out), formatBytes(budget))
      : trans.__('nothing paged out');
  const columns = some ? [trans.__('paged out'), trans.__('its RAM')] : [];
  return bar(trans.__('System RAM'), summary, segments, columns);
}

/** Returns the reader's largest notebooks by RAM that have nothing paged out. */
function onlyRam(gpu: IGpu): ISegment[] {
  return gpu.sessions
    .filter(({ ram_bytes, paged_out_bytes }) => ram_bytes !== null && paged_out_bytes <= 0)
    .sort((a, b) => (b.ram_bytes ?? 0) - (a.ram_bytes ?? 0))
    .slice(0, MOST_SEGMENTS)
    .map(session => notebook(gpu, session, 0, 1, 'paged_out_bytes', session.ram_bytes));
}

function byNotebook(gpu: IGpu, amount: Amount, whole: number): ISegment[] {
  const holding = gpu.sessions
    .filter(session => session[amount] > 0)
    .sort((a, b) => b[amount] - a[amount]);
  const shown = holding.length > MOST_SEGMENTS + 1 ? holding.slice(0, MOST_SEGMENTS) : holding;
  const rest = holding.slice(shown.length);
  const ram = (session: ISession) => (amount === 'paged_out_bytes' ? session.ram_bytes : null);
  const segments = shown.map(session =>
    notebook(gpu, session, session[amount], whole, amount, ram(session))
  );
  if (rest.length > 0) {
    const bytes = rest.reduce((sum, session) => sum + session[amount], 0);
    const label = trans._n('%1 more notebook', '%1 more notebooks', rest.length);
    const title = titleOf(label, bytes, amount);
    segments.push(segment('rest', label, bytes, whole, 'rest', { title }));
  }
  return segments;
}

function notebook(
  gpu: IGpu,
  session: ISession,
  bytes: number,
  whole: number,
  amount: Amount,
  ram_bytes: number | null
): ISegment {
  const name = nameOf(session);
  let title = titleOf(name, bytes, amount);
  if (ram_bytes !== null) {
    title = trans.__('%1, of %2 of RAM that it has', title, formatBytes(ram_bytes));
  }
  return segment(session.id, name, bytes, whole, lookOf(gpu, session.id), {
    title,
    beside: ram_bytes === null ? '' : formatBytes(ram_bytes),
    mine: session.mine && marksOwn(gpu)
  });
}

function titleOf(name: string, bytes: number, amount: Amount): string {
  return amount === 'resident_bytes'
    ? trans.__('%1: %2 in the GPU', name, formatBytes(bytes))
    : trans.__('%1: %2 paged out to system RAM', name, formatBytes(bytes));
}

function segment(
  key: string,
  label: string,
  bytes: number,
  whole: number,
  look: ISegment['look'],
  more: { title?: string; mine?: boolean; beside?: string } = {}
): ISegment {
  return {
    key,
    label,
    bytes,
    share: Math.min(1, bytes / whole),
    look,
    mine: more.mine ?? false,
    beside: more.beside ?? '',
    title: more.title ?? `${label}: ${formatBytes(bytes)}`
  };
}

function bar(
  title: string,
  summary: string,
  segments: ISegment[],
  columns: readonly string[] = []
): IBar {
  const parts = segments.map(({ label, bytes, beside }) =>
    beside === ''
      ? `${label} ${formatBytes(bytes)}`
      : trans.__('%1 %2 of %3 RAM', label, formatBytes(bytes), beside)
  );
  return { title, columns, summary, segments, text: `${title}: ${summary}. ${parts.join(', ')}.` };
}
