/** Shows in large whether the GPU is the reader's, and if not, for how long. */

import * as React from 'react';

import { bareKernel } from '../model/find';
import { trans } from '../model/translation';
import type { ISession } from '../model/types';

import { useTicking } from './hooks';
import { myWait, noNews } from './mywait-model';
import type { IMyWait } from './mywait-model';
import { queueEntryOf } from './people';
import { Countdown, LeaveQueue, Prose, SessionName, Turn } from './parts';
import type { IPart } from './parts';

export function MyWait(props: IPart) {
  const { store, actions, gpu, live } = props;
  const now = myWait(gpu, store.currentKernel, bareKernel(store));
  const wait = live ? now : noNews(now);
  const session = wait.session;
  return (
    <div className={`jp-Kiwi-wait jp-mod-${wait.tone}`} data-kiwi="my-wait" data-tone={wait.tone}>
      {session !== null && (
        <div className="jp-Kiwi-wait-who">
          <SessionName session={session} actions={actions} />
        </div>
      )}
      <Large store={store} gpu={gpu} wait={wait} />
      {wait.counts && session !== null && <Progress store={store} gpu={gpu} session={session} />}
      {wait.details.map(detail => (
        <div key={detail} className="jp-Kiwi-wait-detail">
          <Prose text={detail} />
        </div>
      ))}
      {live && session !== null && <LeaveQueue gpu={gpu} session={session} actions={actions} />}
    </div>
  );
}

/** How much of the wait is over, where its end is known. */
function Progress(props: Pick<IPart, 'store' | 'gpu'> & { session: ISession }) {
  const { store, gpu, session } = props;
  const entry = queueEntryOf(gpu, session.id);
  const percent = useTicking(() => {
    const end = store.expected(session.id)?.at;
    if (entry === undefined || end === undefined) {
      return null;
    }
    const whole = Math.max(1, end - entry.waiting_since);
    return Math.round((100 * (store.now() - entry.waiting_since)) / whole);
  });
  if (percent === null) {
    return null;
  }
  const done = Math.min(100, Math.max(0, percent));
  return (
    <svg
      className="jp-Kiwi-progress"
      data-kiwi="progress"
      role="progressbar"
      aria-label={trans.__('Wait for the GPU')}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={done}
    >
      <rect width={`${done}%`} height="100%" />
    </svg>
  );
}

function Large(props: Pick<IPart, 'store' | 'gpu'> & { wait: IMyWait }) {
  const { store, gpu, wait } = props;
  const entry = queueEntryOf(gpu, wait.session?.id ?? '');
  if (wait.counts && entry !== undefined) {
    const known = store.expected(entry.session) !== null;
    return (
      <>
        {known && <div className="jp-Kiwi-wait-state">{wait.headline}</div>}
        <div className="jp-Kiwi-wait-large" data-kiwi="countdown">
          <Countdown store={store} entry={entry} unknown={wait.headline} large />
        </div>
      </>
    );
  }
  return (
    <div className="jp-Kiwi-wait-large">
      {wait.headline}
      {wait.holds && wait.session !== null && (
        <span className="jp-Kiwi-wait-left" data-kiwi="time-left">
          <Turn store={store} gpu={gpu} holder={wait.session} />
        </span>
      )}
    </div>
  );
}
