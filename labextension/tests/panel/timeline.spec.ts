import { describe, expect, it } from 'vitest';

import { redrawEvery_s, timeline } from '../../src/panel/timeline-model';
import { listed } from '../../src/panel/timeline-words';
import { GIB, NOW, did, gpu, moved, session } from '../../stories/make';

const a = session('a');
const b = session('b');
const two = { sessions: [a, b] };
const HOUR_S = 3600;

describe('timeline', () => {
  it('puts spans at their times, "now" at the right edge', () => {
    const history = [did(a, 'held', 240, 120), did(b, 'waited', 60, null)];
    const { rows } = timeline(gpu({ ...two, history }), NOW, 300, HOUR_S);
    expect(rows.map(row => row.session)).toEqual(['a', 'b']);
    expect(rows[0]?.spans[0]).toMatchObject({ kind: 'held', x: 20, width: 40 });
    expect(rows[1]?.spans[0]).toMatchObject({ kind: 'waited', x: 80, width: 20 });
  });

  it('cuts what began before and leaves out what ended before', () => {
    const history = [did(a, 'held', 400, 150), did(b, 'held', 500, 301)];
    const { rows } = timeline(gpu({ ...two, history }), NOW, 300, HOUR_S);
    expect(rows).toHaveLength(1);
    expect(rows[0]?.spans[0]).toMatchObject({ x: 0, width: 50 });
  });

  it('lets open spans grow as time passes', () => {
    const state = gpu({ ...two, history: [did(a, 'held', 60, null)] });
    const width = (now: number) => timeline(state, now, 300, HOUR_S).rows[0]?.spans[0]?.width;
    expect(width(NOW)).toBeCloseTo(20);
    expect(width(NOW + 60)).toBeCloseTo(40);
  });

  it('does not lose a short turn, not even at the right edge', () => {
    const history = [did(a, 'held', 100, 99.9), did(b, 'held', 0.01, null)];
    const { rows } = timeline(gpu({ ...two, history }), NOW, 1800, HOUR_S);
    for (const row of rows) {
      const [span] = row.spans;
      expect(span?.width).toBeGreaterThan(0.5);
      expect((span?.x ?? 0) + (span?.width ?? 0)).toBeLessThanOrEqual(100);
    }
  });

  it('draws short cells as few shapes, and never merges a wait into a turn', () => {
    const history = Array.from({ length: 200 }, (_, index) => [
      did(a, 'held', 200 - index, 199.5 - index),
      did(b, index % 2 ? 'waited' : 'held', 200 - index, 199 - index)
    ]).flat();
    const { rows } = timeline(gpu({ ...two, history }), NOW, 300, HOUR_S);
    expect(rows[0]?.spans).toHaveLength(1);
    expect(rows[0]?.spans[0]?.title).toContain('200 times');
    expect(rows[1]?.spans).toHaveLength(200);
  });

  it('shows half an hour as shares of each half minute', () => {
    const at = Math.floor((NOW - 900) / 30) * 30;
    const ago = NOW - at;
    const history = [
      ...Array.from({ length: 10 }, (_, index) =>
        did(a, 'held', ago - 3 * index, ago - 3 * index - 1.5)
      ),
      did(a, 'waited', ago, ago - 6)
    ];
    const { rows, key } = timeline(gpu({ ...two, history }), NOW, 1800, HOUR_S);
    const [held, waited, ...more] = rows[0]?.spans ?? [];
    expect(more).toEqual([]);
    expect(held).toMatchObject({ kind: 'held', from: 0 });
    expect(held?.share).toBeCloseTo(0.5);
    expect(waited?.from).toBeCloseTo(0.5);
    expect(waited?.share).toBeCloseTo(0.2);
    expect(held?.width).toBeCloseTo(100 / 60);
    expect(held?.title).toContain(
      'had the GPU 10 times, in all for 15 s, waited for the GPU for 6.0 s'
    );
    expect(key).toEqual(['held', 'waited', 'share']);
  });

  it('never fills a column by more than the whole, and fills it while somebody computes', () => {
    const history = [did(a, 'held', 1700, null), did(a, 'waited', 100, null)];
    const { rows } = timeline(gpu({ ...two, history }), NOW, 1800, HOUR_S);
    for (const span of rows[0]?.spans ?? []) {
      expect(span.from + span.share).toBeLessThanOrEqual(1 + 1e-9);
    }
    expect(rows[0]?.spans.filter(span => span.share === 1).length).toBeGreaterThan(50);
    const last = rows[0]?.spans[rows[0].spans.length - 1];
    expect((last?.x ?? 0) + (last?.width ?? 0)).toBeCloseTo(100);
  });

  it('joins moves that are close to each other in half an hour', () => {
    const begin = Math.floor((NOW - 900) / 120) * 120;
    const ago = NOW - begin;
    const history = [
      moved(a, 'out', ago - 1, 12),
      moved(a, 'out', ago - 60, 12),
      moved(a, 'in', ago - 30, 6),
      moved(a, 'out', ago - 61, 3, { ok: false }),
      moved(a, 'out', ago - 62, 3, { ok: false }),
      moved(a, 'out', ago - 130, 12)
    ];
    const { rows, key } = timeline(gpu({ ...two, history }), NOW, 1800, HOUR_S);
    expect(rows[0]?.marks).toHaveLength(4);
    expect(rows[0]?.marks[0]?.title).toContain('memory paged out 2 times, 24 GiB in all');
    const failed = rows[0]?.marks.find(mark => !mark.ok);
    expect(failed?.title).toContain('could not be paged out 2 times');
    expect(key).toEqual(['out', 'in', 'failed']);
  });

  it('explains every mark in the picture', () => {
    const history = [did(a, 'held', 100, 70), did(b, 'suspended', 60, null)];
    const keyOf = (zoom_s: 300 | 1800, history_s: number) =>
      timeline(gpu({ ...two, history }), NOW, zoom_s, history_s).key;
    expect(keyOf(300, HOUR_S)).toEqual(['held', 'suspended']);
    expect(keyOf(1800, 600)).toEqual(['held', 'suspended', 'share', 'unrecorded']);
  });

  it('marks moves of memory at their times, with their speed', () => {
    const history = [moved(a, 'out', 150, 12), moved(a, 'in', 30, 6, { ok: false })];
    const { rows } = timeline(gpu({ ...two, history }), NOW, 300, HOUR_S);
    const [out, failed] = rows[0]?.marks ?? [];
    expect(out).toMatchObject({ direction: 'out', ok: true });
    expect(out?.x).toBeCloseTo(50.17, 1);
    expect(out?.title).toContain('paged 12 GiB out in 1.0 s, 12.9 GB/s');
    expect(failed).toMatchObject({ direction: 'in', ok: false });
    expect(failed?.title).toContain('could not page its memory');
  });

  it('does not show a move under way as failed', () => {
    const history = [did(a, 'out', 2, null, { ok: false })];
    const { rows } = timeline(gpu({ ...two, history }), NOW, 300, HOUR_S);
    expect(rows[0]?.marks[0]).toMatchObject({ ok: true });
    expect(rows[0]?.marks[0]?.title).toContain('pages its memory out to system RAM, for 2 s');
  });

  it('reads like the timeline of the design', () => {
    const history = [
      did(a, 'held', 100, 70),
      did(b, 'waited', 80, 60),
      did(a, 'suspended', 70, 40),
      moved(a, 'out', 70, 46),
      did(b, 'held', 60, 45),
      did(a, 'held', 40, null)
    ];
    expect(timeline(gpu({ ...two, history }), NOW, 300, HOUR_S).text).toBe(
      'Timeline of the last 5 minutes: a.ipynb had the GPU for 1 min 10 s, was suspended in ' +
        'mid-cell for 30 s, its memory moved 1 time; b.ipynb had the GPU for 15 s, waited for ' +
        'the GPU for 20 s.'
    );
  });

  it('keeps a row for ended sessions, under their names', () => {
    const gone = session('gone');
    const { rows } = timeline(
      gpu({ ...two, history: [did(gone, 'held', 9, 3)] }),
      NOW,
      300,
      HOUR_S
    );
    expect(rows[0]).toMatchObject({ name: 'gone.ipynb', mine: false });
  });

  it('has one row for a notebook whose kernel was restarted, or ended and started again', () => {
    const now = session('now', { name: 'train.ipynb', path: 'work/train.ipynb' });
    const restarted = { ...now, id: 'restarted' };
    const history = [
      did({ ...now, id: 'ended', path: null }, 'held', 200, 190),
      did(restarted, 'held', 100, 70),
      moved(restarted, 'out', 60, 3),
      did(now, 'held', 40, null)
    ];
    const { rows, hidden } = timeline(gpu({ sessions: [now], history }), NOW, 300, HOUR_S);
    expect(rows).toHaveLength(1);
    expect(hidden).toBe(0);
    expect(rows[0]).toMatchObject({ session: 'now', name: 'train.ipynb', look: 0 });
    expect(rows[0]?.spans).toHaveLength(3);
    expect(rows[0]?.marks).toHaveLength(1);
    const between = timeline(gpu({ sessions: [], history: history.slice(1, 3) }), NOW, 300, HOUR_S);
    expect(between.rows).toMatchObject([{ session: 'restarted', name: 'train.ipynb' }]);
  });

  it('keeps notebooks of the same name, and two other users, apart', () => {
    const here = session('here', { name: 'a.ipynb', path: 'here/a.ipynb' });
    const there = session('there', { name: 'a.ipynb', path: 'there/a.ipynb' });
    const history = [
      did({ ...there, id: 'there before' }, 'held', 99, 90),
      did({ ...here, id: 'one of them', path: null }, 'held', 89, 80),
      did(session('x', { mine: false }), 'held', 79, 70),
      did(session('y', { mine: false }), 'held', 69, 60),
      did(here, 'held', 59, 50)
    ];
    const { rows } = timeline(gpu({ sessions: [here, there], history }), NOW, 300, HOUR_S);
    expect(rows.map(row => row.session).sort()).toEqual(['here', 'one of them', 'there', 'x', 'y']);
  });

  it('shows few rows of many: own ones and the latest, in order of arrival', () => {
    const many = Array.from({ length: 50 }, (_, index) =>
      session(`n${index}`, { mine: index < 5 })
    );
    const history = many.map((each, index) => did(each, 'held', 200 - index, 199 - index));
    const picture = timeline(gpu({ sessions: many, history }), NOW, 300, HOUR_S);
    expect(picture.rows.map(row => row.session)).toEqual(['n2', 'n3', 'n4', 'n47', 'n48', 'n49']);
    expect(picture.hidden).toBe(44);
    expect(timeline(gpu({ sessions: many, history }), NOW, 300, HOUR_S, 50).hidden).toBe(0);
  });

  it('has ticks at round times, and no label at the edges', () => {
    const { ticks } = timeline(gpu(), NOW, 300, HOUR_S);
    expect(ticks.every(tick => tick.key % 60 === 0)).toBe(true);
    const labelled = ticks.filter(tick => tick.label !== '');
    expect(labelled.length).toBeGreaterThan(0);
    expect(labelled.every(tick => tick.x > 7 && tick.x < 82)).toBe(true);
  });

  it('says which part of the time is not recorded', () => {
    expect(timeline(gpu(), NOW, 1800, 300).unrecorded).toBeCloseTo(83.33, 1);
    expect(timeline(gpu(), NOW, 300, 300).unrecorded).toBe(0);
  });

  it('is redrawn when it has moved by about a pixel, never more than once a second', () => {
    expect([60, 300, 1800].map(zoom => redrawEvery_s(zoom as 60))).toEqual([1, 1, 6]);
  });

  it('is also a list, the latest first', () => {
    const history = [
      did(a, 'held', 100, 70),
      moved(b, 'in', 20, 12, { hinted: true, bytes_moved: 12 * GIB })
    ];
    expect(
      listed(gpu({ ...two, history }), NOW, 300).map(line => `${line.name} ${line.what}`)
    ).toEqual([
      'b.ipynb paged 12 GiB in, in 1.0 s, 12.9 GB/s, ahead of use',
      'a.ipynb had the GPU for 30 s'
    ]);
  });

  it('lists short cells of one notebook as one line, and open spans in whole seconds', () => {
    const history = [
      did(a, 'held', 60, 58),
      did(a, 'held', 55, 50),
      did(a, 'held', 45, 42),
      did(b, 'held', 40, 39),
      did(a, 'held', 2.4, null)
    ];
    expect(
      listed(gpu({ ...two, history }), NOW, 300).map(line => `${line.name} ${line.what}`)
    ).toEqual([
      'a.ipynb has the GPU for 2 s',
      'b.ipynb had the GPU for 1.0 s',
      'a.ipynb had the GPU 3 times within 18 s'
    ]);
    expect(listed(gpu({ ...two, history }), NOW, 300, 2)).toHaveLength(2);
  });
});
