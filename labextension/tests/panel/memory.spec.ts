import { describe, expect, it } from 'vitest';

import { gpuBar, hostBar } from '../../src/panel/memory-model';
import { GIB, gpu, session } from '../../stories/make';

const sum = (shares: readonly { share: number }[]) =>
  shares.reduce((total, each) => total + each.share, 0);

describe('memory', () => {
  it('divides the GPU into notebooks by size, programs outside Kiwi, and free memory', () => {
    const bar = gpuBar(
      gpu({
        sessions: [
          session('small', { resident_bytes: GIB }),
          session('large', { resident_bytes: 60 * GIB })
        ],
        memory: { ...gpu().memory, outside_bytes: 4 * GIB, free_bytes: 15 * GIB }
      })
    );
    expect(bar.segments.map(each => each.label)).toEqual([
      'large.ipynb',
      'small.ipynb',
      'Outside Kiwi',
      'Free'
    ]);
    expect(sum(bar.segments)).toBeCloseTo(1);
    expect(bar.text).toBe(
      'GPU memory: 15 GiB free of 80 GiB. large.ipynb 60 GiB, small.ipynb 1 GiB, Outside Kiwi 4 GiB, Free 15 GiB.'
    );
  });

  it('tells notebooks apart by looks that do not change with their sizes', () => {
    const looks = (first: number, second: number) =>
      gpuBar(
        gpu({
          sessions: [
            session('a', { resident_bytes: first }),
            session('b', { resident_bytes: second })
          ]
        })
      ).segments.map(each => [each.key, each.look]);
    expect(looks(1 * GIB, 2 * GIB)).toEqual([
      ['b', 1],
      ['a', 0],
      ['free', 'free']
    ]);
    expect(looks(2 * GIB, 1 * GIB)).toEqual([
      ['a', 0],
      ['b', 1],
      ['free', 'free']
    ]);
  });

  it('draws many small notebooks as one, and loses none of their bytes', () => {
    const sessions = Array.from({ length: 50 }, (_, index) =>
      session(`n${index}`, { resident_bytes: (1 + index) * 1024 })
    );
    const bar = gpuBar(gpu({ sessions }));
    expect(bar.segments).toHaveLength(7);
    expect(bar.segments[5]?.label).toBe('45 more notebooks');
    expect(bar.segments.reduce((total, each) => total + each.bytes, 0)).toBe(80 * GIB);
  });

  it('shows paged-out memory against the budget, and nothing if there is none', () => {
    expect(hostBar(gpu())).toBeNull();
    const out = session('a', { paged_out_bytes: 48 * GIB });
    const bar = hostBar(gpu({ sessions: [out] }));
    expect(bar?.summary).toBe('room for 144 GiB of 192 GiB');
    expect(bar?.segments[0]?.share).toBeCloseTo(0.25);
  });

  it('names the programs outside Kiwi whose names are known, and sums up the rest', () => {
    const memory = { ...gpu().memory, outside_bytes: 20 * GIB, free_bytes: 60 * GIB };
    const program = (pid: number, used_bytes: number) => ({
      pid,
      owner: 'ada',
      name: pid > 0 ? 'python3' : 'another user',
      left: false,
      used_bytes
    });
    const outside = [program(815, 9 * GIB), program(0, 6 * GIB)];
    const bar = gpuBar(gpu({ memory, outside }));
    expect(bar.segments.map(each => [each.label, each.bytes / GIB])).toEqual([
      ['python3 (pid 815)', 9],
      ['another user', 6],
      ['Outside Kiwi', 5],
      ['Free', 60]
    ]);
    expect(sum(bar.segments)).toBeCloseTo(1);
    const many = [1, 2, 3, 4].map(pid => program(pid, 5 * GIB));
    expect(gpuBar(gpu({ memory, outside: many })).segments.map(each => each.label)).toContain(
      'Outside Kiwi'
    );
  });

  it('shows the RAM of own notebooks beside their paged-out memory', () => {
    const out = session('a', { paged_out_bytes: 48 * GIB, ram_bytes: 50 * GIB });
    const bar = hostBar(gpu({ sessions: [out, session('b', { ram_bytes: GIB })] }));
    expect(bar?.columns).toEqual(['paged out', 'its RAM']);
    expect(bar?.segments.map(each => [each.label, each.beside])).toEqual([
      ['a.ipynb', '50 GiB'],
      ['b.ipynb', '1 GiB'],
      ['Room', '']
    ]);
    expect(bar?.text).toContain('a.ipynb 48 GiB of 50 GiB RAM, b.ipynb 0 B of 1 GiB RAM');
    const idle = hostBar(gpu({ sessions: [session('b', { ram_bytes: GIB })] }));
    expect(idle?.summary).toBe('nothing paged out');
    expect(idle?.segments).toHaveLength(1);
  });

  it('never draws more than the whole, whatever the figures are', () => {
    const memory = { ...gpu().memory, total_bytes: 0, free_bytes: -5, host_budget_bytes: 0 };
    const sessions = [session('a', { resident_bytes: GIB, paged_out_bytes: GIB })];
    for (const bar of [gpuBar(gpu({ sessions, memory })), hostBar(gpu({ sessions, memory }))]) {
      expect(bar?.segments.every(each => each.share >= 0 && each.share <= 1)).toBe(true);
    }
  });
});
