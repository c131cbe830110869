import { describe, expect, it } from 'vitest';

import { Waits } from '../../src/model/waits';
import type { IGpu, ISession } from '../../src/model/types';
import { gpu, session, state, waits } from '../states';

const at = (now: number, fields: Partial<ISession>, more: Partial<IGpu> = {}) =>
  state([gpu({ sessions: [session(fields)], ...more })], { now });

describe('waits', () => {
  const waiting = at(1010, { state: 'waiting' }, { queue: [waits('s1', { waiting_since: 1000 })] });

  it('end when the GPU is granted, and are reported once', () => {
    const seen = new Waits();
    expect(seen.look(waiting)).toEqual([]);
    const granted = at(1040, { state: 'running' }, { holders: ['s1'] });
    const [ended] = seen.look(granted);
    expect(ended?.waited_s).toBe(40);
    expect(ended?.place.session.id).toBe('s1');
    expect(seen.look(granted)).toEqual([]);
  });

  it('go on while the memory is coming in', () => {
    const seen = new Waits();
    seen.look(waiting);
    expect(seen.look(at(1050, { state: 'paging-in' }))).toEqual([]);
    const granted = at(1060, { state: 'running' }, { holders: ['s1'] });
    expect(seen.look(granted)[0]?.waited_s).toBe(60);
  });

  it('that were given up are not reported', () => {
    const seen = new Waits();
    seen.look(waiting);
    expect(seen.look(at(1020, { state: 'idle' }))).toEqual([]);
    expect(seen.look(at(1030, { state: 'running' }, { holders: ['s1'] }))).toEqual([]);
  });

  it('of other users are not reported', () => {
    const seen = new Waits();
    const theirs = { mine: false };
    seen.look(at(1010, theirs, { queue: [waits('s1')] }));
    expect(seen.look(at(1050, theirs, { holders: ['s1'] }))).toEqual([]);
  });

  it('are handled when nothing is known', () => {
    expect(new Waits().look(null)).toEqual([]);
  });
});
