/** The part of the model that the panel, the status bar and other surfaces use. */

import type { ISignal } from '@lumino/signaling';

import type { AntiThrash, IGpu, ISession, IState } from './types';

/** State of the stream from the server: not yet connected, live, or lost (and retrying). */
export type Connection = 'connecting' | 'live' | 'lost';

export interface IKiwiStore {
  /** null until the first snapshot. */
  readonly state: IState | null;
  readonly connection: Connection;
  /** Kernel of the notebook or console in front, if any. */
  readonly currentKernel: string | null;
  /** Emitted when anything above changed, but not because time passes. */
  readonly changed: ISignal<IKiwiStore, void>;
  /** The server's clock in Unix seconds: this machine's clock, corrected. */
  now(): number;
  /** When the wait of `session` is expected to end, as the daemon says: a countdown to it does
   * not rise. null: that is not known, or it does not wait. */
  expected(session: string): IExpected | null;
}

/** Unix seconds on `now()`'s clock; likely between `low_at` and `high_at`, if those are known. */
export interface IExpected {
  readonly at: number;
  readonly low_at: number | null;
  readonly high_at: number | null;
  /** Why the wait is longer than was shown before; usually "". */
  readonly why: string;
}

/** A session and its GPU. */
export interface IPlace {
  readonly gpu: IGpu;
  readonly session: ISession;
}

export interface ISettingsPatch {
  tq_s?: number;
  anti_thrash?: AntiThrash;
  policy?: string;
}

/** All reject with an `Error` whose message is for users (what happened, what to do). */
export interface IKiwiActions {
  /** Brings the session's notebook to the front; resolves at once if it has no path. */
  open(session: ISession): Promise<void>;
  set(gpu: IGpu, patch: ISettingsPatch): Promise<void>;
  release(place: IPlace): Promise<void>;
  /** Interrupts the kernel of a session that waits, so that its cell ends and its place is free. */
  leave(place: IPlace): Promise<void>;
  /** Tries again now: reconnects, and starts a daemon if there is none. */
  retry(): Promise<void>;
}
