import { beforeEach, describe, expect, it } from 'vitest';

import {
  AFTER_FOLLOWED_S,
  AFTER_REFUSED_S,
  couldComeBack,
  Hints,
  INTENT_S
} from '../../src/model/hint';
import type { IGpu, ISession } from '../../src/model/types';
import { gpu, session, state, waits } from '../states';

function with_(fields: Partial<ISession> = {}, more: Partial<IGpu> = {}) {
  const own = session({ state: 'paged-out', ...fields });
  return state([gpu({ sessions: [own, session({ id: 's2', mine: false })], ...more })]);
}

describe('a hint', () => {
  let hints: Hints;
  beforeEach(() => {
    hints = new Hints();
    hints.intend('k-s1', 100);
  });

  it('is given for a notebook that is out while the GPU is idle', () => {
    expect(hints.take(with_(), 100)?.session.id).toBe('s1');
  });

  it.each<[string, Partial<ISession>, Partial<IGpu>]>([
    ['its memory is in', { state: 'idle' }, {}],
    ['it is on its way', { state: 'paging-in' }, {}],
    ['something is wrong with it', { problem: 'no-room' }, {}],
    ['it is another user’s', { mine: false }, {}],
    ['somebody has the GPU', {}, { holders: ['s2'] }],
    ['somebody waits', {}, { queue: [waits('s2')] }],
    ['the daemon is away', {}, { reachable: false }],
    [
      'memory moves',
      {},
      { sessions: [session({ state: 'paged-out' }), session({ id: 's2', state: 'paging-out' })] }
    ]
  ])('is not given while %s', (_, fields, more) => {
    expect(hints.take(with_(fields, more), 100)).toBeNull();
  });

  it('needs a user who looks at it or types in it', () => {
    expect(new Hints().take(with_(), 100)).toBeNull();
    expect(hints.take(null, 100)).toBeNull();
    hints.intend('k-other', 100);
    expect(hints.take(with_(), 100)).toBeNull();
  });

  it('is also given when the GPU becomes idle a little later, but not much later', () => {
    const busy = with_({}, { holders: ['s2'] });
    expect(hints.take(busy, 101)).toBeNull();
    expect(hints.take(with_(), 100 + INTENT_S)?.session.id).toBe('s1');
    const other = new Hints();
    other.intend('k-s1', 100);
    expect(other.take(with_(), 100.1 + INTENT_S)).toBeNull();
  });

  it('is given again only after a while', () => {
    hints.take(with_(), 100);
    hints.intend('k-s1', 100 + AFTER_FOLLOWED_S - 1);
    expect(hints.take(with_(), 100 + AFTER_FOLLOWED_S - 1)).toBeNull();
    expect(hints.take(with_(), 100 + AFTER_FOLLOWED_S)?.session.id).toBe('s1');
  });

  it('is given again at once if the last one was of use', () => {
    expect(hints.take(with_(), 100)).not.toBeNull();
    hints.look(with_({ state: 'running' }, { holders: ['s1'] }));
    expect(hints.take(with_(), 102)?.session.id).toBe('s1');
  });

  it('is given again sooner if the last one had no effect', () => {
    hints.take(with_(), 100);
    hints.refused('s1', 100);
    expect(hints.take(with_(), 99 + AFTER_REFUSED_S)).toBeNull();
    expect(hints.take(with_(), 100 + AFTER_REFUSED_S)?.session.id).toBe('s1');
  });

  it('does not undo what the user did: memory that they moved out stays out until they come back', () => {
    hints.look(with_({ state: 'idle' }));
    hints.look(with_({ state: 'paging-out' }));
    hints.look(with_());
    expect(hints.take(with_(), 102)).toBeNull();
    hints.intend('k-s1', 103);
    hints.look(with_());
    expect(hints.take(with_(), 103)?.session.id).toBe('s1');
  });

  it('brings back memory that had to make room for others', () => {
    hints.look(with_({ state: 'idle' }));
    hints.look(with_({ state: 'paging-out' }, { queue: [waits('s2')] }));
    hints.look(with_({}, { holders: ['s2'] }));
    hints.look(with_());
    expect(hints.take(with_(), 105)?.session.id).toBe('s1');
  });

  it('for one session does not delay the hint of another', () => {
    hints.take(with_(), 100);
    const out = session({ id: 's3', state: 'paged-out' });
    hints.intend('k-s3', 101);
    expect(hints.take(state([gpu({ sessions: [out] })]), 101)?.session.id).toBe('s3');
  });

  it('knows what could come back without regard to users', () => {
    const place = with_().gpus[0];
    expect(place && couldComeBack({ gpu: place, session: session({ state: 'paged-out' }) })).toBe(
      true
    );
  });
});
