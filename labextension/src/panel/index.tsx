/** The panel: a card for each GPU, or the reason why there is none. */

import * as React from 'react';

import type { IKiwiActions, IKiwiStore } from '../model/api';
import type { IProblem } from '../model/types';
import { trans } from '../model/translation';

import { announcement, moments } from './announce';
import { Card } from './card';
import { useModel, useRemembered } from './hooks';
import { Problem } from './problems';
import { ZOOMS } from './timeline-shapes';

export interface IKiwiPanelProps {
  readonly store: IKiwiStore;
  readonly actions: IKiwiActions;
  /** The span of the timeline until the user chooses; one of ZOOMS. Default 5 min. */
  readonly zoom_s?: number;
}

const connecting = (): IProblem => ({
  code: 'connecting',
  message: trans.__('Asking the Jupyter server about its GPUs…'),
  remedy: ''
});

const notConnected = (): IProblem => ({
  code: 'not-connected',
  message: trans.__('The Jupyter server does not answer.'),
  remedy: trans.__(
    'Kiwi keeps trying by itself. Is the server still running, and are you still logged in?'
  )
});

const reconnecting = (): IProblem => ({
  code: 'reconnecting',
  message: trans.__('The connection to the Jupyter server was lost. Below is what was known last.'),
  remedy: trans.__('Kiwi reconnects by itself.')
});

const noGpu = (): IProblem => ({
  code: 'no-gpu',
  message: trans.__('There is no GPU to share here yet.'),
  remedy: trans.__('`kiwi doctor`, in a terminal, says what is missing.')
});

export function KiwiPanel(props: IKiwiPanelProps) {
  const { store, actions } = props;
  useModel(store);
  const usual_s = ZOOMS.find(each => each === props.zoom_s) ?? 300;
  const [zoom_s, setZoom] = useRemembered('kiwi:timeline-zoom', ZOOMS, usual_s);
  const gpus = [...(store.state?.gpus ?? [])].sort((a, b) => a.index - b.index);
  const problem = problemOf(store);
  return (
    <div
      className="jp-Kiwi-panel"
      data-kiwi="panel"
      role="region"
      aria-label={trans.__('Kiwi: sharing the GPU')}
    >
      <Announcer store={store} />
      {problem !== null && <Problem problem={problem} actions={actions} />}
      {gpus.map(gpu => (
        <Card
          key={gpu.uuid}
          store={store}
          actions={actions}
          gpu={gpu}
          live={store.connection === 'live' && gpu.reachable}
          zoom_s={zoom_s}
          setZoom={setZoom}
        />
      ))}
    </div>
  );
}

/** Returns the problem that concerns all GPUs; null: none. */
function problemOf(store: IKiwiStore): IProblem | null {
  const { state, connection } = store;
  if (state === null) {
    return connection === 'lost' ? notConnected() : connecting();
  }
  if (connection === 'lost') {
    return reconnecting();
  }
  return state.server.problem ?? (state.gpus.length === 0 ? noGpu() : null);
}

const SPOKEN_MS = 10_000;

/** Announces "your turn" to screen readers, but no countdowns. */
function Announcer(props: { store: IKiwiStore }) {
  const { state } = props.store;
  const before = React.useRef(moments(null));
  const [text, setText] = React.useState('');
  React.useEffect(() => {
    const news = announcement(before.current, state);
    before.current = moments(state);
    if (news !== '') {
      setText(news);
    }
  }, [state]);
  // It has been spoken by then; who walks through the page later must not take it for news.
  React.useEffect(() => {
    if (text === '') {
      return;
    }
    const spoken = window.setTimeout(() => setText(''), SPOKEN_MS);
    return () => window.clearTimeout(spoken);
  }, [text]);
  return (
    <div className="jp-Kiwi-hidden" role="status" data-kiwi="announcer">
      {text}
    </div>
  );
}
