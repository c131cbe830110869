/** Carries out the users' actions. */

import { KernelAPI } from '@jupyterlab/services';

import type { IKiwiActions, IPlace, ISettingsPatch } from './api';
import type { KiwiRest } from './rest';
import type { IGpu, ISession } from './types';
import { trans } from './translation';

export class KiwiActions implements IKiwiActions {
  constructor(
    private readonly _rest: KiwiRest,
    private readonly _reconnect: () => void,
    private readonly _open: (session: ISession) => Promise<void>
  ) {}

  open(session: ISession): Promise<void> {
    return this._open(session);
  }

  set(gpu: IGpu, patch: ISettingsPatch): Promise<void> {
    return this._rest.set(gpu.uuid, patch);
  }

  release({ gpu, session }: IPlace): Promise<void> {
    return this._rest.release(gpu.uuid, session.id);
  }

  async leave({ gpu, session }: IPlace): Promise<void> {
    const { gpus } = await this._rest.status(); // an interrupt is for a cell that waits, not for one that runs
    const now = gpus
      .find(each => each.uuid === gpu.uuid)
      ?.sessions.find(each => each.id === session.id);
    if (now !== undefined && now.state !== 'waiting') {
      throw new Error(trans.__('It does not wait any more.'));
    }
    return KernelAPI.interruptKernel(session.kernel_id, this._rest.settings);
  }

  async retry(): Promise<void> {
    await this._rest.status(); // starts a daemon where there is none
    this._reconnect();
  }
}
