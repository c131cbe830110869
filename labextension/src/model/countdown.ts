/**
 * When a wait is shown to end, as estimates come and change.
 *
 * Estimates are made anew with everything that happens; shown as they come, the number would jump
 * up and down. A small correction is slewed in (the countdown runs a little faster or slower, and
 * always down); a large one is believed once it has lasted.
 */

/** Fastest correction: seconds per second. Below 1, so that a countdown never counts up. */
export const SLEW = 0.25;

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
      const most_s = SLEW * passed_s;
      this._shown += Math.min(most_s, Math.max(-most_s, this._target - this._shown));
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
