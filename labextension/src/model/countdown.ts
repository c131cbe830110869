/**
 * The shown end of a wait. The daemon computes the figures for all surfaces and keeps them steady;
 * here they only run down with the clock between two of its messages.
 */

import type { IExpected } from './api';
import { formatWait } from './format';
import type { IWaiter } from './types';

const TIMES = ['expected_at', 'expected_low_at', 'expected_high_at'] as const;
type Left = Record<(typeof TIMES)[number], number | null>;

/** The daemon keeps each figure steady. It sends a longer wait, with the reason, only if the
 * wait is longer than the shown one by more than this, or by more than this share. */
const TOLERANCE_S = 2;
const TOLERANCE_SHARE = 0.25;

/** The figures shown about the end of one wait. */
export class ExpectedEnd {
  constructor(private _entry: IWaiter) {}

  /** Whether `entry` is about the same wait, and not about a later one of its session. */
  isOf(entry: IWaiter): boolean {
    return entry.waiting_since === this._entry.waiting_since;
  }

  observe(entry: IWaiter, now: number): void {
    this.read(now);
    this._entry = entry;
    if (this._shown !== null && hasRisen(entry, this._shown, now)) {
      this._shown = null;
    }
  }

  /** No figure rises during a wait: a figure that stands still at the daemon stands still here,
   * too. */
  read(now: number): IExpected | null {
    const left = leftOf(this._entry, now);
    for (const time of TIMES) {
      const [shown, is] = [this._shown?.[time] ?? Infinity, left[time]];
      left[time] = is === null ? null : Math.min(shown, is);
    }
    this._shown = left;
    const at = (time: keyof Left) => (left[time] === null ? null : now + left[time]);
    const expected = at('expected_at');
    return expected === null
      ? null
      : {
          at: expected,
          low_at: at('expected_low_at'),
          high_at: at('expected_high_at'),
          why: this._entry.expected_why
        };
  }

  private _shown: Left | null = null;
}

function leftOf(entry: IWaiter, now: number): Left {
  const left = (at: number | null) => (at === null ? null : Math.max(0, at - now));
  return {
    expected_at: left(entry.expected_at),
    expected_low_at: left(entry.expected_low_at),
    expected_high_at: left(entry.expected_high_at)
  };
}

function hasRisen(entry: IWaiter, shown: Left, now: number): boolean {
  const left = leftOf(entry, now);
  // The high end: the low end of an upper bound ("up to 30 s") is always 0.
  const most = left.expected_high_at ?? left.expected_at;
  const was = shown.expected_high_at ?? shown.expected_at;
  if (entry.expected_why === '' || most === null || was === null) {
    return false;
  }
  return most - was > Math.max(TOLERANCE_S, TOLERANCE_SHARE * most);
}

/** The rest of a wait, as text; null if unknown. `short`: "≈ 12 s", without a reason. */
export function waitLeft(expected: IExpected | null, now: number, short = false): string | null {
  if (expected === null) {
    return null;
  }
  const left = (at: number | null) => (at === null ? null : Math.max(0, at - now));
  const { at, low_at, high_at, why } = expected;
  return formatWait(Math.max(0, at - now), left(low_at), left(high_at), short ? '' : why, short);
}
