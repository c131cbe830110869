import { describe, expect, it } from 'vitest';

import { statusOf } from '../../src/model/status';
import { KiwiStore } from '../../src/model/store';
import type { IGpu } from '../../src/model/types';
import { GIB, gpu, session, state, waits } from '../states';

function status(
  gpus: readonly IGpu[],
  kernel: string | null = 'k-s1',
  connection = 'live' as const,
  emulated = false
) {
  const store = new KiwiStore();
  store.receive({ type: 'snapshot', ...state(gpus.map(one => ({ ...one, emulated }))) });
  store.setConnection(connection);
  store.currentKernel = kernel;
  return statusOf(store);
}

const text = (...args: Parameters<typeof status>) => status(...args)?.text;
const withOwn = (fields: Parameters<typeof session>[0], more: Partial<IGpu> = {}) =>
  gpu({ sessions: [session(fields), session({ id: 's2', mine: false })], ...more });

describe('the status bar says', () => {
  it('nothing if nothing is known or there is no GPU', () => {
    expect(statusOf(new KiwiStore())).toBeNull();
    expect(status([])).toBeNull();
  });

  it('that the GPU is emulated', () => {
    const gpus = [withOwn({ state: 'running' }, { holders: ['s1'] })];
    expect(status(gpus, 'k-s1', 'live', true)?.text).toBe('Emulated GPU: yours');
  });

  it('that a kernel without Kiwi takes no part, where it has no gate either', () => {
    const bare = (takes_part: boolean) => {
      const store = new KiwiStore();
      const all = state([gpu({ sessions: [] })]);
      const bare_kernels = { old: { takes_part, text: 'Install `kiwi`.' } };
      store.receive({ type: 'snapshot', ...all, server: { ...all.server, bare_kernels } });
      store.setConnection('live');
      store.currentKernel = 'old';
      return statusOf(store);
    };
    expect(bare(false)).toMatchObject({ label: 'Install kiwi.', tone: 'wrong' });
    expect(bare(false)?.text).toContain('GPU: takes no part');
    expect(bare(true)?.text).toContain('GPU: free');
  });

  it('GPU: yours', () => {
    expect(text([withOwn({ state: 'running' }, { holders: ['s1'] })])).toBe('GPU: yours');
  });

  it('GPU: 2nd, about 12 s', () => {
    const queue = [waits('s2'), waits('s1', { position: 2, expected_at: 1012 })];
    const shown = status([withOwn({ state: 'waiting' }, { queue, holders: ['s3'] })]);
    expect(shown?.text).toBe('GPU: 2nd, about 12 s');
    expect(shown?.label).toBe('s1.ipynb waits for the GPU: 2nd of 2, about 12 s.');
    expect(shown?.ticks).toBe(true);
  });

  it('only the place if the wait is unknown', () => {
    const queue = [waits('s1')];
    expect(text([withOwn({ state: 'waiting' }, { queue })])).toBe('GPU: 1st');
  });

  it('any moment when the estimate has passed', () => {
    const queue = [waits('s1', { expected_at: 990 })];
    expect(text([withOwn({ state: 'waiting' }, { queue })])).toBe('GPU: 1st, any moment');
  });

  it('that the notebook is suspended', () => {
    const queue = [waits('s1', { expected_at: 1030 })];
    const shown = status([withOwn({ state: 'suspended' }, { queue, holders: ['s2'] })]);
    expect(shown?.text).toBe('GPU: 1st, about 30 s');
    expect(shown?.label).toContain('suspended in mid-cell');
  });

  it.each([
    ['paged-out', 'GPU: paged out'],
    ['paging-out', 'GPU: paging out'],
    ['paging-in', 'GPU: paging in'],
    ['lost', 'GPU: memory lost'],
    ['idle', 'GPU: free']
  ] as const)('of a session that is %s: %s', (its, expected) => {
    const own = { state: its, resident_bytes: 0, paged_out_bytes: 3 * GIB };
    expect(text([withOwn(own)])).toBe(expected);
  });

  it('how much memory is paged out', () => {
    const own = { state: 'paged-out', resident_bytes: 0, paged_out_bytes: 3 * GIB } as const;
    expect(status([withOwn(own)])?.label).toContain('3 GiB of s1.ipynb');
  });

  it('GPU: busy or GPU: in use while others have it', () => {
    expect(text([withOwn({}, { holders: ['s2'] })])).toBe('GPU: busy');
    const scheduler = { ...gpu().scheduler, serialised: false };
    expect(text([withOwn({}, { holders: ['s2'], scheduler })])).toBe('GPU: in use');
  });

  it('GPU: free for a notebook without a session while one of the GPUs is free', () => {
    const busy = gpu({ uuid: 'GPU-2', holders: ['x'] });
    expect(text([busy, gpu()], 'k-other')).toBe('GPU: free');
    expect(text([busy], null)).toBe('GPU: busy');
  });

  it('never another user’s session as the reader’s own', () => {
    const theirs = session({ mine: false, state: 'running' });
    expect(text([gpu({ sessions: [theirs], holders: ['s1'] })])).toBe('GPU: busy');
  });

  it('GPU: unknown if no daemon answers', () => {
    expect(text([withOwn({}, { reachable: false })])).toBe('GPU: unknown');
    expect(text([gpu({ reachable: false })], null)).toBe('GPU: unknown');
    expect(text([withOwn({})], 'k-s1', 'lost' as never)).toBe('GPU: unknown');
  });
});
