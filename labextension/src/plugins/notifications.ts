/** A notification of the browser when a long wait has ended. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import {
  Notification as LabNotification,
  showDialog,
  Dialog,
  ICommandPalette
} from '@jupyterlab/apputils';

import type { IEndedWait } from '../model/waits';
import { Waits } from '../model/waits';
import { trans } from '../model/translation';
import { formatDuration } from '../panel/words';

import { CommandIds, IKiwi } from './token';

export const notifications: JupyterFrontEndPlugin<void> = {
  id: 'kiwi-jupyter:notifications',
  description: 'Notifies you when a long wait for the GPU has ended.',
  autoStart: true,
  requires: [IKiwi],
  optional: [ICommandPalette],
  activate: (app: JupyterFrontEnd, kiwi: IKiwi, palette: ICommandPalette | null): void => {
    const { store, settings } = kiwi;
    const waits = new Waits();
    store.changed.connect(() => {
      for (const wait of waits.look(store.state)) {
        if (isWorthIt(wait, kiwi)) {
          notify(wait, kiwi);
        }
      }
    });

    app.commands.addCommand(CommandIds.toggleNotifications, {
      label: trans.__('Notify Me When a Long Wait for the GPU Ends'),
      caption: trans.__(
        'Show a notification of the browser when a notebook has waited long and has the GPU'
      ),
      isToggled: () => settings.get('notify'),
      isEnabled: () => isSupported(),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: async () => {
        const wanted = !settings.get('notify');
        if (!wanted || (await mayNotify())) {
          await settings.set('notify', wanted);
        }
      }
    });
    palette?.addItem({ command: CommandIds.toggleNotifications, category: 'Kiwi' });

    let before = settings.get('notify');
    settings.changed.connect(() => {
      const now = settings.get('notify');
      if (now && !before) {
        offerToAsk();
      }
      before = now;
      app.commands.notifyCommandChanged(CommandIds.toggleNotifications);
    });
  }
};

function isSupported(): boolean {
  return typeof Notification !== 'undefined';
}

/** Returns whether the wait was long, and the user did not see it. */
export function isWorthIt(wait: IEndedWait, kiwi: Pick<IKiwi, 'settings' | 'store'>): boolean {
  const { kernel_id } = wait.place.session;
  const seen = !document.hidden && kernel_id !== '' && kiwi.store.currentKernel === kernel_id;
  return (
    kiwi.settings.get('notify') && !seen && wait.waited_s >= kiwi.settings.get('notifyAfterSeconds')
  );
}

function notify({ place, waited_s }: IEndedWait, kiwi: IKiwi): void {
  if (!isSupported() || Notification.permission !== 'granted') {
    return;
  }
  const { session } = place;
  const shown = new Notification(trans.__('%1 has the GPU', session.name), {
    body: trans.__('It waited %1.', formatDuration(waited_s)),
    tag: `kiwi-${session.id}` // a newer notification takes its place
  });
  shown.onclick = () => {
    window.focus();
    shown.close();
    void kiwi.actions.open(session);
  };
}

/** Asks for the user's permission if it is not decided. Call it only on a user's gesture. */
async function mayNotify(): Promise<boolean> {
  const permission =
    Notification.permission === 'default'
      ? await Notification.requestPermission()
      : Notification.permission;
  if (permission === 'denied') {
    await showDialog({
      title: trans.__('Your browser blocks notifications from this page'),
      body: trans.__(
        'Allow them in the browser’s settings for this site (beside the address), then try again.'
      ),
      buttons: [Dialog.okButton()]
    });
  }
  return permission === 'granted';
}

/** Shows a button for the permission, because a change in the settings editor is no user's gesture. */
function offerToAsk(): void {
  if (isSupported() && Notification.permission === 'default') {
    LabNotification.info(trans.__('Kiwi may notify you only with your browser’s consent.'), {
      autoClose: false,
      actions: [{ label: trans.__('Ask my browser'), callback: () => void mayNotify() }]
    });
  }
}
