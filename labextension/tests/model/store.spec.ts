import { beforeEach, describe, expect, it } from 'vitest';

import { ServerClock } from '../../src/model/clock';
import { waitLeft } from '../../src/model/countdown';
import { KiwiStore } from '../../src/model/store';
import type { IDelta } from '../../src/model/types';
import { gpu, session, state, waits } from '../states';

describe('the store', () => {
  let local: number;
  let store: KiwiStore;
  let changes: number;
  const queued = (expected_at: number | null) => [waits('s1', { expected_at })];
  const delta = (seq: number, fields: Partial<IDelta>): IDelta => ({
    type: 'delta',
    seq,
    now: 1000 + local,
    ...fields
  });

  beforeEach(() => {
    local = 0;
    store = new KiwiStore(new ServerClock(() => local));
    changes = 0;
    store.changed.connect(() => (changes += 1));
    const waiting = gpu({ sessions: [session({ state: 'waiting' })], queue: queued(1030) });
    store.receive({ type: 'snapshot', ...state([waiting]) });
  });

  it('knows the state and the time', () => {
    expect(store.state?.gpus).toHaveLength(1);
    local = 2;
    expect(store.now()).toBe(1002);
    expect(changes).toBe(1);
  });

  it('says when a wait ends, and makes that later only with a reason', () => {
    expect(store.expected('s1')?.at).toBe(1030);
    expect(store.expected('nobody')).toBeNull();
    store.receive(delta(6, { gpus: { 'GPU-1': { set: { queue: queued(1080) } } } }));
    expect(store.expected('s1')?.at).toBe(1030);
    store.receive(delta(7, { gpus: { 'GPU-1': { set: { queue: queued(1020) } } } }));
    expect(store.expected('s1')?.at).toBe(1020);
  });

  it('treats a later wait of the same notebook as another wait', () => {
    const queue = [waits('s1', { expected_at: 1080, waiting_since: 1020 })];
    store.receive(delta(6, { gpus: { 'GPU-1': { set: { queue } } } }));
    expect(store.expected('s1')?.at).toBe(1080);
  });

  it('says the likely range, and why it has become longer', () => {
    const queue = [
      waits('s1', {
        expected_at: 1029,
        expected_low_at: 1020,
        expected_high_at: 1045,
        expected_why: 'others go first'
      })
    ];
    store.receive(delta(6, { gpus: { 'GPU-1': { set: { queue } } } }));
    expect(store.expected('s1')).toEqual({
      at: 1029,
      low_at: 1020,
      high_at: 1045,
      why: 'others go first'
    });
    expect(waitLeft(store.expected('s1'), store.now())).toBe('20–45 s (others go first)');
    expect(waitLeft(null, store.now())).toBeNull();
  });

  it('forgets a wait that has ended', () => {
    store.receive(delta(6, { gpus: { 'GPU-1': { set: { queue: [] } } } }));
    expect(store.expected('s1')).toBeNull();
  });

  it('emits nothing while only time passes', () => {
    store.receive({ type: 'heartbeat', seq: 5, now: 1010 });
    store.currentKernel = null;
    store.setConnection('live');
    store.setConnection('live');
    expect(changes).toBe(2); // the snapshot, and being live
  });

  it('continues from the last position unless a message was missed', () => {
    expect(store.seen).toMatchObject({ epoch: 'e', seq: 5 });
    expect(store.receive(delta(8, {}))).toBe(false);
    store.forget();
    expect(store.seen).toBeNull();
    expect(store.state?.seq).toBe(5); // still on show
    store.receive({ type: 'snapshot', ...state([], { epoch: 'f', seq: 8 }) });
    expect(store.seen).toMatchObject({ epoch: 'f', seq: 8 });
  });

  it('says why there is nothing to show', () => {
    store.setProblem({ code: 'no-extension', message: 'a', remedy: 'b' });
    expect(store.state?.server.problem?.code).toBe('no-extension');
    expect(store.state?.gpus).toEqual([]);
    expect(store.seen).toBeNull();
    expect(store.expected('s1')).toBeNull();
  });

  it('says which kernel is in front', () => {
    store.currentKernel = 'k-s1';
    expect(store.currentKernel).toBe('k-s1');
    expect(changes).toBe(2);
  });
});
