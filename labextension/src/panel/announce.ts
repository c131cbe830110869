/** Announcements for screen readers: turns that begin and end, never numbers. */

import { ordinal } from '../model/format';
import type { IGpu, ISession, IState } from '../model/types';
import { trans } from '../model/translation';

import { nameOf, queueEntryOf } from './people';

/** A moment of a session that is worth announcing; '' if none. */
type Moment = 'waits' | 'held-up' | 'has' | 'suspended' | 'lost' | '';

function momentOf(gpu: IGpu, session: ISession): Moment {
  if (session.state === 'lost') {
    return 'lost';
  }
  const entry = queueEntryOf(gpu, session.id);
  if (entry !== undefined) {
    if (entry.blocked) {
      return 'held-up';
    }
    return session.state === 'suspended' ? 'suspended' : 'waits';
  }
  return gpu.holders.includes(session.id) ? 'has' : '';
}

/** Moments of the reader's own sessions, by GPU and session. */
export function moments(state: IState | null): Map<string, Moment> {
  const found = new Map<string, Moment>();
  for (const gpu of state?.gpus ?? []) {
    for (const session of gpu.sessions) {
      if (session.mine && gpu.reachable) {
        found.set(`${gpu.uuid} ${session.id}`, momentOf(gpu, session));
      }
    }
  }
  return found;
}

/**
 * Returns the announcement of the step from `before` to `state`; '' for none. A notebook that gets
 * the GPU without a wait is not announced; neither is the state in which the panel opens.
 */
export function announcement(before: Map<string, Moment>, state: IState | null): string {
  const sentences: string[] = [];
  for (const gpu of state?.gpus ?? []) {
    for (const session of gpu.sessions) {
      const key = `${gpu.uuid} ${session.id}`;
      const was = before.get(key);
      if (session.mine && was !== undefined && gpu.reachable) {
        sentences.push(sentence(gpu, session, was, momentOf(gpu, session)));
      }
    }
  }
  return sentences.filter(each => each !== '').join(' ');
}

function sentence(gpu: IGpu, session: ISession, was: Moment, is: Moment): string {
  const name = nameOf(session);
  if (was === is) {
    return '';
  }
  switch (is) {
    case 'has':
      return was === '' ? '' : trans.__('%1: your turn on GPU %2.', name, gpu.index);
    case 'waits': {
      const position = queueEntryOf(gpu, session.id)?.position ?? 0;
      // Between a suspension and a move of its memory: the reader knows that it waits.
      return was === '' || was === 'has'
        ? trans.__('%1 waits for GPU %2, %3 in line.', name, gpu.index, ordinal(position))
        : '';
    }
    case 'suspended':
      return was === 'has' ? trans.__('%1 was suspended; it goes on by itself.', name) : '';
    case 'held-up':
    case 'lost':
      return `${name}: ${session.problem_text || trans.__('its GPU memory is lost.')}`;
    default:
      return '';
  }
}
