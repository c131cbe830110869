/** One constructor per thing, everything defaulted: what a test writes is what matters to it. */

import type { IGpu, IHistoryEntry, IQueueEntry, ISession, IState } from '../src/model/types';

export const GIB = 1024 ** 3;

export function session(fields: Partial<ISession> = {}): ISession {
  const id = fields.id ?? 's1';
  return {
    id,
    pid: 100,
    owner: 'ada',
    name: `${id}.ipynb`,
    state: 'idle',
    resident_bytes: 2 * GIB,
    paged_out_bytes: 0,
    suspensions: 0,
    held_s: 0,
    waited_s: 0,
    mine: true,
    kernel_id: `k-${id}`,
    connected: true,
    lingering: false,
    peak_bytes: null,
    time_left_s: null,
    turn_ends_at: null,
    problem: '',
    problem_text: '',
    guarded: true,
    unguarded_text: '',
    stopped: '',
    ram_bytes: null,
    priority: 'normal',
    path: `${id}.ipynb`,
    ...fields
  };
}

export function waits(id: string, fields: Partial<IQueueEntry> = {}): IQueueEntry {
  return {
    session: id,
    position: 1,
    expected_wait_s: null,
    waited_s: 0,
    waiting_since: 1000,
    expected_at: null,
    expected_low_at: null,
    expected_high_at: null,
    expected_why: '',
    blocked: false,
    kept_out: '',
    ...fields
  };
}

export function entry(fields: Partial<IHistoryEntry> = {}): IHistoryEntry {
  return {
    id: 'r-1',
    session: 's1',
    name: 's1.ipynb',
    path: null,
    kind: 'held',
    began_at: 990,
    ended_at: null,
    bytes_moved: 0,
    ok: true,
    hinted: false,
    ...fields
  };
}

export function gpu(fields: Partial<IGpu> = {}): IGpu {
  return {
    uuid: 'GPU-1',
    name: 'NVIDIA Test',
    index: 0,
    emulated: true,
    memory: {
      total_bytes: 80 * GIB,
      free_bytes: 70 * GIB,
      paged_out_bytes: 0,
      host_budget_bytes: 200 * GIB,
      outside_bytes: 0
    },
    scheduler: {
      tq_s: 30,
      anti_thrash: 'on',
      serialised: true,
      policy: 'round-robin',
      why: '',
      swap_round_trip_s: null,
      floor_s: null
    },
    holders: [],
    queue: [],
    sessions: [],
    swaps: [],
    history: [],
    driver_version: '580',
    daemon_version: '0.1.0',
    daemon_pid: 1,
    uptime_s: 10,
    errors: [],
    reachable: true,
    problem: null,
    may_set: true,
    policies: [
      { name: 'round-robin', summary: 'first come, first served' },
      { name: 'interactive', summary: 'short cells first' }
    ],
    gauges: { utilisation_percent: null, temperature_c: null, power_w: null, power_limit_w: null },
    outside: [],
    ...fields
  };
}

export function state(gpus: readonly IGpu[] = [gpu()], fields: Partial<IState> = {}): IState {
  return {
    epoch: 'e',
    seq: 5,
    now: 1000,
    server: { version: '0.1.0', may_set: true, history_s: 1800, problem: null },
    gpus,
    ...fields
  };
}
