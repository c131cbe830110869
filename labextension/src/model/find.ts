/** Finding one's way in the state. */

import type { IPlace } from './api';
import type { IQueueEntry, IState } from './types';

/** The reader's own session of that kernel, and its GPU. */
export function placeOfKernel(state: IState | null, kernel: string | null): IPlace | null {
  if (kernel === null || kernel === '') {
    return null;
  }
  for (const gpu of state?.gpus ?? []) {
    const session = gpu.sessions.find(each => each.mine && each.kernel_id === kernel);
    if (session !== undefined) {
      return { gpu, session };
    }
  }
  return null;
}

/** All of the reader's own sessions. */
export function ownPlaces(state: IState | null): IPlace[] {
  return (state?.gpus ?? []).flatMap(gpu =>
    gpu.sessions.filter(session => session.mine).map(session => ({ gpu, session }))
  );
}

/** Its place in line, if it waits. */
export function queueEntry(place: IPlace): IQueueEntry | undefined {
  return place.gpu.queue.find(entry => entry.session === place.session.id);
}

export function holds(place: IPlace): boolean {
  return place.gpu.holders.includes(place.session.id);
}
