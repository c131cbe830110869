import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import type { IKiwiActions, IKiwiStore } from '../model/api';
import { trans } from '../model/translation';

import { OnScreen } from './hooks';
import { kiwiIcon } from './icon';

import { KiwiPanel } from './index';

/** The sidebar's widget. Made once by the sidebar plugin; draws nothing while it is not shown. */
export class KiwiPanelWidget extends ReactWidget {
  constructor(
    private readonly _store: IKiwiStore,
    private readonly _actions: IKiwiActions
  ) {
    super();
    this.id = 'kiwi-panel';
    this.addClass('jp-Kiwi');
    this.title.icon = kiwiIcon;
    this.title.caption = trans.__('Kiwi: who has the GPU, and for how long');
  }

  /** The span of the timeline until the user chooses another. */
  set zoom_s(zoom_s: number) {
    this._zoom_s = zoom_s;
    this.update();
  }

  protected override render(): React.ReactElement {
    return (
      <OnScreen.Provider value={this.isVisible}>
        <KiwiPanel store={this._store} actions={this._actions} zoom_s={this._zoom_s} />
      </OnScreen.Provider>
    );
  }

  /** Moves the keyboard focus into the panel when the command shows it. */
  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.tabIndex = -1;
    this.node.focus();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.update();
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.update();
  }

  private _zoom_s = 300;
}
