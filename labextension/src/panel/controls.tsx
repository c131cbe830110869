/** How the GPU is shared: the quantum, anti-thrash, the policy, and the reason for the present mode. */

import * as React from 'react';

import { sharingText } from '../model/phrases';
import type { IGpu } from '../model/types';
import { antiThrash, policy, quantum } from '../model/terms';
import { trans } from '../model/translation';

import {
  type IChoice,
  type ISettings,
  LEAST_TQ_S,
  MOST_TQ_S,
  changedSince,
  modeOf,
  modes,
  patchOf,
  policyOf,
  quantumError,
  settingsOf
} from './controls-model';
import { usePending } from './hooks';
import type { IPart } from './parts';
import { Prose } from './parts';
import { asTitle, formatDuration } from './words';

export function Controls(props: IPart) {
  const { gpu, live } = props;
  const { serialised, swap_round_trip_s, floor_s } = gpu.scheduler;
  return (
    <section className="jp-Kiwi-part">
      <h3>{trans.__('Sharing')}</h3>
      <p className="jp-Kiwi-quiet">
        {`${asTitle(sharingText(gpu.scheduler))}.`}
        {swap_round_trip_s !== null &&
          ` ${trans.__('A swap costs about %1.', formatDuration(swap_round_trip_s))}`}
        {serialised &&
          floor_s !== null &&
          ` ${trans.__('A turn lasts %1 at least.', formatDuration(floor_s))}`}
      </p>
      {gpu.pager_text !== '' && (
        <p className="jp-Kiwi-quiet" data-kiwi="pager">
          <Prose text={trans.__('Memory moves %1.', gpu.pager_text)} />
        </p>
      )}
      {gpu.may_set && live ? <Form {...props} /> : <AsText gpu={gpu} />}
    </section>
  );
}

function AsText(props: { gpu: IGpu }) {
  const { tq_s, anti_thrash, policy } = props.gpu.scheduler;
  const explanations = [modeOf(anti_thrash), policyOf(props.gpu, policy)].map(
    each => each.explanation
  );
  return (
    <p className="jp-Kiwi-quiet">
      {[`${asTitle(quantum())}: ${tq_s} s.`, ...explanations].join(' ')}
    </p>
  );
}

function Form(props: IPart) {
  const { actions, gpu } = props;
  // Only the fields that the user has changed; the others show the value in force, also when others
  // change it.
  const [draft, setDraft] = React.useState<Partial<ISettings>>({});
  const pending = usePending();
  const chosen = { ...settingsOf(gpu.scheduler), ...draft };
  const wrong = quantumError(chosen.quantum);
  const patch = wrong === '' ? patchOf(gpu.scheduler, chosen) : null;
  const choose = (change: Partial<ISettings>) => setDraft({ ...draft, ...change });

  const apply = (event: React.FormEvent) => {
    event.preventDefault();
    if (patch === null || pending.busy) {
      return;
    }
    pending.run(async () => {
      await actions.set(gpu, patch);
      setDraft(now => changedSince(draft, now));
    });
  };
  return (
    <form className="jp-Kiwi-form" onSubmit={apply} aria-busy={pending.busy} noValidate>
      <Quantum text={chosen.quantum} wrong={wrong} choose={choose} />
      <Choice
        label={asTitle(antiThrash())}
        hook="mode"
        choices={modes()}
        chosen={modeOf(chosen.mode)}
        choose={mode => choose({ mode })}
      />
      {gpu.policies.length > 1 && (
        <Choice
          label={asTitle(policy())}
          hook="policy"
          choices={gpu.policies.map(policy => policyOf(gpu, policy.name))}
          chosen={policyOf(gpu, chosen.policy)}
          choose={policy => choose({ policy })}
        />
      )}
      {(wrong !== '' || patch !== null) && (
        <div className="jp-Kiwi-buttons">
          <button
            type="submit"
            className="jp-Kiwi-button jp-mod-primary"
            data-kiwi="apply"
            disabled={patch === null || pending.busy}
          >
            {pending.busy ? trans.__('Applying…') : trans.__('Apply')}
          </button>
          <button
            type="button"
            className="jp-Kiwi-button"
            disabled={pending.busy}
            onClick={() => setDraft({})}
          >
            {trans.__('Undo')}
          </button>
        </div>
      )}
      <p className="jp-Kiwi-error" role="alert" data-kiwi="set-error">
        {pending.error}
      </p>
    </form>
  );
}

function Quantum(props: {
  text: string;
  wrong: string;
  choose: (change: { quantum: string }) => void;
}) {
  const id = React.useId();
  return (
    <div className="jp-Kiwi-field">
      <label htmlFor={id}>{asTitle(quantum())}</label>
      <span className="jp-Kiwi-unit">
        <input
          id={id}
          data-kiwi="tq"
          className="jp-Kiwi-input"
          type="number"
          inputMode="decimal"
          min={LEAST_TQ_S}
          max={MOST_TQ_S}
          step="any"
          value={props.text}
          aria-invalid={props.wrong !== ''}
          aria-describedby={`${id}-wrong`}
          onChange={event => props.choose({ quantum: event.target.value })}
        />
        <span aria-hidden="true">s</span>
        <span className="jp-Kiwi-hidden">{trans.__('seconds')}</span>
      </span>
      <span id={`${id}-wrong`} className="jp-Kiwi-error" role="alert" data-kiwi="tq-error">
        {props.wrong}
      </span>
    </div>
  );
}

/** A list of choices, and below it what the chosen one means. */
function Choice<Value extends string>(props: {
  label: string;
  hook: string;
  choices: readonly IChoice<Value>[];
  chosen: IChoice<Value>;
  choose: (value: Value) => void;
}) {
  const { label, hook, choices, chosen, choose } = props;
  const id = React.useId();
  return (
    <>
      <div className="jp-Kiwi-field">
        <label htmlFor={id}>{label}</label>
        <select
          id={id}
          data-kiwi={hook}
          className="jp-Kiwi-input"
          value={chosen.value}
          aria-describedby={`${id}-explained`}
          onChange={event => choose(event.target.value as Value)}
        >
          {choices.map(each => (
            <option key={each.value} value={each.value}>
              {each.label}
            </option>
          ))}
        </select>
      </div>
      <p id={`${id}-explained`} className="jp-Kiwi-quiet">
        {chosen.explanation}
      </p>
    </>
  );
}
