/** Kiwi in JupyterLab and Notebook: the plugins. */

import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

const plugins: JupyterFrontEndPlugin<unknown>[] = [];
export default plugins;
