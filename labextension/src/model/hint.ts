/**
 * Decides when to send the daemon a hint that a notebook is about to be used, so that its memory is
 * back before its next cell runs. The daemon decides what to do; this part only limits the number
 * of hints.
 */

import type { IPlace } from './api';
import { inLine, placeOfKernel } from './find';
import type { IState } from './types';

/** How long a notebook counts as about to be used after the user looked at it or typed in it. */
export const INTENT_S = 20;

/** Pause between two hints for one session: after one that had an effect, and after one that had none. */
export const AFTER_FOLLOWED_S = 30;
export const AFTER_REFUSED_S = 10;

const MOVING = new Set(['paging-in', 'paging-out']);

/** Returns whether its memory is out, and could come back without disturbing others. */
export function couldComeBack({ gpu, session }: IPlace): boolean {
  return (
    gpu.reachable &&
    session.state === 'paged-out' &&
    session.problem === '' &&
    gpu.holders.length === 0 &&
    inLine(gpu) === 0 &&
    !gpu.sessions.some(each => MOVING.has(each.state))
  );
}

function isOut({ session }: IPlace): boolean {
  return session.state === 'paged-out' || session.state === 'paging-out';
}

export class Hints {
  private _intent: { kernel: string; until: number } | null = null;
  /** The last known session of that kernel. */
  private _seen: { id: string; out: boolean } | null = null;
  /** Earliest time of the next hint, by session. */
  private readonly _notBefore = new Map<string, number>();

  /** Records that the user looks at, or types in, that kernel's notebook. `now` is in seconds. */
  intend(kernel: string, now: number): void {
    this._intent = { kernel, until: now + INTENT_S };
  }

  /** Takes a new state. Memory that went out although nobody needed the room was moved out by
   * its user (or for another hint). Then it is not brought back before the user returns to it. A
   * session that was used after its hint may get the next hint. */
  look(state: IState | null): void {
    state?.gpus.forEach(gpu => gpu.holders.forEach(holder => this._notBefore.delete(holder)));
    const place = placeOfKernel(state, this._intent?.kernel ?? null);
    const seen = place === null ? null : { id: place.session.id, out: isOut(place) };
    if (
      place !== null &&
      seen?.out === true &&
      this._seen?.id === seen.id &&
      !this._seen.out &&
      inLine(place.gpu) === 0 &&
      place.gpu.holders.every(holder => holder === seen.id)
    ) {
      this._intent = null;
    }
    this._seen = seen;
  }

  /** Returns the session to give a hint for now; the hint counts as given. */
  take(state: IState | null, now: number): IPlace | null {
    if (this._intent === null || now > this._intent.until) {
      return null;
    }
    const place = placeOfKernel(state, this._intent.kernel);
    if (place === null || !couldComeBack(place)) {
      return null;
    }
    const { id } = place.session;
    if (now < (this._notBefore.get(id) ?? -Infinity)) {
      return null;
    }
    this._notBefore.set(id, now + AFTER_FOLLOWED_S);
    return place;
  }

  /** Records that the hint had no effect (refused, or not delivered): the next may come sooner. */
  refused(session: string, now: number): void {
    this._notBefore.set(session, now + AFTER_REFUSED_S);
  }
}
