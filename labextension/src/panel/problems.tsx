/** Shows what is wrong, what it means for the reader, and what to do. */

import * as React from 'react';

import type { IKiwiActions } from '../model/api';
import type { IGpu, IProblem } from '../model/types';
import { trans } from '../model/translation';

import { usePending, useTicking } from './hooks';
import { Prose } from './parts';

/** Problems that end by themselves or are no fault: shown as plain notices. */
const CALM = new Set([
  'starting',
  'reconnecting',
  'connecting',
  'daemon-away',
  'no-gpu',
  'disabled'
]);

/** States that are no fault and need no waiting: shown without a box. */
const QUIET = new Set(['no-gpu', 'disabled']);

/** Problems without a button to try again, because Kiwi already tries, or trying is useless. */
const WITHOUT_RETRY = new Set(['starting', 'connecting', 'disabled', 'no-gpu', 'daemon-away']);

export function Problem(props: { problem: IProblem; actions?: IKiwiActions }) {
  const { problem, actions } = props;
  const calm = CALM.has(problem.code);
  const quiet = QUIET.has(problem.code);
  return (
    <div
      className={`jp-Kiwi-problem${calm ? ' jp-mod-calm' : ''}${quiet ? ' jp-mod-quiet' : ''}`}
      data-kiwi="problem"
      data-code={problem.code}
    >
      <Sign path={quiet ? INFO : calm ? CLOCK : WARNING} />
      <div>
        <p className="jp-Kiwi-problem-what">
          <Prose text={problem.message} />
        </p>
        {problem.remedy !== '' && (
          <p className="jp-Kiwi-problem-remedy">
            <Prose text={problem.remedy} />
          </p>
        )}
        {actions !== undefined && !WITHOUT_RETRY.has(problem.code) && <Retry actions={actions} />}
      </div>
    </div>
  );
}

const CLOCK = 'M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM8 4v4.2l2.8 1.6';
const INFO = 'M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM8 7.2v4M8 4.4v.6';
const WARNING = 'M8 1.8 15 14H1zM8 6v4M8 11.6v.8';

function Sign(props: { path: string }) {
  return (
    <svg className="jp-Kiwi-sign" viewBox="0 0 16 16" aria-hidden="true">
      <path d={props.path} />
    </svg>
  );
}

function Retry(props: { actions: IKiwiActions }) {
  const pending = usePending();
  return (
    <>
      <button
        type="button"
        className="jp-Kiwi-button"
        data-kiwi="retry"
        disabled={pending.busy}
        onClick={() => pending.run(() => props.actions.retry())}
      >
        {pending.busy ? trans.__('Trying…') : trans.__('Try again')}
      </button>
      {pending.error !== '' && (
        <p className="jp-Kiwi-error" role="alert">
          {pending.error}
        </p>
      )}
    </>
  );
}

/** Seconds within which a restarted daemon is back; after a crash it takes only a few. */
const BACK_WITHIN_S = 60;

const away = (): IProblem => ({
  code: 'daemon-away',
  message: trans.__(
    'The Kiwi daemon of this GPU is away. It comes back by itself as soon as it has restarted.'
  ),
  remedy: trans.__('Running cells go on, and keep their places. Below is what was known last.')
});

const gone = (): IProblem => ({
  code: 'daemon-gone',
  message: trans.__(
    'The Kiwi daemon of this GPU does not come back. Below is what was known last.'
  ),
  remedy: trans.__('Running cells go on. `kiwi logs` says why it ended; `kiwi daemon` starts it.')
});

/** Shows all problems of one GPU. */
export function GpuProblems(props: { gpu: IGpu; actions: IKiwiActions; now: () => number }) {
  const { gpu, actions, now } = props;
  const problem = useAway(gpu, now) ?? gpu.problem;
  return (
    <>
      {problem !== null && <Problem problem={problem} actions={actions} />}
      {gpu.errors.map(error => (
        <Problem key={error} problem={{ code: 'daemon-error', message: error, remedy: '' }} />
      ))}
    </>
  );
}

/** Returns a plain notice while a daemon may come back by itself, then the server's reason. */
function useAway(gpu: IGpu, now: () => number): IProblem | null {
  const since = React.useRef<number | null>(null);
  since.current = gpu.reachable ? null : (since.current ?? now());
  const waits = useTicking(() => since.current !== null && now() - since.current < BACK_WITHIN_S);
  if (gpu.reachable) {
    return null;
  }
  return waits ? away() : (gpu.problem ?? gone());
}
