/**
 * What every surface says of a wait and of a turn. kiwi_core/wire/words.py says the same; one table
 * of cases (tests/support/surface_words.json) tests both.
 */

import type { IKiwiStore } from './api';
import { waitLeft } from './countdown';
import { formatLeft } from './format';
import type { IGpu, IQueueEntry, ISession } from './types';

/** How long a wait may still take; '': nobody can tell. */
export function waitWords(store: IKiwiStore, entry: IQueueEntry): string {
  if (entry.kept_out) {
    return `suspended by ${entry.kept_out} until kiwi resume`;
  }
  return entry.blocked ? 'held up' : (waitLeft(store.expected(entry.session), store.now()) ?? '');
}

/** How long `holder` keeps the GPU; '': nobody can tell. What is left of a turn is a bound: others
 * may well get the GPU earlier. */
export function turnWords(gpu: IGpu, holder: ISession, now: number): string {
  if (gpu.queue.every(entry => entry.kept_out)) {
    return 'until others ask';
  }
  if (!holder.guarded) {
    return 'until it is done';
  }
  const beside = gpu.holders.length > 1 && !gpu.scheduler.serialised;
  if (holder.turn_ends_at === null || beside) {
    return '';
  }
  const left_s = holder.turn_ends_at - now;
  return left_s > 0 ? `at most ${formatLeft(left_s)} more` : 'its turn is over';
}
