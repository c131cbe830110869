/** What is wrong, what it means for the reader, and what to do about it. */

import * as React from 'react';

import type { IKiwiActions } from '../model/api';
import type { IGpu, IProblem } from '../model/types';

import { usePending } from './hooks';
import { Prose } from './parts';

/** Problems that end by themselves: told calmly. */
const PASSING = new Set(['starting', 'reconnecting', 'connecting']);

/** Where trying again is what happens already, or leads to nothing. */
const WITHOUT_RETRY = new Set(['starting', 'connecting', 'disabled']);

export function Problem(props: { problem: IProblem; actions?: IKiwiActions }) {
  const { problem, actions } = props;
  const calm = PASSING.has(problem.code);
  return (
    <div
      className={calm ? 'jp-Kiwi-problem jp-mod-calm' : 'jp-Kiwi-problem'}
      data-kiwi="problem"
      data-code={problem.code}
    >
      <Sign calm={calm} />
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

function Sign(props: { calm: boolean }) {
  return (
    <svg className="jp-Kiwi-sign" viewBox="0 0 16 16" aria-hidden="true">
      {props.calm ? (
        <path d="M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM8 4v4.2l2.8 1.6" />
      ) : (
        <path d="M8 1.8 15 14H1zM8 6v4M8 11.6v.8" />
      )}
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

const AWAY: IProblem = {
  code: 'daemon-away',
  message: 'The Kiwi daemon of this GPU does not answer. Below is what was known last.',
  remedy: 'Running cells go on. Kiwi reconnects by itself.'
};

/** All that is wrong with one GPU. */
export function GpuProblems(props: { gpu: IGpu; actions: IKiwiActions }) {
  const { gpu, actions } = props;
  const problem = gpu.problem ?? (gpu.reachable ? null : AWAY);
  return (
    <>
      {problem !== null && <Problem problem={problem} actions={actions} />}
      {gpu.errors.map(error => (
        <Problem key={error} problem={{ code: 'daemon-error', message: error, remedy: '' }} />
      ))}
    </>
  );
}
