import { describe, expect, it } from 'vitest';

import { ExpectedEnd } from '../../src/model/countdown';
import type { IWaiter } from '../../src/model/types';
import { waits } from '../states';

const entry = (at: number | null, fields: Partial<IWaiter> = {}) =>
  waits('s1', { expected_at: at, ...fields });

describe('the end of a wait', () => {
  it('is what the daemon says, and the rest of the wait runs down with the clock', () => {
    const end = new ExpectedEnd(entry(1030, { expected_low_at: 1020, expected_high_at: 1045 }));
    const at = { at: 1030, low_at: 1020, high_at: 1045, why: '' };
    expect(end.read(1000)).toEqual(at);
    expect(end.read(1007)).toEqual(at);
  });

  it('becomes earlier as soon as the daemon says so', () => {
    const end = new ExpectedEnd(entry(1030));
    expect(end.read(1000)?.at).toBe(1030);
    end.observe(entry(1012), 1001);
    expect(end.read(1001)?.at).toBe(1012);
  });

  it('stands still while the daemon keeps it still, and never rises', () => {
    const end = new ExpectedEnd(entry(1030));
    let left = Infinity;
    for (let now = 1000; now < 1040; now += 0.25) {
      if (Number.isInteger(now)) {
        end.observe(entry(now + Math.max(20, 1030 - now)), now); // 20 s are left, and no less
      }
      const shown = (end.read(now)?.at ?? NaN) - now;
      expect(shown).toBeLessThanOrEqual(left);
      expect(shown).toBeGreaterThanOrEqual(19);
      left = shown;
    }
  });

  it('becomes later only when the daemon sends a new figure with the reason', () => {
    const end = new ExpectedEnd(entry(1010));
    end.observe(entry(1060), 1000);
    expect(end.read(1000)?.at).toBe(1010);
    end.observe(entry(1060, { expected_why: 'others go first' }), 1000);
    expect(end.read(1000)).toMatchObject({ at: 1060, why: 'others go first' });
    end.observe(entry(1062, { expected_why: 'others go first' }), 1000);
    expect(end.read(1000)?.at).toBe(1060);
    end.observe(entry(1100, { expected_why: 'others go first' }), 1001);
    expect(end.read(1001)?.at).toBe(1100);
  });

  it('becomes later when the daemon sends a new upper bound, whose low end is always 0', () => {
    const bound = (high_at: number, expected_why = '') =>
      entry(high_at - 5, { expected_low_at: 1000, expected_high_at: high_at, expected_why });
    const end = new ExpectedEnd(bound(1009));
    expect(end.read(1000)?.high_at).toBe(1009);
    end.observe(bound(1030), 1000);
    expect(end.read(1000)?.high_at).toBe(1009);
    end.observe(bound(1030, 'longer than usual'), 1000);
    expect(end.read(1000)).toMatchObject({ high_at: 1030, why: 'longer than usual' });
    end.observe(bound(1031, 'longer than usual'), 1000);
    expect(end.read(1000)?.high_at).toBe(1030);
  });

  it('may be any after it was unknown', () => {
    const end = new ExpectedEnd(entry(1010));
    end.observe(entry(null), 1001);
    expect(end.read(1001)).toBeNull();
    end.observe(entry(1050), 1002);
    expect(end.read(1002)?.at).toBe(1050);
  });
});
