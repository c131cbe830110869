/** Keeps the state of the server's GPUs, the clock and the countdowns for all surfaces. */

import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { Connection, IExpected, IKiwiStore } from './api';
import { ServerClock } from './clock';
import { ExpectedEnd } from './countdown';
import { GAP, reduce } from './reducer';
import type { IProblem, IState, StreamMessage } from './types';

export class KiwiStore implements IKiwiStore {
  constructor(private readonly _clock: ServerClock = new ServerClock()) {}

  get state(): IState | null {
    return this._state;
  }

  get connection(): Connection {
    return this._connection;
  }

  get currentKernel(): string | null {
    return this._currentKernel;
  }

  /** Called by the part that knows which notebook is in front. */
  set currentKernel(kernel: string | null) {
    if (kernel !== this._currentKernel) {
      this._currentKernel = kernel;
      this._changed.emit();
    }
  }

  get changed(): ISignal<IKiwiStore, void> {
    return this._changed;
  }

  now(): number {
    return this._clock.now();
  }

  expected(session: string): IExpected | null {
    return this._expected.get(session)?.read(this.now()) ?? null;
  }

  // --- for the stream -----------------------------------------------------------------------------

  /** The position from which the stream can go on; null: begin again. */
  get seen(): Pick<IState, 'epoch' | 'seq'> | null {
    return this._resumes ? this._state : null;
  }

  /** Returns false if a message was missed. */
  receive(message: StreamMessage): boolean {
    this._clock.observe(message.now);
    const next = reduce(this._state, message);
    if (next === GAP) {
      return false;
    }
    this._resumes = true;
    if (next !== this._state) {
      this._state = next;
      this._count();
      this._changed.emit();
    }
    return true;
  }

  /** Begins the stream again. The last state stays on the screen. */
  forget(): void {
    this._resumes = false;
  }

  setConnection(connection: Connection): void {
    if (connection !== this._connection) {
      this._connection = connection;
      this._changed.emit();
    }
  }

  /** The server answers, but not about GPUs: only the reason can be shown. */
  setProblem(problem: IProblem): void {
    const server = { version: '', may_set: false, history_s: 0, problem, bare_kernels: {} };
    this._state = { epoch: '', seq: 0, now: this.now(), server, gpus: [] };
    this._resumes = false;
    this._connection = 'live';
    this._count();
    this._changed.emit();
  }

  /** Updates the estimates of all waits. */
  private _count(): void {
    const now = this.now();
    const before = this._expected;
    this._expected = new Map();
    for (const gpu of this._state?.gpus ?? []) {
      for (const entry of gpu.queue) {
        const known = before.get(entry.session);
        const end = known?.isOf(entry) === true ? known : new ExpectedEnd(entry);
        end.observe(entry, now);
        this._expected.set(entry.session, end);
      }
    }
  }

  private _state: IState | null = null;
  private _resumes = false;
  private _connection: Connection = 'connecting';
  private _currentKernel: string | null = null;
  private _expected = new Map<string, ExpectedEnd>();
  private readonly _changed = new Signal<IKiwiStore, void>(this);
}
