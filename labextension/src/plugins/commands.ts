/** Commands about the notebook in front, and the switch of the bring-back. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Dialog, ICommandPalette, showDialog, showErrorMessage } from '@jupyterlab/apputils';

import type { IPlace } from '../model/api';
import { holds, placeOfKernel, queueEntry } from '../model/find';
import { trans } from '../model/translation';

import { StoryView } from './story';
import { CommandIds, IKiwi } from './token';

const NO_ARGS = { args: { type: 'object', properties: {} } } as const;

export const commands: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:commands',
  description: 'Commands about the GPU memory of the notebook in front.',
  autoStart: true,
  requires: [IKiwi],
  optional: [ICommandPalette],
  activate: (app: JupyterFrontEnd, kiwi: IKiwi, palette: ICommandPalette | null): void => {
    const { store, rest, actions, settings } = kiwi;
    const front = () => placeOfKernel(store.state, store.currentKernel);

    app.commands.addCommand(CommandIds.release, {
      label: trans.__('Move This Notebook’s GPU Memory Out'),
      caption: trans.__(
        'Make room on the GPU: its memory goes to system RAM until its next cell needs it'
      ),
      describedBy: NO_ARGS,
      isEnabled: () => {
        const place = front();
        return place !== null && canRelease(place);
      },
      execute: () =>
        attempt(trans.__('Kiwi could not move the memory out'), front(), place =>
          actions.release(place)
        )
    });

    app.commands.addCommand(CommandIds.status, {
      label: trans.__('What Happened to This Notebook on the GPU'),
      caption: trans.__('Show when it had the GPU, waited, and had its memory moved'),
      describedBy: NO_ARGS,
      isEnabled: () => front() !== null,
      execute: () =>
        attempt(trans.__('Kiwi could not show what happened'), front(), async place => {
          const read = () => rest.story(place.gpu.uuid, place.session.id);
          await showDialog({
            title: trans.__('%1 on the GPU', place.session.name),
            body: new StoryView(store, read, await read()),
            buttons: [Dialog.okButton({ label: trans.__('Close') })]
          });
        })
    });

    app.commands.addCommand(CommandIds.toggleBringBack, {
      label: trans.__('Bring GPU Memory Back Ahead of Use'),
      caption: trans.__(
        'When you look at or type in a notebook whose memory is out and the GPU is idle'
      ),
      describedBy: NO_ARGS,
      isToggled: () => settings.get('bringBack'),
      execute: () => settings.set('bringBack', !settings.get('bringBack'))
    });

    const mine = [CommandIds.release, CommandIds.status, CommandIds.toggleBringBack];
    for (const command of mine) {
      palette?.addItem({ command, category: 'Kiwi' });
    }
    settings.changed.connect(() => app.commands.notifyCommandChanged(CommandIds.toggleBringBack));
    let before = '';
    store.changed.connect(() => {
      const now = mine.map(command => app.commands.isEnabled(command)).join();
      if (now !== before) {
        before = now;
        mine.forEach(command => app.commands.notifyCommandChanged(command));
      }
    });
  }
};

/** Returns whether a session is idle with memory in the GPU. */
export function canRelease(place: IPlace): boolean {
  const { gpu, session } = place;
  const rests = queueEntry(place) === undefined && (!holds(place) || session.state === 'idle');
  return gpu.reachable && rests && session.state === 'idle' && session.resident_bytes > 0;
}

async function attempt(
  title: string,
  place: IPlace | null,
  action: (place: IPlace) => Promise<void>
): Promise<void> {
  if (place === null) {
    return;
  }
  try {
    await action(place);
  } catch (reason) {
    await showErrorMessage(title, reason instanceof Error ? reason.message : String(reason));
  }
}
