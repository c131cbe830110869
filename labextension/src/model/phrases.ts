/**
 * The sentences of every surface about a wait, a turn and the GPU's load. kiwi_core/wire/words.py
 * has those of the other surfaces. Both are made of the same terms, and one table of cases
 * (tests/support/surface_words.json) tests both.
 */

import type { IKiwiStore } from './api';
import { waitLeft } from './countdown';
import { formatLeft } from './format';
import {
  atMost,
  busy,
  heldUp,
  inParallel,
  keeps,
  keptOut,
  oneAtATime,
  program,
  stateWord,
  turnOver,
  untilDone,
  untilOthersAsk
} from './terms';
import type { IGauges, IGpu, IScheduler, IOutsideProgram, IWaiter, ISession } from './types';
import { trans } from './translation';

/** How much longer a wait may take; '' if unknown. `short`: the figure alone, for a row. */
export function waitText(store: IKiwiStore, entry: IWaiter, short = false): string {
  if (entry.kept_out) {
    return short ? stateWord('suspended') : keptOut(entry.kept_out);
  }
  const left = waitLeft(store.expected(entry.session), store.now(), short) ?? '';
  return [entry.blocked ? heldUp() : '', left].filter(words => words !== '').join(', ');
}

/** Returns how long `holder` keeps the GPU; '' if that is not known. The rest of a turn is a
 * bound: others may get the GPU earlier. */
export function turnText(gpu: IGpu, holder: ISession, now: number): string {
  if (gpu.queue.every(entry => entry.kept_out)) {
    return untilOthersAsk();
  }
  if (!holder.guarded) {
    return untilDone();
  }
  const beside = gpu.holders.length > 1 && !gpu.scheduler.serialised;
  if (holder.turn_ends_at === null || beside) {
    return '';
  }
  const left_s = holder.turn_ends_at - now;
  return left_s > 0 ? atMost(formatLeft(left_s)) : turnOver();
}

/** How notebooks share the GPU now, and why. */
export function sharingText({ serialised, why }: IScheduler): string {
  const now = serialised ? oneAtATime() : inParallel();
  return why === '' ? now : `${now}: ${why}`;
}

/** Says that a session keeps its place from a waiter, and for how long at most; '' if it does not. */
export function keepsText(session: ISession, now: number): string {
  if (session.keeps_until === null) {
    return '';
  }
  return keeps(formatLeft(Math.max(1, session.keeps_until - now)));
}

/** One figure of the load; `share` of the maximum, where that is known. */
export interface ILoad {
  readonly text: string;
  readonly share: number | null;
}

/** The load of the GPU; empty if unknown. */
export function loads(gauges: IGauges): ILoad[] {
  const { utilisation_percent: percent, power_w, power_limit_w, temperature_c } = gauges;
  const found: ILoad[] = [];
  if (percent !== null) {
    found.push({ text: busy(percent), share: percent / 100 });
  }
  if (power_w !== null) {
    const now = watts(power_w);
    if (power_limit_w === null) {
      found.push({ text: now, share: null });
    } else {
      const text = trans._p('power', '%1 of %2', now, watts(power_limit_w));
      found.push({ text, share: power_w / Math.max(1, power_limit_w) });
    }
  }
  if (temperature_c !== null) {
    found.push({ text: `${temperature_c} °C`, share: null });
  }
  return found;
}

/** The name of a program outside Kiwi. */
export function outsideText(outside: IOutsideProgram): string {
  return outside.pid > 0 ? program(outside.name, outside.pid) : outside.name;
}

function watts(power_w: number): string {
  return `${Math.floor(power_w + 0.5)} W`;
}
