/** In large: is the GPU mine, and if not, how long? */

import * as React from 'react';

import { myWait, noNews } from './mywait-model';
import type { IMyWait } from './mywait-model';
import { Countdown, Prose, SessionName, TimeLeft } from './parts';
import type { IPart } from './parts';

export function MyWait(props: IPart) {
  const { store, actions, gpu, live } = props;
  const now = myWait(gpu, store.currentKernel);
  const wait = live ? now : noNews(now);
  const session = wait.session;
  return (
    <div className={`jp-Kiwi-wait jp-mod-${wait.tone}`} data-kiwi="my-wait" data-tone={wait.tone}>
      {session !== null && (
        <div className="jp-Kiwi-wait-who">
          <SessionName session={session} actions={actions} />
        </div>
      )}
      <Large store={props.store} wait={wait} />
      {wait.details.map(detail => (
        <div key={detail} className="jp-Kiwi-wait-detail">
          <Prose text={detail} />
        </div>
      ))}
    </div>
  );
}

function Large(props: { store: IPart['store']; wait: IMyWait }) {
  const { store, wait } = props;
  if (wait.counts && wait.session !== null) {
    return (
      <div className="jp-Kiwi-wait-large" data-kiwi="countdown">
        <Countdown store={store} session={wait.session.id} unknown={wait.headline} />
      </div>
    );
  }
  return (
    <div className="jp-Kiwi-wait-large">
      {wait.headline}
      {wait.turnEndsAt !== null && (
        <span className="jp-Kiwi-wait-left" data-kiwi="time-left">
          <TimeLeft
            store={store}
            at={wait.turnEndsAt}
            suffix=" left of this turn"
            over="until somebody asks"
          />
        </span>
      )}
    </div>
  );
}
