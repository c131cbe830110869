/** What is wrong, what it means for the reader, and what to do about it. */

import * as React from 'react';

import type { IKiwiActions } from '../model/api';
import type { IGpu, IProblem } from '../model/types';

import { usePending, useTicking } from './hooks';
import { Prose } from './parts';

/** What ends by itself, or is no fault at all: told calmly. */
const CALM = new Set([
  'starting',
  'reconnecting',
  'connecting',
  'daemon-away',
  'no-gpu',
  'disabled'
]);

/** No fault, and nothing is waited for: not even a box around it. */
const QUIET = new Set(['no-gpu', 'disabled']);

/** Where trying again is what happens already, or leads to nothing. */
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
        {pending.busy ? 'Trying…' : 'Try again'}
      </button>
      {pending.error !== '' && (
        <p className="jp-Kiwi-error" role="alert">
          {pending.error}
        </p>
      )}
    </>
  );
}

/** A daemon that crashed is there again within seconds, one that is started anew within this. */
const BACK_WITHIN_S = 60;

const AWAY: IProblem = {
  code: 'daemon-away',
  message:
    'The Kiwi daemon of this GPU is away. It comes back by itself as soon as it has restarted.',
  remedy: 'Running cells go on, and keep their places. Below is what was known last.'
};

const GONE: IProblem = {
  code: 'daemon-gone',
  message: 'The Kiwi daemon of this GPU does not come back. Below is what was known last.',
  remedy: 'Running cells go on. `kiwi logs` says why it ended; `kiwi daemon` starts it.'
};

/** All that is wrong with one GPU. */
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

/** Calm for the time in which a daemon comes back by itself; then what the server knows. */
function useAway(gpu: IGpu, now: () => number): IProblem | null {
  const since = React.useRef<number | null>(null);
  since.current = gpu.reachable ? null : (since.current ?? now());
  const waits = useTicking(() => since.current !== null && now() - since.current < BACK_WITHIN_S);
  if (gpu.reachable) {
    return null;
  }
  return waits ? AWAY : (gpu.problem ?? GONE);
}
