/** Kiwi in JupyterLab and Notebook: the plugins. */

import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { commands } from './plugins/commands';
import { bringBack } from './plugins/hint';
import { model } from './plugins/model';
import { notifications } from './plugins/notifications';
import { sidebar } from './plugins/sidebar';
import { statusbar } from './plugins/statusbar';
import { tabs } from './plugins/tabs';
import { waitLine } from './plugins/waitline';

export { IKiwi } from './plugins/token';

const plugins: JupyterFrontEndPlugin<unknown>[] = [
  model,
  sidebar,
  statusbar,
  commands,
  tabs,
  notifications,
  bringBack,
  waitLine
];
export default plugins;
