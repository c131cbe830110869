/**
 * What the server extension says over REST and the stream (docs/rest.md), as types.
 *
 * Times ending in `_at` or `_since` are Unix seconds on the *server's* clock; `_s` are durations
 * in seconds; `_bytes` are bytes. Names are the wire's, so that nothing has to be translated.
 */

export type SessionState =
  'idle' | 'waiting' | 'running' | 'suspended' | 'paging-out' | 'paged-out' | 'paging-in' | 'lost';

export type AntiThrash = 'on' | 'always' | 'off';

/** Something is wrong: what, and what to do about it. */
export interface IProblem {
  readonly code: string;
  readonly message: string;
  readonly remedy: string;
}

export interface IMemory {
  readonly total_bytes: number;
  readonly free_bytes: number;
  readonly paged_out_bytes: number;
  readonly host_budget_bytes: number;
  /** Held by programs that are not Kiwi's. */
  readonly outside_bytes: number;
}

/** How hard the GPU works, as NVML said a few seconds ago; null: nobody knows. */
export interface IGauges {
  readonly utilisation_percent: number | null;
  readonly temperature_c: number | null;
  readonly power_w: number | null;
  readonly power_limit_w: number | null;
}

/** A program outside Kiwi with GPU memory; `pid` 0: the sum of other users'. */
export interface IOutsideProgram {
  readonly pid: number;
  readonly owner: string;
  readonly name: string;
  readonly used_bytes: number;
}

export interface IScheduler {
  readonly tq_s: number;
  readonly anti_thrash: AntiThrash;
  readonly serialised: boolean;
  /** The name of the one in force; '' where an older daemon does not say. */
  readonly policy: string;
  /** Why it serialises, or does not, in plain words. */
  readonly why: string;
  readonly swap_round_trip_s: number | null;
  /** How long the largest session runs before it may be suspended; null: the daemon does not say. */
  readonly floor_s: number | null;
}

/** One that the GPU's daemon has. */
export interface IPolicy {
  readonly name: string;
  /** What it does, in a few words. */
  readonly summary: string;
}

export type Priority = 'low' | 'normal' | 'high' | 'training';

export interface IQueueEntry {
  readonly session: string;
  /** 1 is next. */
  readonly position: number;
  readonly expected_wait_s: number | null;
  readonly waited_s: number;
  readonly waiting_since: number;
  /** When the wait is expected to end; null: nobody can tell. */
  readonly expected_at: number | null;
  /** Likely between these two; null: not known. */
  readonly expected_low_at: number | null;
  readonly expected_high_at: number | null;
  /** Why it takes longer than was said before; mostly "". */
  readonly expected_why: string;
  /** Held up by something other than its turn: the session's `problem_text` says by what. */
  readonly blocked: boolean;
  /** Who keeps it out of the GPU until they resume it ("an admin"); '': nobody. */
  readonly kept_out: string;
}

export interface ISwap {
  readonly session: string;
  readonly direction: 'out' | 'in';
  readonly bytes_moved: number;
  readonly seconds: number;
  readonly ago_s: number;
}

export interface ISession {
  readonly id: string;
  /** 0 where the reader may not know it. */
  readonly pid: number;
  readonly owner: string;
  /** The notebook's file name, or "another user". */
  readonly name: string;
  readonly state: SessionState;
  readonly resident_bytes: number;
  readonly paged_out_bytes: number;
  readonly suspensions: number;
  readonly held_s: number;
  readonly waited_s: number;
  readonly mine: boolean;
  readonly kernel_id: string;
  readonly connected: boolean;
  readonly lingering: boolean;
  readonly peak_bytes: number | null;
  readonly time_left_s: number | null;
  readonly turn_ends_at: number | null;
  readonly problem: string;
  readonly problem_text: string;
  /** Kiwi's gate is in all its programs that use the GPU: its turn can be ended in mid-cell. */
  readonly guarded: boolean;
  /** Why it is not guarded, and what to do; "" where it is. */
  readonly unguarded_text: string;
  /** Why its process does not run (Ctrl-Z, a debugger); "": it runs. */
  readonly stopped: string;
  readonly priority: Priority;
  /** System RAM of its processes, with what is paged out; null: not known, or not the reader's. */
  readonly ram_bytes: number | null;
  /** The notebook's path on this server; null for others'. */
  readonly path: string | null;
}

export type HistoryKind = 'held' | 'waited' | 'suspended' | 'out' | 'in';

export interface IHistoryEntry {
  readonly id: string;
  readonly session: string;
  readonly name: string;
  readonly path: string | null;
  readonly kind: HistoryKind;
  readonly began_at: number;
  /** null: goes on. */
  readonly ended_at: number | null;
  /** Of `out` and `in`. */
  readonly bytes_moved: number;
  /** `out` and `in`: the memory moved (else refused or lost). */
  readonly ok: boolean;
  /** `in`: brought back ahead of use. */
  readonly hinted: boolean;
}

export interface IGpu {
  readonly uuid: string;
  readonly name: string;
  readonly index: number;
  readonly emulated: boolean;
  readonly memory: IMemory;
  readonly scheduler: IScheduler;
  readonly holders: readonly string[];
  readonly queue: readonly IQueueEntry[];
  readonly sessions: readonly ISession[];
  readonly swaps: readonly ISwap[];
  readonly history: readonly IHistoryEntry[];
  readonly driver_version: string;
  readonly daemon_version: string;
  readonly daemon_pid: number;
  readonly uptime_s: number;
  readonly errors: readonly string[];
  /** false: the daemon is away; the rest is what was known last. */
  readonly reachable: boolean;
  readonly problem: IProblem | null;
  readonly may_set: boolean;
  readonly policies: readonly IPolicy[];
  readonly gauges: IGauges;
  /** Who has `memory.outside_bytes`, as far as NVML names them. */
  readonly outside: readonly IOutsideProgram[];
}

export interface IServer {
  readonly version: string;
  readonly may_set: boolean;
  readonly history_s: number;
  readonly problem: IProblem | null;
}

export interface IState {
  readonly epoch: string;
  readonly seq: number;
  /** The server's clock when this was written. */
  readonly now: number;
  readonly server: IServer;
  readonly gpus: readonly IGpu[];
}

export interface ISnapshot extends IState {
  readonly type: 'snapshot';
}

/** Fields of a GPU that a delta replaces whole. */
export type GpuFields = Omit<IGpu, 'sessions' | 'history'>;

export interface IGpuDelta {
  readonly set?: Partial<GpuFields>;
  /** Changed fields only; all of them for a session that is new. */
  readonly sessions?: Readonly<Record<string, Partial<ISession>>>;
  readonly gone?: readonly string[];
  readonly history?: readonly IHistoryEntry[];
}

export interface IDelta {
  readonly type: 'delta';
  readonly seq: number;
  readonly now: number;
  readonly server?: IServer;
  readonly gpus?: Readonly<Record<string, IGpuDelta>>;
  readonly gpus_gone?: readonly string[];
}

export interface IHeartbeat {
  readonly type: 'heartbeat';
  readonly seq: number;
  readonly now: number;
}

export type StreamMessage = ISnapshot | IDelta | IHeartbeat;
