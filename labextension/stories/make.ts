/** Makes states with plain defaults, so that a story writes only what matters to it. */

import type {
  HistoryKind,
  IGpu,
  IHistory,
  IProblem,
  IScheduler,
  ISession,
  IState,
  IWaiter
} from '../src/model/types';
import {
  GPU_DEFAULTS,
  MEMORY_DEFAULTS,
  SCHEDULER_DEFAULTS,
  SESSION_DEFAULTS,
  WAITER_DEFAULTS
} from '../src/model/types';

/** The time of all stories (Unix seconds). */
export const NOW = 1_763_733_780;

export const GIB = 1024 ** 3;

export function session(id: string, changes: Partial<ISession> = {}): ISession {
  const mine = changes.mine ?? true;
  const name = mine ? `${id}.ipynb` : 'another user';
  return {
    ...SESSION_DEFAULTS,
    id,
    pid: mine ? 4711 : 0,
    owner: mine ? 'ada' : 'another user',
    name,
    state: 'idle',
    resident_bytes: 0,
    paged_out_bytes: 0,
    suspensions: 0,
    held_s: 0,
    waited_s: 0,
    mine,
    kernel_id: mine ? `kernel-${id}` : '',
    path: mine ? `work/${name}` : null,
    ...changes
  };
}

/** A place in line; `wait_s`: from NOW on, null if it is unknown. */
export function waits(id: string, position: number, wait_s: number | null): IWaiter {
  return {
    ...WAITER_DEFAULTS,
    session: id,
    position,
    expected_wait_s: wait_s,
    waited_s: 4,
    waiting_since: NOW - 4,
    expected_at: wait_s === null ? null : NOW + wait_s
  };
}

export function scheduler(changes: Partial<IScheduler> = {}): IScheduler {
  return {
    ...SCHEDULER_DEFAULTS,
    tq_s: 30,
    anti_thrash: 'on',
    serialised: false,
    policy: 'round-robin',
    why: 'as long as they fit together',
    ...changes
  };
}

export function gpu(changes: Partial<IGpu> & { used_bytes?: number } = {}): IGpu {
  const sessions = changes.sessions ?? [];
  const total_bytes = changes.memory?.total_bytes ?? 80 * GIB;
  const outside_bytes = changes.memory?.outside_bytes ?? 0;
  const resident = sessions.reduce((sum, each) => sum + each.resident_bytes, 0);
  return {
    ...GPU_DEFAULTS,
    uuid: 'GPU-5d0c3a9e-1111-2222-3333-444455556666',
    name: 'NVIDIA H100 80GB HBM3',
    index: 0,
    emulated: false,
    memory: {
      ...MEMORY_DEFAULTS,
      total_bytes,
      outside_bytes,
      free_bytes: Math.max(0, total_bytes - outside_bytes - resident),
      paged_out_bytes: sessions.reduce((sum, each) => sum + each.paged_out_bytes, 0),
      host_budget_bytes: 192 * GIB
    },
    scheduler: scheduler(),
    holders: [],
    queue: [],
    history: [],
    driver_version: '580.95.05',
    daemon_version: '0.1.0',
    daemon_pid: 4242,
    uptime_s: 86_400,
    may_set: true,
    policies: [
      { name: 'round-robin', summary: 'first come, first served' },
      { name: 'interactive', summary: 'short cells first' }
    ],
    ...changes,
    sessions
  };
}

export function state(gpus: readonly IGpu[], problem: IProblem | null = null): IState {
  return {
    epoch: 'story',
    seq: 1,
    now: NOW,
    server: { version: '0.1.0', may_set: true, history_s: 3600, problem, bare_kernels: {} },
    gpus
  };
}

let entries = 0;

/** A past event: `began` and `ended` are seconds before NOW; null: it continues. */
export function did(
  who: ISession,
  kind: HistoryKind,
  began: number,
  ended: number | null,
  changes: Partial<IHistory> = {}
): IHistory {
  entries += 1;
  return {
    id: `story-${entries}`,
    session: who.id,
    name: who.name,
    path: who.path,
    kind,
    began_at: NOW - began,
    ended_at: ended === null ? null : NOW - ended,
    bytes_moved: 0,
    ok: true,
    hinted: false,
    ...changes
  };
}

/** A move of memory at the speed of current drivers. */
export function moved(
  who: ISession,
  kind: 'out' | 'in',
  began: number,
  gib: number,
  changes: Partial<IHistory> = {}
): IHistory {
  const took_s = gib / 12;
  return did(who, kind, began, began - took_s, { bytes_moved: gib * GIB, ...changes });
}
