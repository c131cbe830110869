/** A model for stories and tests, whose clock moves only on demand. */

import { Signal } from '@lumino/signaling';

import type { Connection, IExpected, IKiwiActions, IKiwiStore } from '../src/model/api';
import { ExpectedEnd } from '../src/model/countdown';
import type { IState } from '../src/model/types';

export class StillStore implements IKiwiStore {
  constructor(
    public state: IState | null,
    public connection: Connection = 'live',
    public currentKernel: string | null = null,
    public clock: number = state?.now ?? 0
  ) {}

  readonly changed: Signal<IKiwiStore, void> = new Signal<IKiwiStore, void>(this);

  now(): number {
    return this.clock;
  }

  expected(session: string): IExpected | null {
    const queues = this.state?.gpus.flatMap(gpu => gpu.queue) ?? [];
    const entry = queues.find(one => one.session === session);
    return entry === undefined ? null : new ExpectedEnd(entry).read(this.clock);
  }

  become(changes: Partial<Pick<StillStore, 'state' | 'connection' | 'currentKernel'>>): void {
    Object.assign(this, changes);
    this.changed.emit();
  }
}

/** Actions that do nothing, after a moment. */
export const NO_ACTIONS: IKiwiActions = {
  open: () => Promise.resolve(),
  set: () => Promise.resolve(),
  release: () => Promise.resolve(),
  leave: () => Promise.resolve(),
  retry: () => Promise.resolve()
};
