/**
 * The types of the server extension's REST interface and stream (docs/rest.md).
 *
 * Written by packaging/typescript_types.py from kiwi_jupyter/server_ext/model.py: do not edit.
 * Times ending in `_at` or `_since` are Unix seconds on the *server's* clock; `_s` are durations
 * in seconds; `_bytes` are bytes. Names are the wire's, so that nothing has to be translated.
 */

/** What is wrong, and what to do about it. Also the body of every error. */
export interface IProblem {
  readonly code: string;
  readonly message: string;
  readonly remedy: string;
}

/**
 * A kernel whose environment has no Kiwi. `takes_part`: its calls pass Kiwi's gate, and
 * take turns. `text` says what that means for its user, and what to do.
 */
export interface IBareKernel {
  readonly takes_part: boolean;
  readonly text: string;
}

/**
 * `problem` says why there are no GPUs to show. `bare_kernels`: by Jupyter's kernel id.
 */
export interface IServer {
  readonly version: string;
  readonly may_set: boolean;
  readonly history_s: number;
  readonly problem: IProblem | null;
  readonly bare_kernels: Readonly<Record<string, IBareKernel>>;
}

export interface IMemory {
  readonly total_bytes: number;
  readonly free_bytes: number;
  readonly paged_out_bytes: number;
  readonly host_budget_bytes: number;
  /** GPU memory that programs outside Kiwi hold. */
  readonly outside_bytes: number;
  /**
   * System RAM that preloaded libraries hold: paged-out memory, and what they keep for
   * speed.
   */
  readonly arena_bytes: number;
}

export const MEMORY_DEFAULTS = {
  outside_bytes: 0,
  arena_bytes: 0
} as const;

export type AntiThrash = 'on' | 'always' | 'off';

export interface IScheduler {
  readonly tq_s: number;
  readonly anti_thrash: AntiThrash;
  readonly serialised: boolean;
  readonly why: string;
  readonly swap_round_trip_s: number | null;
  readonly policy: string;
  /**
   * How long the largest session runs before it may be suspended: its swap time, at least
   * a short minimum. null: an older daemon, which does not send it.
   */
  readonly floor_s: number | null;
  /**
   * Number of the last waits (at most a hundred, of a second or more) whose first
   * forecast is known. `foretold_well` of them came within two seconds or a quarter of
   * their forecast.
   */
  readonly foretold: number;
  readonly foretold_well: number;
}

export const SCHEDULER_DEFAULTS = {
  why: '',
  swap_round_trip_s: null,
  policy: '',
  floor_s: null,
  foretold: 0,
  foretold_well: 0
} as const;

export interface IWaiter {
  readonly session: string;
  readonly position: number;
  readonly expected_wait_s: number | null;
  readonly waited_s: number;
  readonly expected_low_s: number | null;
  readonly expected_high_s: number | null;
  /** The four `expected_` fields mean the same as those of `Waiting`. */
  readonly expected_why: string;
  /**
   * Whether it waits because of a fault, not for its turn. Its session's `problem_text`
   * names the fault.
   */
  readonly blocked: boolean;
  /**
   * Who keeps it out of the GPU until they resume it ("an admin"). Such entries come
   * last.
   */
  readonly kept_out: string;
  readonly waiting_since: number;
  /** Expected end of the wait; null: unknown. */
  readonly expected_at: number | null;
  readonly expected_low_at: number | null;
  /** The wait likely ends between these two; null: not known. */
  readonly expected_high_at: number | null;
}

export const WAITER_DEFAULTS = {
  waited_s: 0.0,
  expected_low_s: null,
  expected_high_s: null,
  expected_why: '',
  blocked: false,
  kept_out: '',
  expected_at: null,
  expected_low_at: null,
  expected_high_at: null
} as const;

export type SessionState = 'idle' | 'waiting' | 'running' | 'suspended' | 'paging-out' | 'paged-out' | 'paging-in' | 'lost';

export type Priority = 'low' | 'normal' | 'high' | 'training';

export type MovedBy = 'checkpoint' | 'inprocess' | 'both';

/**
 * A session. `path` is the notebook's path on this server, for this user's sessions only.
 */
export interface ISession {
  readonly id: string;
  readonly pid: number;
  readonly owner: string;
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
  /**
   * For a holder, the most that is left of its turn while others wait; it may be less.
   */
  readonly time_left_s: number | null;
  /**
   * How long at most it keeps its place in the GPU from a waiter, in case its next cell
   * comes; null: it keeps none, or nobody needs it.
   */
  readonly keeps_s: number | null;
  readonly problem: string;
  readonly problem_text: string;
  readonly priority: Priority;
  readonly pager: MovedBy;
  /**
   * Why the driver moves its memory although Kiwi's library was asked to, and the remedy;
   * "": nothing to say, or not for the reader.
   */
  readonly pager_text: string;
  readonly unowned: Readonly<Record<string, number>>;
  /**
   * True if Kiwi's gate is in front of the driver in all its processes that use the GPU.
   * If not, it is never stopped in mid-burst; `unguarded_text` gives the reason and the
   * remedy.
   */
  readonly guarded: boolean;
  readonly unguarded_text: string;
  /**
   * Why its process does not run (Ctrl-Z, a frozen control group, a debugger); "": it
   * runs.
   */
  readonly stopped: string;
  /**
   * Who keeps it out of the GPU until they resume it, whether or not it waits; "":
   * nobody.
   */
  readonly kept_out: string;
  /**
   * System RAM of its process and of its other processes with Kiwi's gate, including what
   * is paged out. null: not known, or not for the reader.
   */
  readonly ram_bytes: number | null;
  readonly path: string | null;
  readonly turn_ends_at: number | null;
  /**
   * By when its memory goes out for the first in line unless its next cell comes before;
   * null where `keeps_s` is.
   */
  readonly keeps_until: number | null;
}

export const SESSION_DEFAULTS = {
  mine: false,
  kernel_id: '',
  connected: true,
  lingering: false,
  peak_bytes: null,
  time_left_s: null,
  keeps_s: null,
  problem: '',
  problem_text: '',
  priority: 'normal',
  pager: 'checkpoint',
  pager_text: '',
  unowned: {},
  guarded: true,
  unguarded_text: '',
  stopped: '',
  kept_out: '',
  ram_bytes: null,
  path: null,
  turn_ends_at: null,
  keeps_until: null
} as const;

/**
 * A move of memory that ended. `ago_s` is its age; `direction` is "out" or "in". `name`
 * is the session's, which may have ended; "": not known any more.
 */
export interface ISwap {
  readonly session: string;
  readonly direction: 'in' | 'out';
  readonly bytes_moved: number;
  readonly seconds: number;
  readonly ago_s: number;
  readonly name: string;
}

/**
 * A policy that the daemon has. `summary` says what it does, in a few words for people.
 */
export interface IPolicy {
  readonly name: string;
  readonly summary: string;
}

/** How hard the GPU works, as NVML said a few seconds ago. null: not known. */
export interface IGauges {
  /** Share of the last moments in which any kernel ran. */
  readonly utilisation_percent: number | null;
  readonly temperature_c: number | null;
  readonly power_w: number | null;
  readonly power_limit_w: number | null;
}

/**
 * A program outside Kiwi that has GPU memory. Another user's has neither name nor pid:
 * `name` is then "another user", `pid` 0, and one entry holds the sum of all of them.
 */
export interface IOutsideProgram {
  readonly pid: number;
  readonly owner: string;
  readonly name: string;
  readonly used_bytes: number;
  /**
   * The memory is that of a program that has ended. This one was forked from it, and
   * keeps it.
   */
  readonly left: boolean;
}

export type HistoryKind = 'held' | 'waited' | 'suspended' | 'out' | 'in';

/** A bar of the timeline. `id` is never used again, not even by a restarted daemon. */
export interface IHistory {
  readonly id: string;
  readonly session: string;
  readonly name: string;
  readonly kind: HistoryKind;
  readonly began_at: number;
  readonly ended_at: number | null;
  readonly bytes_moved: number;
  readonly ok: boolean;
  readonly hinted: boolean;
  readonly path: string | null;
}

/** A GPU. `reachable`: its daemon answers; otherwise the rest is the last known state. */
export interface IGpu {
  readonly uuid: string;
  readonly name: string;
  readonly index: number;
  readonly emulated: boolean;
  readonly memory: IMemory;
  readonly scheduler: IScheduler;
  readonly holders: readonly string[];
  readonly queue: readonly IWaiter[];
  readonly sessions: readonly ISession[];
  readonly swaps: readonly ISwap[];
  readonly driver_version: string;
  readonly daemon_version: string;
  readonly daemon_pid: number;
  readonly uptime_s: number;
  /**
   * What moves the memory of programs that ask for nothing, and why; "": an older daemon.
   */
  readonly pager_text: string;
  readonly errors: readonly string[];
  readonly history_serial: number;
  readonly may_set: boolean;
  readonly policies: readonly IPolicy[];
  readonly gauges: IGauges;
  /** The programs that hold `memory.outside_bytes`, as far as NVML names them. */
  readonly outside: readonly IOutsideProgram[];
  /**
   * How long a new session would wait if it asked now, after the expected ones. null: not
   * known, because a fault or a program outside Kiwi holds it up.
   */
  readonly newcomer_wait_s: number | null;
  /**
   * Number of programs that servers have placed here and that neither are sessions yet
   * nor use the GPU outside Kiwi.
   */
  readonly expected: number;
  readonly history: readonly IHistory[];
  readonly reachable: boolean;
  readonly problem: IProblem | null;
}

export const GPU_DEFAULTS = {
  swaps: [],
  driver_version: '',
  daemon_version: '',
  daemon_pid: 0,
  uptime_s: 0.0,
  pager_text: '',
  errors: [],
  history_serial: 0,
  may_set: false,
  policies: [],
  gauges: { utilisation_percent: null, temperature_c: null, power_w: null, power_limit_w: null },
  outside: [],
  newcomer_wait_s: null,
  expected: 0,
  reachable: true,
  problem: null
} as const;

/** The whole state. `epoch` names this run of the server, `seq` the last change. */
export interface IState {
  readonly epoch: string;
  readonly seq: number;
  readonly now: number;
  readonly server: IServer;
  readonly gpus: readonly IGpu[];
}

/** First message of a stream, and again for a reader that was too slow. */
export interface ISnapshot {
  readonly type: 'snapshot';
  readonly epoch: string;
  readonly seq: number;
  readonly now: number;
  readonly server: IServer;
  readonly gpus: readonly IGpu[];
}

/**
 * The change of a GPU. `set`: whole values of fields of the GPU; `sessions`: changed
 * fields, all fields of a new one; `history`: entries that are new or replace the one
 * with their id.
 */
export interface IGpuDelta {
  readonly set?: Partial<Omit<IGpu, 'sessions' | 'history'>>;
  readonly sessions?: Readonly<Record<string, Partial<ISession>>>;
  readonly gone?: readonly string[];
  readonly history?: readonly IHistory[];
}

/** The changes from `seq - 1` to `seq`. */
export interface IDelta {
  readonly type: 'delta';
  readonly seq: number;
  readonly now: number;
  readonly server?: IServer;
  readonly gpus?: Readonly<Record<string, IGpuDelta>>;
  readonly gpus_gone?: readonly string[];
}

/** Sent when there was nothing else to send for a while. */
export interface IHeartbeat {
  readonly type: 'heartbeat';
  readonly seq: number;
  readonly now: number;
}

/** `why`: in plain words, why it has not begun. */
export interface IBroughtBack {
  readonly begun: boolean;
  readonly why: string;
}

export interface IStoryLine {
  readonly ago_s: number;
  readonly text: string;
}

export interface IStory {
  readonly lines: readonly IStoryLine[];
}

export type StreamMessage = ISnapshot | IDelta | IHeartbeat;
