import { describe, expect, it } from 'vitest';

import {
  Countdown,
  LASTING_S,
  SLEW,
  SMALL_S,
  SMALL_SHARE,
  STANDS_STILL
} from '../../src/model/countdown';

/** Numbers that look random and are the same each time (mulberry32). */
function numbers(seed: number): () => number {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

describe('a countdown', () => {
  it('shows the first estimate as it is', () => {
    expect(new Countdown(130, 100).at(100)).toBe(130);
  });

  it('slews a small correction in, and gets there', () => {
    const countdown = new Countdown(130, 100);
    countdown.observe(129, 100);
    expect(countdown.at(100)).toBe(130);
    expect(countdown.at(102)).toBeCloseTo(130 - 2 * SLEW);
    expect(countdown.at(110)).toBe(129);
  });

  it('stands still while the end moves away', () => {
    const countdown = new Countdown(130, 100);
    let left = 30;
    for (let now = 100; now < 120; now += 0.5) {
      countdown.observe(130 + Math.floor(now - 100), now);
      const next = (countdown.at(now) ?? NaN) - now;
      expect(next).toBeLessThanOrEqual(left + 1e-9);
      left = next;
    }
    expect(left).toBeGreaterThan(28);
  });

  it('takes a large one over once it has lasted', () => {
    const countdown = new Countdown(130, 100);
    countdown.observe(170, 100);
    expect(countdown.at(100 + LASTING_S / 2)).toBeLessThan(131);
    expect(countdown.at(100 + LASTING_S)).toBe(170);
  });

  it('does not follow a large one that was taken back', () => {
    const countdown = new Countdown(130, 100);
    countdown.observe(170, 100);
    countdown.observe(130, 100.5);
    for (let now = 100.5; now < 110; now += 0.5) {
      expect(Math.abs((countdown.at(now) ?? NaN) - 130)).toBeLessThanOrEqual(0.5);
    }
  });

  it('counts anew when a large one changes sides', () => {
    const countdown = new Countdown(130, 100);
    countdown.observe(170, 100);
    countdown.observe(105, 100.9);
    expect(countdown.at(101.5)).toBeGreaterThan(129);
    expect(countdown.at(101.9)).toBe(105);
  });

  it('forgets an estimate that nobody can give any more, and takes the next one at once', () => {
    const countdown = new Countdown(130, 100);
    countdown.observe(null, 100);
    expect(countdown.at(100.5)).toBe(130);
    expect(countdown.at(101)).toBeNull();
    countdown.observe(150, 102);
    expect(countdown.at(102)).toBe(150);
  });

  it('takes what is small from how much is left', () => {
    const countdown = new Countdown(700, 100); // 10 min: 90 s are small
    countdown.observe(760, 100);
    expect(countdown.at(102)).toBeCloseTo(700 + 2 * STANDS_STILL);
  });

  it('bears a clock that goes back', () => {
    const countdown = new Countdown(130, 100);
    countdown.observe(129, 102);
    expect(countdown.at(101)).toBe(130);
    expect(countdown.at(104)).toBeCloseTo(130 - 2 * SLEW);
  });

  it.each([1, 2, 3, 4, 5, 6, 7, 8])('never counts up under jitter (seed %i)', seed => {
    const random = numbers(seed);
    const countdown = new Countdown(160, 100);
    let before = 60;
    for (let now = 100; now < 155; now += 0.1) {
      if (random() < 0.3) {
        countdown.observe(160 + (random() - 0.5) * 2 * (SMALL_S - 0.5), now);
      }
      const left = (countdown.at(now) ?? NaN) - now;
      expect(left).toBeLessThanOrEqual(before + 1e-9);
      before = left;
    }
    expect(before).toBeCloseTo(5, -1);
  });

  it.each([11, 12, 13, 14, 15, 16, 17, 18])(
    'follows whatever lasts, jumps seldom and only to an estimate (seed %i)',
    seed => {
      const STEP = 0.1;
      const random = numbers(seed);
      const countdown = new Countdown(500, 100);
      let targets: (number | null)[] = [500, 500]; // the newest, the one before
      let since = 100;
      let jumped = -Infinity;
      let shown = countdown.at(100);
      let jumps = 0;
      for (let now = 100 + STEP; now < 400; now += STEP) {
        if (random() < 0.05) {
          const target = random() < 0.1 ? null : now + random() * 200;
          targets = [target, targets[0] ?? null];
          since = now;
          countdown.observe(target, now);
        }
        const next = countdown.at(now);
        const moved = next === null || shown === null ? Infinity : Math.abs(next - shown);
        if (next !== shown && moved > STANDS_STILL * STEP + 1e-9) {
          expect(targets).toContain(next);
          if (shown !== null) {
            expect(now - jumped).toBeGreaterThan(LASTING_S - 2 * STEP);
          }
          jumped = now;
          jumps += 1;
        }
        if (now - since > LASTING_S + STEP) {
          const [target] = targets;
          if (target === undefined || target === null || next === null) {
            expect(next).toBe(target);
          } else {
            const left_s = Math.max(0, target - since);
            const small_s = Math.max(SMALL_S, (SMALL_SHARE / (1 - SMALL_SHARE)) * left_s);
            expect(Math.abs(target - next)).toBeLessThanOrEqual(small_s + 1e-9);
          }
        }
        shown = next;
      }
      expect(jumps).toBeGreaterThan(10);
    }
  );
});
