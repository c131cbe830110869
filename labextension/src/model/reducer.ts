/** Applies the stream's messages to the state: a pure function that changes nothing in place. */

import type { IDelta, IGpu, IGpuDelta, IHistory, ISession, IState, StreamMessage } from './types';

/** A message was missed or makes no sense: ask for the whole state again. */
export const GAP = Symbol('gap');

/** Returns the state after `message`: the same object if nothing changed. */
export function reduce(state: IState | null, message: StreamMessage): IState | null | typeof GAP {
  if (message.type === 'snapshot') {
    const { type, ...whole } = message;
    return whole;
  }
  if (state === null) {
    return GAP;
  }
  if (message.type === 'heartbeat') {
    return message.seq === state.seq ? state : GAP;
  }
  if (message.seq <= state.seq) {
    return state; // received before the reconnect
  }
  return message.seq === state.seq + 1 ? withDelta(state, message) : GAP;
}

function withDelta(state: IState, delta: IDelta): IState | typeof GAP {
  const server = delta.server ?? state.server;
  const gone = new Set(delta.gpus_gone);
  const left_at = delta.now - server.history_s;
  const gpus: IGpu[] = [];
  const changes = new Map(Object.entries(delta.gpus ?? {}));
  for (const gpu of state.gpus) {
    const change = changes.get(gpu.uuid);
    changes.delete(gpu.uuid);
    if (!gone.has(gpu.uuid)) {
      gpus.push(change === undefined ? gpu : withChange(gpu, change, left_at));
    }
  }
  for (const change of changes.values()) {
    const gpu = newGpu(change);
    if (gpu === null) {
      return GAP;
    }
    gpus.push(gpu);
  }
  return { ...state, seq: delta.seq, now: delta.now, server, gpus };
}

function newGpu(change: IGpuDelta): IGpu | null {
  if (change.set?.uuid === undefined || change.set.memory === undefined) {
    return null;
  }
  const empty = { sessions: [], history: [] };
  return withChange({ ...empty, ...change.set } as unknown as IGpu, change, -Infinity);
}

function withChange(gpu: IGpu, change: IGpuDelta, left_at: number): IGpu {
  return {
    ...gpu,
    ...change.set,
    sessions: withSessions(gpu.sessions, change),
    history: withHistory(gpu.history, change.history, left_at)
  };
}

function withSessions(sessions: readonly ISession[], change: IGpuDelta): readonly ISession[] {
  if (change.sessions === undefined && change.gone === undefined) {
    return sessions;
  }
  const gone = new Set(change.gone);
  const news = new Map(Object.entries(change.sessions ?? {}));
  const result: ISession[] = [];
  for (const session of sessions) {
    const fields = news.get(session.id);
    news.delete(session.id);
    if (!gone.has(session.id)) {
      result.push(fields === undefined ? session : { ...session, ...fields });
    }
  }
  for (const [id, fields] of news) {
    result.push({ ...(fields as ISession), id });
  }
  return result;
}

/** Upserts by id; entries that ended before the timeline's beginning are dropped. */
function withHistory(
  history: readonly IHistory[],
  news: readonly IHistory[] | undefined,
  left_at: number
): readonly IHistory[] {
  if (news === undefined || news.length === 0) {
    return history;
  }
  const entries = new Map(history.map(entry => [entry.id, entry]));
  for (const entry of news) {
    entries.set(entry.id, entry);
  }
  return [...entries.values()].filter(
    entry => entry.ended_at === null || entry.ended_at >= left_at
  );
}
