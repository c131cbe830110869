/** The sidebar, and the command that shows it. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILayoutRestorer } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';

import { trans } from '../model/translation';
import { kiwiIcon } from '../panel/icon';
import { KiwiPanelWidget } from '../panel/widget';

import { CommandIds, IKiwi, PANEL_ID } from './token';

export const sidebar: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:sidebar',
  description: 'The sidebar that shows who has the GPU.',
  autoStart: true,
  requires: [IKiwi],
  optional: [ILayoutRestorer, ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    kiwi: IKiwi,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null
  ): void => {
    const panel = new KiwiPanelWidget(kiwi.store, kiwi.actions);
    panel.id = PANEL_ID;
    const zoom = () => {
      panel.zoom_s = 60 * kiwi.settings.get('timelineMinutes');
    };
    kiwi.settings.changed.connect(zoom);
    zoom();
    app.shell.add(panel, 'right', { rank: 700, type: 'Kiwi' });
    restorer?.add(panel, PANEL_ID);

    app.commands.addCommand(CommandIds.openPanel, {
      label: trans.__('Show Who Has the GPU'),
      caption: trans.__('Open the Kiwi sidebar: who has the GPU, who waits, and for how long'),
      icon: kiwiIcon,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => {
        app.shell.activateById(PANEL_ID);
      }
    });
    palette?.addItem({ command: CommandIds.openPanel, category: 'Kiwi' });
  }
};
