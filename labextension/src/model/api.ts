/** What the panel, the status bar and the other surfaces see of the model. */

import type { ISignal } from '@lumino/signaling';

import type { AntiThrash, IGpu, ISession, IState } from './types';

/** Of the stream to the server: never connected yet, live, or lost (and trying again). */
export type Connection = 'connecting' | 'live' | 'lost';

export interface IKiwiStore {
  /** null until the first snapshot. */
  readonly state: IState | null;
  readonly connection: Connection;
  /** Kernel of the notebook or console in front, if any. */
  readonly currentKernel: string | null;
  /** Anything above changed. Not emitted for the mere passing of time. */
  readonly changed: ISignal<IKiwiStore, void>;
  /** The server's clock, Unix seconds: this machine's, corrected. */
  now(): number;
  /** When the wait of `session` is expected to end, as the daemon says: a countdown made of it
   * does not rise. null: nobody can tell, or it does not wait. */
  expected(session: string): IExpected | null;
}

/** Unix seconds on `now()`'s clock; likely between `low_at` and `high_at`, if those are known. */
export interface IExpected {
  readonly at: number;
  readonly low_at: number | null;
  readonly high_at: number | null;
  /** Why it takes longer than was said before; mostly "". */
  readonly why: string;
}

/** A session and the GPU that it is on. */
export interface IPlace {
  readonly gpu: IGpu;
  readonly session: ISession;
}

export interface ISettingsPatch {
  tq_s?: number;
  anti_thrash?: AntiThrash;
  policy?: string;
}

/** All reject with an `Error` whose message is fit for people (what happened, what to do). */
export interface IKiwiActions {
  /** Brings the session's notebook to the front; resolves at once where it has no path. */
  open(session: ISession): Promise<void>;
  set(gpu: IGpu, patch: ISettingsPatch): Promise<void>;
  release(place: IPlace): Promise<void>;
  /** Interrupts the kernel of a session that waits, so that its cell ends and its place is free. */
  leave(place: IPlace): Promise<void>;
  /** Look again now: reconnect, and start a daemon where there is none. */
  retry(): Promise<void>;
}
