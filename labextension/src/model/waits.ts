/** Notices when a long wait of one's own has ended. */

import type { IPlace } from './api';
import { holds, ownPlaces, queueEntry } from './find';
import type { IState } from './types';

export interface IEndedWait {
  readonly place: IPlace;
  readonly waited_s: number;
}

/** Neither in the queue nor granted, but about to be. */
const ON_ITS_WAY = new Set(['waiting', 'suspended', 'paging-in', 'paging-out']);

export class Waits {
  /** By session: since when it has waited (server's clock). */
  private _since = new Map<string, number>();

  /** Waits that ended with the GPU granted between the state seen last and this one. */
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
