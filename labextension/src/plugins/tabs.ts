/** A notebook that waits in the background shows it on its tab. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { Title, Widget } from '@lumino/widgets';

import { placeOfKernel, queueEntry } from '../model/find';
import { ordinal } from '../model/format';
import { heldUp } from '../model/terms';
import { trans } from '../model/translation';

import { IKiwi } from './token';

const MARK = 'jp-mod-kiwiWaiting';
const begin = () => `\n${trans.__('Waits for the GPU:')} `;

export const tabs: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:tabs',
  description: 'Marks the tabs of notebooks that wait for the GPU.',
  autoStart: true,
  requires: [IKiwi],
  activate: (_: JupyterFrontEnd, kiwi: IKiwi): void => {
    const look = () => {
      const { store, documents, settings } = kiwi;
      for (const { widget, kernel } of documents.all) {
        const background = settings.get('markTabs') && kernel !== store.currentKernel;
        const place = background ? placeOfKernel(store.state, kernel) : null;
        const entry = place === null ? undefined : queueEntry(place);
        const label =
          entry?.blocked === true
            ? heldUp()
            : trans.__('%1 in line', ordinal(entry?.position ?? 0));
        markTab(widget.title, entry === undefined ? null : label);
      }
    };
    kiwi.store.changed.connect(look);
    kiwi.documents.changed.connect(look);
    kiwi.settings.changed.connect(look);
  }
};

/** `label`: its place in the queue, in words; null: it does not wait, and the mark is removed. */
export function markTab(title: Title<Widget>, label: string | null): void {
  const classes = title.className.split(/\s+/).filter(name => name !== '' && name !== MARK);
  const caption = title.caption.split(begin())[0] ?? '';
  const { kiwi: _, ...dataset } = title.dataset;
  if (label === null) {
    change(title, classes, caption, dataset);
  } else {
    change(title, [...classes, MARK], `${caption}${begin()}${label}`, {
      ...dataset,
      kiwi: 'waiting'
    });
  }
}

/** Assign only changes: each assignment draws all tabs again. */
function change(
  title: Title<Widget>,
  classes: readonly string[],
  caption: string,
  dataset: Title.Dataset
): void {
  const className = classes.join(' ');
  if (title.className.trim() !== className) {
    title.className = className;
  }
  if (title.caption !== caption) {
    title.caption = caption;
  }
  if (title.dataset.kiwi !== dataset.kiwi) {
    title.dataset = dataset;
  }
}
