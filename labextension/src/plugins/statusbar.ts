/** The status-bar item: the GPU of the notebook in front, in a few words. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import type { IKiwiStore } from '../model/api';
import type { IStatus } from '../model/status';
import { statusOf } from '../model/status';
import { trans } from '../model/translation';
import { onTick } from '../panel/ticker';

import { CommandIds, IKiwi } from './token';

export const statusbar: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:statusbar',
  description: 'Shows in the status bar whether the GPU is yours, or how long you wait for it.',
  autoStart: true,
  requires: [IKiwi],
  optional: [IStatusBar],
  activate: (app: JupyterFrontEnd, kiwi: IKiwi, bar: IStatusBar | null): void => {
    const item = new StatusItem(kiwi.store, () => {
      void app.commands.execute(CommandIds.openPanel);
    });
    const active = () => kiwi.settings.get('statusBar') && item.status !== null;
    const changed = new Signal<StatusItem, void>(item);
    item.appeared.connect(() => changed.emit());
    kiwi.settings.changed.connect(() => changed.emit());
    if (bar !== null) {
      bar.registerStatusItem('kiwi-jupyter:statusbar', {
        item,
        align: 'left',
        rank: 5,
        priority: 1,
        isActive: active,
        activeStateChanged: changed
      });
      return;
    }
    // Notebook 7 has no status bar. The item is behind the spacer of the menu bar (rank 10,000), at
    // the right edge beside the state of the kernel: before it, among the menus, it would look like
    // a menu.
    item.addClass('jp-mod-kiwiTop');
    item.id = 'kiwi-status';
    const show = () => item.setHidden(!active());
    changed.connect(show);
    show();
    app.shell.add(item, 'menu', { rank: 10_001 });
  }
};

export class StatusItem extends Widget {
  constructor(
    private readonly _store: IKiwiStore,
    onClick: () => void
  ) {
    super({ node: document.createElement('div') });
    this.addClass('jp-Kiwi-status');
    this._button.type = 'button';
    this._button.className = 'jp-Kiwi-status-button';
    this._button.dataset.kiwi = 'status-item';
    this._button.addEventListener('click', onClick);
    this.node.appendChild(this._button);
    _store.changed.connect(this._look, this);
    this._look();
  }

  /** The text; null: nothing is shown, and no space is taken. */
  status: IStatus | null = null;

  /** Emitted when the item gets a text, or loses it. */
  readonly appeared = new Signal<this, void>(this);

  override dispose(): void {
    this._stopTicking?.();
    Signal.clearData(this);
    super.dispose();
  }

  private _look(): void {
    const before = this.status;
    const status = (this.status = statusOf(this._store));
    if (status !== null && !same(before, status)) {
      this._button.textContent = status.text;
      this._button.title = status.label;
      // The visible text comes first, so that users can speak it to the computer (WCAG 2.5.3).
      const label = trans.__('%1. %2 Open Kiwi.', status.text, status.label);
      this._button.setAttribute('aria-label', label);
      this._button.dataset.tone = status.tone;
    }
    this._tick(status?.ticks ?? false);
    if ((before === null) !== (status === null)) {
      this.appeared.emit();
    }
  }

  private _tick(ticks: boolean): void {
    if (ticks && this._stopTicking === null) {
      this._stopTicking = onTick(() => this._look());
    } else if (!ticks) {
      this._stopTicking?.();
      this._stopTicking = null;
    }
  }

  private readonly _button = document.createElement('button');
  private _stopTicking: (() => void) | null = null;
}

function same(one: IStatus | null, other: IStatus): boolean {
  return (
    one !== null && one.text === other.text && one.label === other.label && one.tone === other.tone
  );
}
