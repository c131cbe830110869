/** The stories: each is a state that users meet. Look at them in this order. */

import type { Connection } from '../src/model/api';
import type { IGpu, IHistory, ISession, IState } from '../src/model/types';

import { GIB, NOW, did, gpu, moved, scheduler, session, state, waits } from './make';

export interface IStory {
  readonly state: IState | null;
  readonly connection?: Connection;
  readonly currentKernel?: string;
  /** How much of the timeline is shown. */
  readonly zoom_s?: number;
}

const BUSY = { utilisation_percent: 97, temperature_c: 71, power_w: 612, power_limit_w: 700 };
const QUIET = { utilisation_percent: 0, temperature_c: 34, power_w: 72, power_limit_w: 700 };

const TURNS = scheduler({
  serialised: true,
  why: 'together they may need 118 GiB (2 GiB in reserve), and the GPU has 80 GiB for them',
  swap_round_trip_s: 9.2,
  floor_s: 9.2
});

/** A place is kept for a user who may be back soon, while a training waits. */
function placeKept(): IGpu {
  const explore = session('explore', { resident_bytes: 40 * GIB, keeps_until: NOW + 11.4 });
  const train = session('train', { state: 'suspended', paged_out_bytes: 46 * GIB });
  return gpu({
    sessions: [explore, train],
    queue: [waits('train', 1, 62)],
    scheduler: {
      ...TURNS,
      why: 'together they may need 88 GiB (2 GiB in reserve), and the GPU has 80 GiB for them'
    },
    gauges: QUIET
  });
}

/** The timeline of the design: A is granted, B waits, A is suspended, B runs and finishes early,
 * A goes on, then both run unhindered. */
function twoInTurns(shift = 0): { a: string; b: string; history: IHistory[] } {
  const a = session('train');
  const b = session('explore');
  const at = (seconds: number) => seconds + shift;
  const history = [
    did(a, 'held', at(170), at(140)),
    did(b, 'waited', at(152), at(132)),
    did(a, 'suspended', at(140), at(108)),
    moved(a, 'out', at(140), 46),
    moved(b, 'in', at(136), 40),
    did(b, 'held', at(132), at(116)),
    moved(b, 'out', at(116), 40),
    moved(a, 'in', at(112), 46),
    did(a, 'held', at(108), at(70)),
    moved(b, 'in', at(66), 40, { hinted: true }),
    did(b, 'held', at(58), at(48))
  ];
  return { a: a.id, b: b.id, history };
}

function idle(): IGpu {
  return gpu({
    sessions: [
      session('train', { resident_bytes: 22 * GIB }),
      session('explore', { resident_bytes: 9.5 * GIB, ram_bytes: 1.4 * GIB })
    ],
    gauges: QUIET,
    history: twoInTurns().history
  });
}

function waiting(): IGpu {
  const a = session('train', {
    state: 'running',
    resident_bytes: 46 * GIB,
    turn_ends_at: NOW + 21.4,
    time_left_s: 21.4,
    ram_bytes: 6.2 * GIB
  });
  const b = session('explore', {
    state: 'waiting',
    paged_out_bytes: 40 * GIB,
    ram_bytes: 52 * GIB
  });
  const c = session('c', { state: 'waiting', mine: false, paged_out_bytes: 31 * GIB });
  return gpu({
    sessions: [a, b, c],
    holders: ['train'],
    queue: [waits('c', 1, 26), waits('explore', 2, 62)],
    scheduler: TURNS,
    gauges: BUSY,
    history: [
      ...twoInTurns(40).history,
      did(c, 'waited', 6, null),
      did(a, 'held', 9, null),
      did(b, 'waited', 4, null)
    ]
  });
}

function midSwap(): IGpu {
  const a = session('train', { state: 'paging-out', resident_bytes: 46 * GIB, suspensions: 1 });
  const b = session('explore', { state: 'waiting', paged_out_bytes: 40 * GIB });
  return gpu({
    sessions: [a, b],
    queue: [waits('explore', 1, 6), waits('train', 2, 41)],
    scheduler: TURNS,
    history: [
      ...twoInTurns(60).history,
      did(a, 'held', 32, 2),
      did(a, 'suspended', 2, null),
      did(b, 'waited', 14, null),
      did(a, 'out', 2, null)
    ]
  });
}

function yours(): IGpu {
  const base = waiting();
  return {
    ...base,
    queue: [waits('c', 1, 26)],
    sessions: base.sessions
      .filter(s => s.id !== 'explore')
      .map(s => (s.id === 'c' ? { ...s, paged_out_bytes: 72 * GIB } : s))
  };
}

function together(): IGpu {
  return gpu({
    sessions: [
      session('train', { state: 'running', resident_bytes: 22 * GIB, turn_ends_at: NOW + 12 }),
      session('b', { state: 'running', mine: false, resident_bytes: 30 * GIB }),
      session('notes', { resident_bytes: 1.2 * GIB })
    ],
    holders: ['train', 'b'],
    scheduler: {
      ...TURNS,
      serialised: false,
      policy: 'interactive',
      why: 'they fit together'
    },
    history: [
      did(session('train'), 'held', 50, null),
      did(session('b', { mine: false }), 'held', 210, 120),
      did(session('b', { mine: false }), 'held', 30, null)
    ]
  });
}

function pagedOut(): IGpu {
  return gpu({
    sessions: [
      session('explore', { state: 'paged-out', paged_out_bytes: 40 * GIB }),
      session('b', { state: 'running', mine: false, resident_bytes: 60 * GIB }),
      session('c', { mine: false, state: 'paged-out', paged_out_bytes: 61 * GIB })
    ],
    holders: ['b'],
    memory: { ...gpu().memory, outside_bytes: 4.5 * GIB, free_bytes: 15.5 * GIB },
    gauges: { ...BUSY, power_w: null, power_limit_w: null },
    may_set: false,
    history: [
      did(session('explore'), 'held', 280, 200),
      moved(session('explore'), 'out', 60, 40),
      did(session('b', { mine: false }), 'held', 56, null),
      moved(session('c', { mine: false }), 'out', 64, 61, { ok: false })
    ]
  });
}

function lost(): IGpu {
  const text = 'The contents of this notebook’s GPU memory are lost. Restart its kernel.';
  return gpu({
    sessions: [session('train', { state: 'lost', problem: 'lost', problem_text: text })],
    errors: ['The state directory cannot be written; a crash could not be recovered.']
  });
}

function blocked(): IGpu {
  const text =
    'Waiting because programs outside Kiwi hold GPU memory that this notebook needs. ' +
    '`nvidia-smi` shows them; start them with `kiwi run` to let them share fairly.';
  return gpu({
    sessions: [
      session('train', { state: 'waiting', problem: 'blocked-outside', problem_text: text })
    ],
    queue: [{ ...waits('train', 1, null), blocked: true }],
    memory: { ...gpu().memory, outside_bytes: 71 * GIB, free_bytes: 9 * GIB },
    gauges: { ...BUSY, power_limit_w: null },
    outside: [
      { pid: 20815, owner: 'ada', name: 'python3', used_bytes: 48 * GIB, left: false },
      { pid: 0, owner: 'another user', name: 'another user', used_bytes: 22 * GIB, left: false }
    ],
    history: [did(session('train'), 'waited', 95, null)]
  });
}

function emulated(): IGpu[] {
  return [0, 1].map(index => ({
    ...(index === 0 ? waiting() : idle()),
    uuid: `GPU-kiwi-emulated-${index}`,
    name: 'Kiwi Emulated GPU',
    index,
    emulated: true
  }));
}

function crowd(): IGpu {
  const sessions = Array.from({ length: 50 }, (_, index) => {
    const mine = index % 6 === 1;
    const rests = index > 9;
    return session(mine ? `experiment-number-${index}` : `s${index}`, {
      mine,
      state: index === 0 ? 'running' : rests ? (index % 3 ? 'paged-out' : 'idle') : 'waiting',
      resident_bytes: index === 0 ? 40 * GIB : rests && index % 3 === 0 ? 0.9 * GIB : 0,
      paged_out_bytes: rests
        ? index % 3
          ? 1.5 * GIB
          : 0
        : index > 0
          ? (7 + (index % 4)) * GIB
          : 0,
      turn_ends_at: index === 0 ? NOW + 8 : null
    });
  });
  const queue = sessions
    .slice(1, 10)
    .map((each, index) => waits(each.id, index + 1, 12 + index * 39));
  const history = sessions.flatMap((each, index) => [
    did(each, 'waited', 290 - index * 5.5, 270 - index * 5.2),
    did(each, 'held', 270 - index * 5.2, 265 - index * 5.2)
  ]);
  return gpu({ sessions, queue, holders: ['s0'], scheduler: TURNS, history });
}

/** Half an hour of many short cells, of turns and of moves; nothing is recorded before it. */
function busyHour(): IGpu {
  const a = session('train', { resident_bytes: 22 * GIB });
  const b = session('explore', { resident_bytes: 9.5 * GIB });
  const short = Array.from({ length: 400 }, (_, index) =>
    did(index % 3 ? a : b, 'held', 1790 - index * 3, 1788.6 - index * 3)
  );
  const turns = Array.from({ length: 9 }, (_, index) => {
    const began = 580 - index * 60;
    const [has, waits] = index % 2 ? [a, b] : [b, a];
    return [
      did(has, 'held', began, began - 55),
      did(waits, index % 3 ? 'suspended' : 'waited', began, began - 58),
      moved(waits, 'out', began, 30, { ok: index !== 4 }),
      moved(has, 'in', began - 3, 30)
    ];
  });
  return gpu({ sessions: [a, b], history: [...short, ...turns.flat()], gauges: BUSY });
}

/** Names as users give them, and figures that need much room. */
function longNames(): IGpu {
  const name = (end: string) => `2026-11-finetune-llama-70b-instruct-lr3e-5-${end}.ipynb`;
  const a = session('a', {
    name: name('fold1'),
    state: 'running',
    resident_bytes: 46.3 * GIB,
    turn_ends_at: NOW + 128,
    ram_bytes: 121.9 * GIB,
    guarded: false,
    unguarded_text: 'It loaded the driver before Kiwi. Restart its kernel.'
  });
  const b = session('b', { name: name('fold2'), state: 'waiting', paged_out_bytes: 40.7 * GIB });
  const c = session('c', {
    name: name('fold3'),
    state: 'suspended',
    paged_out_bytes: 921.6 * 2 ** 20
  });
  const d = session('d', { name: name('notes'), resident_bytes: 1.1 * GIB, ram_bytes: 3.3 * GIB });
  const why = { expected_why: 'longer than usual' };
  return gpu({
    name: 'NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition',
    sessions: [a, { ...b, ram_bytes: 141.2 * GIB }, c, d],
    holders: ['a'],
    queue: [{ ...waits('b', 1, 190), ...why }, waits('c', 2, 320)],
    scheduler: TURNS,
    gauges: BUSY,
    history: [
      did(a, 'held', 70, null),
      did(b, 'waited', 66, null),
      moved(b, 'out', 66, 40),
      did(c, 'suspended', 70, null),
      did(d, 'held', 250, 190)
    ]
  });
}

function keptOut(waits_: boolean): IGpu {
  const base = waiting();
  const changes: Partial<ISession> = {
    state: waits_ ? 'waiting' : 'paged-out',
    kept_out: 'an admin',
    problem: 'kept-out',
    problem_text:
      'This session loses nothing, but is kept out of the GPU until `kiwi resume` (by an admin).' +
      ' Whoever suspended it, or an admin, lets it go on.'
  };
  const entry = { ...waits('explore', 2, null), blocked: true, kept_out: 'an admin' };
  return {
    ...base,
    queue: waits_ ? [waits('c', 1, 26), entry] : [waits('c', 1, 26)],
    sessions: base.sessions.map(each => (each.id === 'explore' ? { ...each, ...changes } : each))
  };
}

const problem = (code: string, message: string, remedy: string) =>
  state([], { code, message, remedy });

const ANOTHER = { name: 'another user', path: null };

/** The kernel in front belongs to an environment without Kiwi. */
function withoutKiwi(): IState {
  const text =
    'The environment of this kernel has no Kiwi, so this notebook takes no part: it uses the GPU ' +
    'beside whoever has it, and either may run out of memory. Install Kiwi there ' +
    '(`/opt/envs/old/bin/python -m pip install .` in a checkout of it) and restart the kernel.';
  const all = state([yours()]);
  const bare_kernels = { 'kernel-old': { takes_part: false, text } };
  const gpus = all.gpus.map(one => ({
    ...one,
    sessions: one.sessions.map(each => ({ ...each, mine: false, ...ANOTHER })),
    history: one.history.map(each => ({ ...each, ...ANOTHER }))
  }));
  return { ...all, gpus, server: { ...all.server, bare_kernels } };
}

export const STORIES: Readonly<Record<string, IStory>> = {
  idle: { state: state([idle()]) },
  'place-kept': { state: state([placeKept()]), currentKernel: 'kernel-train' },
  'two-waiting': { state: state([waiting()]), currentKernel: 'kernel-explore' },
  'mid-swap': { state: state([midSwap()]), currentKernel: 'kernel-explore' },
  yours: { state: state([yours()]), currentKernel: 'kernel-train' },
  together: { state: state([together()]) },
  'paged-out': { state: state([pagedOut()]) },
  lost: { state: state([lost()]) },
  blocked: { state: state([blocked()]) },
  suspended: { state: state([keptOut(true)]), currentKernel: 'kernel-explore' },
  'suspended-idle': { state: state([keptOut(false)]), currentKernel: 'kernel-explore' },
  emulated: { state: state(emulated()) },
  'without-kiwi': { state: withoutKiwi(), currentKernel: 'kernel-old' },
  crowd: { state: state([crowd()]) },
  'busy-hour': { state: state([busyHour()]), zoom_s: 1800 },
  'half-hour': { state: state([waiting()]), currentKernel: 'kernel-train', zoom_s: 1800 },
  minute: { state: state([waiting()]), currentKernel: 'kernel-explore', zoom_s: 60 },
  'long-names': { state: state([longNames()]), currentKernel: 'kernel-b' },
  'other-users': {
    state: state([
      gpu({
        sessions: [
          session('x', { mine: false, state: 'running', resident_bytes: 70 * GIB }),
          session('y', { mine: false, state: 'waiting', paged_out_bytes: 31 * GIB })
        ],
        holders: ['x'],
        queue: [waits('y', 1, 14)],
        scheduler: TURNS,
        may_set: false
      })
    ])
  },
  'no-daemon': {
    state: problem(
      'start-failed',
      'The Kiwi daemon could not be started: the CUDA driver 535.104 is too old to move GPU memory.',
      'Update the NVIDIA driver to 570 or newer; `kiwi doctor` checks the rest.'
    )
  },
  starting: {
    state: problem('starting', 'The Kiwi daemon is starting.', 'This takes a few seconds.')
  },
  'no-gpu': {
    state: problem(
      'no-gpu',
      'This machine has no NVIDIA driver, so there is no GPU to share.',
      'To try Kiwi without one: `kiwi daemon --emulate 1x8GiB`.'
    )
  },
  'nothing-yet': { state: state([]) },
  away: { state: state([{ ...waiting(), reachable: false }]), currentKernel: 'kernel-explore' },
  reconnecting: { state: state([waiting()]), connection: 'lost' },
  connecting: { state: null, connection: 'connecting' },
  'not-connected': { state: null, connection: 'lost' }
};
