import { describe, expect, it } from 'vitest';

import { GAP, reduce } from '../../src/model/reducer';
import type { IDelta, IGpuDelta, IState } from '../../src/model/types';
import { entry, gpu, session, state, waits } from '../states';

const delta = (fields: Partial<IDelta>): IDelta => ({
  type: 'delta',
  seq: 6,
  now: 1001,
  ...fields
});

function after(before: IState, change: Partial<IDelta>): IState {
  const next = reduce(before, delta(change));
  if (next === GAP || next === null) {
    throw new Error('a gap');
  }
  return next;
}

describe('the reducer', () => {
  it('takes a snapshot as it is', () => {
    const whole = state();
    expect(reduce(null, { type: 'snapshot', ...whole })).toEqual(whole);
    expect(reduce(state([], { seq: 99 }), { type: 'snapshot', ...whole })).toEqual(whole);
  });

  it('asks for the whole state if a message is missing', () => {
    expect(reduce(null, delta({}))).toBe(GAP);
    expect(reduce(state(), delta({ seq: 7 }))).toBe(GAP);
    expect(reduce(state(), { type: 'heartbeat', seq: 6, now: 1 })).toBe(GAP);
    expect(reduce(null, { type: 'heartbeat', seq: 5, now: 1 })).toBe(GAP);
  });

  it('drops messages that it has seen, and changes nothing after a heartbeat', () => {
    const before = state();
    expect(reduce(before, delta({ seq: 5 }))).toBe(before);
    expect(reduce(before, { type: 'heartbeat', seq: 5, now: 2 })).toBe(before);
  });

  it('changes only what changed, and nothing in place', () => {
    const other = gpu({ uuid: 'GPU-2', index: 1 });
    const before = state([gpu({ sessions: [session(), session({ id: 's2' })] }), other]);
    const frozen = structuredClone(before);
    const next = after(before, {
      gpus: {
        'GPU-1': { set: { queue: [waits('s1')] }, sessions: { s1: { state: 'waiting' } } }
      }
    });
    expect(before).toEqual(frozen);
    expect(next.seq).toBe(6);
    expect(next.now).toBe(1001);
    expect(next.gpus[0]?.sessions[0]).toEqual(session({ state: 'waiting' }));
    expect(next.gpus[0]?.sessions[1]).toBe(before.gpus[0]?.sessions[1]);
    expect(next.gpus[0]?.history).toBe(before.gpus[0]?.history);
    expect(next.gpus[1]).toBe(other);
  });

  it('keeps sessions in the order in which they came', () => {
    const before = state([gpu({ sessions: [session({ id: 'a' }), session({ id: 'b' })] })]);
    const next = after(before, {
      gpus: { 'GPU-1': { sessions: { c: session({ id: 'c' }), b: { held_s: 3 } }, gone: ['a'] } }
    });
    expect(next.gpus[0]?.sessions.map(each => each.id)).toEqual(['b', 'c']);
    expect(next.gpus[0]?.sessions[0]?.held_s).toBe(3);
  });

  it('replaces history by id, adds what is new and forgets what is too old', () => {
    const old = entry({ id: 'r-0', began_at: -900, ended_at: -800 });
    const before = state([gpu({ history: [old, entry({ id: 'r-1' })] })]);
    const ended = entry({ id: 'r-1', ended_at: 1000 });
    const next = after(before, {
      gpus: { 'GPU-1': { history: [ended, entry({ id: 'r-2', kind: 'out' })] } }
    });
    expect(next.gpus[0]?.history.map(each => each.id)).toEqual(['r-1', 'r-2']);
    expect(next.gpus[0]?.history[0]).toEqual(ended);
  });

  it('adds and removes GPUs, and replaces the server', () => {
    const { sessions: _s, history: _h, ...fields } = gpu({ uuid: 'GPU-2', index: 1 });
    const server = { ...state().server, may_set: false };
    const next = after(state(), {
      server,
      gpus: {
        'GPU-2': {
          set: fields as IGpuDelta['set'],
          sessions: { x: session({ id: 'x' }) },
          history: [entry()]
        }
      },
      gpus_gone: ['GPU-1']
    });
    expect(next.server).toEqual(server);
    expect(next.gpus).toEqual([
      gpu({ uuid: 'GPU-2', index: 1, sessions: [session({ id: 'x' })], history: [entry()] })
    ]);
  });

  it('asks for the whole state after a change of an unknown GPU', () => {
    expect(reduce(state(), delta({ gpus: { 'GPU-9': { set: { holders: [] } } } }))).toBe(GAP);
  });
});
