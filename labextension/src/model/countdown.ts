/**
 * When a wait is shown to end, as estimates come and change.
 *
 * Estimates are made anew with everything that happens; shown as they come, the number would jump
 * up and down. A small correction is slewed in (the countdown runs a little faster, or slower until
 * it stands still, and never up); a large one is believed once it has lasted.
 */

import type { IExpected } from './api';
import { formatWait } from './format';
import type { IQueueEntry } from './types';

/** Fastest correction to an earlier end: seconds per second. */
export const SLEW = 0.25;

/** To a later one: the countdown stands still then, and does not count up. */
export const STANDS_STILL = 1;

/** Corrections up to this much, or this share of what is left, are small. */
export const SMALL_S = 1.5;
export const SMALL_SHARE = 0.15;

/** How long a large one must have lasted. */
export const LASTING_S = 1;

export class Countdown {
  private _shown: number | null;
  private _target: number | null;
  private _settled_at: number;
  /** Since when the target has been far from what is shown, on the same side. */
  private _far_since: number | null = null;

  /** `target`: when the wait is expected to end; null: nobody can tell. Both on one clock. */
  constructor(target: number | null, now: number) {
    this._shown = target;
    this._target = target;
    this._settled_at = now;
  }

  /** There is an estimate, perhaps the same as before. */
  observe(target: number | null, now: number): void {
    this._settle(now);
    const before = this._side(now);
    this._target = target;
    if (this._shown === null) {
      this._shown = target;
    }
    const side = this._side(now);
    if (side === null) {
      this._far_since = null;
    } else if (side !== before || this._far_since === null) {
      this._far_since = now;
    }
  }

  /** When the wait is shown to end; null: nobody can tell. */
  at(now: number): number | null {
    this._settle(now);
    return this._shown;
  }

  private _settle(now: number): void {
    const passed_s = Math.max(0, now - this._settled_at);
    this._settled_at = Math.max(now, this._settled_at);
    if (this._far_since !== null && now - this._far_since >= LASTING_S) {
      this._shown = this._target;
      this._far_since = null;
    } else if (this._shown !== null && this._target !== null) {
      const off_s = this._target - this._shown;
      this._shown += Math.min(STANDS_STILL * passed_s, Math.max(-SLEW * passed_s, off_s));
    }
  }

  /** Where the target is, if it is far from what is shown. */
  private _side(now: number): 'earlier' | 'later' | 'unknown' | null {
    if (this._shown === null) {
      return null;
    }
    if (this._target === null) {
      return 'unknown';
    }
    const off_s = this._target - this._shown;
    const small_s = Math.max(SMALL_S, SMALL_SHARE * (this._shown - now));
    return Math.abs(off_s) <= small_s ? null : off_s < 0 ? 'earlier' : 'later';
  }
}

/** All that is shown of one wait's end. */
export class ExpectedEnd {
  private readonly _at: Countdown;
  private readonly _low_at: Countdown;
  private readonly _high_at: Countdown;
  private _why: string;

  constructor(entry: IQueueEntry, now: number) {
    this._at = new Countdown(entry.expected_at, now);
    this._low_at = new Countdown(entry.expected_low_at, now);
    this._high_at = new Countdown(entry.expected_high_at, now);
    this._why = entry.expected_why;
  }

  observe(entry: IQueueEntry, now: number): void {
    this._at.observe(entry.expected_at, now);
    this._low_at.observe(entry.expected_low_at, now);
    this._high_at.observe(entry.expected_high_at, now);
    this._why = entry.expected_why;
  }

  read(now: number): IExpected | null {
    const at = this._at.at(now);
    const low_at = this._low_at.at(now);
    const high_at = this._high_at.at(now);
    return at === null ? null : { at, low_at, high_at, why: this._why };
  }
}

/** What is left of each, in words; null: nobody can tell. */
export function waitLeft(expected: IExpected | null, now: number): string | null {
  if (expected === null) {
    return null;
  }
  const left = (at: number | null) => (at === null ? null : Math.max(0, at - now));
  const { at, low_at, high_at, why } = expected;
  return formatWait(Math.max(0, at - now), left(low_at), left(high_at), why);
}
