/** A model that stands still, for stories and tests: the clock moves only when it is told to. */

import { Signal } from '@lumino/signaling';

import type { Connection, IKiwiActions, IKiwiStore } from '../src/model/api';
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

  expectedAt(session: string): number | null {
    const queues = this.state?.gpus.flatMap(gpu => gpu.queue) ?? [];
    return queues.find(entry => entry.session === session)?.expected_at ?? null;
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
  retry: () => Promise.resolve()
};
