/** What the two memory bars show: segments whose sizes add up to the whole. Pure. */

import { formatBytes } from '../model/format';
import type { IGpu, ISession } from '../model/types';

import { lookOf, marksOwn, nameOf } from './people';

export interface ISegment {
  readonly key: string;
  readonly label: string;
  readonly bytes: number;
  readonly share: number;
  /** 0 … LOOKS-1: a notebook's; otherwise what it is. */
  readonly look: number | 'rest' | 'outside' | 'free';
  /** Told apart as the reader's own. */
  readonly mine: boolean;
  readonly title: string;
}

export interface IBar {
  readonly title: string;
  /** "1.5 of 8 GiB used", for the right end of the title. */
  readonly summary: string;
  readonly segments: readonly ISegment[];
  /** All of it in one sentence, for those who do not see the bar. */
  readonly text: string;
}

/** More notebooks than this are drawn as one: nobody reads a dozen slivers. */
const MOST_SEGMENTS = 5;

type Amount = 'resident_bytes' | 'paged_out_bytes';

/** The GPU's own memory: by notebook, outside Kiwi, free. */
export function gpuBar(gpu: IGpu): IBar {
  const total = Math.max(1, gpu.memory.total_bytes);
  const segments = byNotebook(gpu, 'resident_bytes', total, 'in the GPU');
  if (gpu.memory.outside_bytes > 0) {
    segments.push(
      segment('outside', 'Outside Kiwi', gpu.memory.outside_bytes, total, 'outside', {
        title: `${formatBytes(gpu.memory.outside_bytes)} held by programs that are not Kiwi's`
      })
    );
  }
  const free = Math.max(0, gpu.memory.free_bytes);
  segments.push(segment('free', 'Free', free, total, 'free'));
  return bar('GPU memory', `${formatBytes(free)} free of ${formatBytes(total)}`, segments);
}

/** What is paged out to system RAM, against what the host may hold. null: nothing to show. */
export function hostBar(gpu: IGpu): IBar | null {
  const out = gpu.sessions.reduce((sum, session) => sum + session.paged_out_bytes, 0);
  if (out <= 0) {
    return null;
  }
  const budget = Math.max(out, gpu.memory.host_budget_bytes, 1);
  const segments = byNotebook(gpu, 'paged_out_bytes', budget, 'paged out to system RAM');
  segments.push(segment('free', 'Room', budget - out, budget, 'free'));
  return bar('Paged out to system RAM', `${formatBytes(out)} of ${formatBytes(budget)}`, segments);
}

function byNotebook(gpu: IGpu, amount: Amount, whole: number, where: string): ISegment[] {
  const holding = gpu.sessions
    .filter(session => session[amount] > 0)
    .sort((a, b) => b[amount] - a[amount]);
  const shown = holding.length > MOST_SEGMENTS + 1 ? holding.slice(0, MOST_SEGMENTS) : holding;
  const rest = holding.slice(shown.length);
  const segments = shown.map(session => notebook(gpu, session, session[amount], whole, where));
  if (rest.length > 0) {
    const bytes = rest.reduce((sum, session) => sum + session[amount], 0);
    segments.push(
      segment('rest', `${rest.length} more notebooks`, bytes, whole, 'rest', {
        title: `${rest.length} more notebooks: ${formatBytes(bytes)} ${where}`
      })
    );
  }
  return segments;
}

function notebook(
  gpu: IGpu,
  session: ISession,
  bytes: number,
  whole: number,
  where: string
): ISegment {
  const name = nameOf(session);
  return segment(session.id, name, bytes, whole, lookOf(gpu, session.id), {
    title: `${name}: ${formatBytes(bytes)} ${where}`,
    mine: session.mine && marksOwn(gpu)
  });
}

function segment(
  key: string,
  label: string,
  bytes: number,
  whole: number,
  look: ISegment['look'],
  more: { title?: string; mine?: boolean } = {}
): ISegment {
  return {
    key,
    label,
    bytes,
    share: Math.min(1, bytes / whole),
    look,
    mine: more.mine ?? false,
    title: more.title ?? `${label}: ${formatBytes(bytes)}`
  };
}

function bar(title: string, summary: string, segments: ISegment[]): IBar {
  const parts = segments.map(each => `${each.label} ${formatBytes(each.bytes)}`);
  return { title, summary, segments, text: `${title}: ${summary}. ${parts.join(', ')}.` };
}
