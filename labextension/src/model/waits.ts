/** Finds long waits of the reader's own sessions that have ended. */

import type { IPlace } from './api';
import { holds, ownPlaces, queueEntry } from './find';
import type { IState } from './types';

export interface IEndedWait {
  readonly place: IPlace;
  readonly waited_s: number;
}

/** States of a session that is neither in the queue nor granted, but will be soon. */
const ON_ITS_WAY = new Set(['waiting', 'suspended', 'paging-in', 'paging-out']);

export class Waits {
  /** Beginning of each session's wait, by the server's clock. */
  private _since = new Map<string, number>();

  /** Returns the waits that ended with a grant between the last state and this one. */
  look(state: IState | null): IEndedWait[] {
    const ended: IEndedWait[] = [];
    const since = new Map<string, number>();
    for (const place of ownPlaces(state)) {
      const { id } = place.session;
      const began_at = this._since.get(id);
      const entry = queueEntry(place);
      if (entry !== undefined) {
        since.set(id, entry.waiting_since);
      } else if (began_at !== undefined && state !== null && holds(place)) {
        ended.push({ place, waited_s: Math.max(0, state.now - began_at) });
      } else if (began_at !== undefined && ON_ITS_WAY.has(place.session.state)) {
        since.set(id, began_at);
      }
    }
    this._since = since;
    return ended;
  }
}
