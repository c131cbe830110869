/** What is known of the server's GPUs, for all surfaces: keeps the state, the clock, the countdowns. */

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

  /** Who keeps track of what is in front says so here. */
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

  /** Where the stream may go on; null: begin anew. */
  get seen(): Pick<IState, 'epoch' | 'seq'> | null {
    return this._resumes ? this._state : null;
  }

  /** False: something was missed. */
  hear(message: StreamMessage): boolean {
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

  /** What was seen stays on show, but the stream begins anew. */
  forget(): void {
    this._resumes = false;
  }

  setConnection(connection: Connection): void {
    if (connection !== this._connection) {
      this._connection = connection;
      this._changed.emit();
    }
  }

  /** The server answers, but not about GPUs: all that there is to show is why. */
  setProblem(problem: IProblem): void {
    const server = { version: '', may_set: false, history_s: 0, problem };
    this._state = { epoch: '', seq: 0, now: this.now(), server, gpus: [] };
    this._resumes = false;
    this._connection = 'live';
    this._count();
    this._changed.emit();
  }

  /** Takes over the estimates of everybody who waits. */
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
