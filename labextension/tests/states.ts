/** Constructors with plain defaults, so that a test writes only what matters to it. */

import * as make from '../stories/make';
import type { IGpu, IHistory, IWaiter, ISession, IState } from '../src/model/types';

export { GIB } from '../stories/make';

export function session(fields: Partial<ISession> = {}): ISession {
  const id = fields.id ?? 's1';
  return {
    ...make.session(id),
    pid: 100,
    resident_bytes: 2 * make.GIB,
    kernel_id: `k-${id}`,
    path: `${id}.ipynb`,
    ...fields
  };
}

export function waits(id: string, fields: Partial<IWaiter> = {}): IWaiter {
  return { ...make.waits(id, 1, null), waited_s: 0, waiting_since: 1000, ...fields };
}

export function entry(fields: Partial<IHistory> = {}): IHistory {
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
    ...make.gpu({ scheduler: make.scheduler({ serialised: true, why: '' }) }),
    uuid: 'GPU-1',
    name: 'NVIDIA Test',
    emulated: true,
    memory: {
      total_bytes: 80 * make.GIB,
      free_bytes: 70 * make.GIB,
      paged_out_bytes: 0,
      host_budget_bytes: 200 * make.GIB,
      outside_bytes: 0,
      arena_bytes: 0
    },
    driver_version: '580',
    daemon_pid: 1,
    uptime_s: 10,
    ...fields
  };
}

export function state(gpus: readonly IGpu[] = [gpu()], fields: Partial<IState> = {}): IState {
  return {
    epoch: 'e',
    seq: 5,
    now: 1000,
    server: { version: '0.1.0', may_set: true, history_s: 1800, problem: null, bare_kernels: {} },
    gpus,
    ...fields
  };
}
