/** Tells the daemon that a notebook is about to be used: see model/hint.ts. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';

import { Hints } from '../model/hint';

import { IKiwi } from './token';

export const bringBack: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:bring-back',
  description: 'Brings the memory of the notebook that you look at back to an idle GPU.',
  autoStart: true,
  requires: [IKiwi],
  activate: (_: JupyterFrontEnd, kiwi: IKiwi): void => {
    const { store, rest, documents, settings } = kiwi;
    const hints = new Hints();
    let front: string | null = null;

    const give = () => {
      if (!settings.get('bringBack') || store.connection !== 'live') {
        return;
      }
      const place = hints.take(store.state, store.now());
      if (place === null) {
        return;
      }
      const { gpu, session } = place;
      rest.bringBack(gpu.uuid, session.id).then(
        answer => {
          if (!answer.begun) {
            hints.refused(session.id, store.now());
          }
        },
        () => hints.refused(session.id, store.now()) // only a hint: its cell brings it in
      );
    };
    const intend = () => {
      if (front !== null && !document.hidden) {
        hints.intend(front, store.now());
        hints.look(store.state);
        give();
      }
    };

    store.changed.connect(() => {
      hints.look(store.state);
      if (store.currentKernel !== front) {
        front = store.currentKernel;
        intend();
      } else {
        give(); // the GPU may have become idle since
      }
    });
    document.addEventListener('visibilitychange', intend);
    document.addEventListener(
      'keydown',
      event => {
        if (documents.current?.widget.node.contains(event.target as Node) === true) {
          intend();
        }
      },
      { capture: true, passive: true }
    );
  }
};
