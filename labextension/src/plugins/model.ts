/** The plugin that all others use: the stream, the model, the settings. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { IConsoleTracker } from '@jupyterlab/console';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { KiwiActions } from '../model/actions';
import { ownPlaces } from '../model/find';
import { KiwiRest } from '../model/rest';
import { KiwiStore } from '../model/store';
import { Stream } from '../model/stream';
import { setTranslator } from '../model/translation';
import type { ISession } from '../model/types';

import type { KernelTracker } from './documents';
import { KiwiDocuments } from './documents';
import { KiwiSettings } from './settings';
import { IKiwi } from './token';

/** Also the id of the settings: package name and schema/plugin.json. */
const ID = 'kiwi-jupyter:plugin';

export const model: JupyterFrontEndPlugin<IKiwi> = {
  id: ID,
  description: 'Knows who has the GPU and who waits, live.',
  autoStart: true,
  provides: IKiwi,
  optional: [INotebookTracker, IConsoleTracker, ISettingRegistry, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    notebooks: INotebookTracker | null,
    consoles: IConsoleTracker | null,
    registry: ISettingRegistry | null,
    translator: ITranslator | null
  ): IKiwi => {
    setTranslator(translator ?? nullTranslator);
    const trackers = [notebooks, consoles].filter(each => each !== null) as KernelTracker[];
    const documents = new KiwiDocuments(app.shell, trackers);
    const settings = new KiwiSettings();
    const store = new KiwiStore();
    const rest = new KiwiRest(app.serviceManager.serverSettings);
    const stream = streamInto(store, rest, settings);
    const actions = new KiwiActions(
      rest,
      () => stream.retry(),
      session => open(app, documents, session)
    );

    const look = () => {
      // '': a notebook without a kernel is in front.
      store.currentKernel = documents.current === null ? null : (documents.current.kernel ?? '');
    };
    documents.changed.connect(look);
    look();
    settings.changed.connect(() => stream.review());
    registry?.load(ID).then(
      stored => settings.follow(stored),
      reason => console.warn('Kiwi: its settings cannot be read; the defaults apply.', reason)
    );
    // Start only when JupyterLab shows its page: Kiwi's state can wait that long.
    void app.started.then(() => stream.start());
    return { store, actions, rest, documents, settings };
  }
};

function streamInto(store: KiwiStore, rest: KiwiRest, settings: KiwiSettings): Stream {
  return new Stream({
    open: () => new rest.settings.WebSocket(rest.streamUrl(store.seen)),
    ask: () => rest.status(),
    receive: message => store.receive(message),
    forget: () => store.forget(),
    refused: error => store.setProblem(error.problem),
    connection: now => store.setConnection(now),
    // Needed only to report that a wait has ended.
    listensHidden: () => settings.get('notify') && ownPlaces(store.state).length > 0
  });
}

async function open(
  app: JupyterFrontEnd,
  documents: KiwiDocuments,
  session: ISession
): Promise<void> {
  if (!documents.activate(session.kernel_id) && session.path !== null) {
    await app.commands.execute('docmanager:open', { path: session.path });
  }
}
