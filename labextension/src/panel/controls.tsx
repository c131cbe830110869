/** How the GPU is shared: length of a turn, when turns are taken, and why it is so now. */

import * as React from 'react';

import type { AntiThrash, IGpu } from '../model/types';

import { LEAST_TQ_S, MODES, MOST_TQ_S, modeOf, patchOf, quantumError } from './controls-model';
import { usePending } from './hooks';
import type { IPart } from './parts';
import { formatDuration } from './words';

export function Controls(props: IPart) {
  const { gpu, live } = props;
  const { serialised, why, swap_round_trip_s, floor_s } = gpu.scheduler;
  return (
    <section className="jp-Kiwi-part">
      <h3>Sharing</h3>
      <p className="jp-Kiwi-why" data-kiwi="why" data-serialised={serialised}>
        <b>{serialised ? 'In turns' : 'Side by side'}</b>
        {why !== '' && ` – ${why}.`}
        {swap_round_trip_s !== null &&
          ` Changing places costs about ${formatDuration(swap_round_trip_s)}.`}
        {serialised && floor_s !== null && ` A turn lasts ${formatDuration(floor_s)} at least.`}
      </p>
      {gpu.may_set && live ? <Form {...props} /> : <AsText gpu={gpu} />}
    </section>
  );
}

function AsText(props: { gpu: IGpu }) {
  const { tq_s, anti_thrash } = props.gpu.scheduler;
  const mode = modeOf(anti_thrash);
  return (
    <p className="jp-Kiwi-quiet">
      Turns last {tq_s} s. {mode.explanation}
    </p>
  );
}

/** null: not touched by the user, so what is in force is shown, also when others change it. */
interface IDraft {
  readonly quantum: string | null;
  readonly mode: AntiThrash | null;
}

const UNTOUCHED: IDraft = { quantum: null, mode: null };

function Form(props: IPart) {
  const { actions, gpu } = props;
  const [draft, setDraft] = React.useState(UNTOUCHED);
  const pending = usePending();
  const id = React.useId();
  const quantum = draft.quantum ?? String(gpu.scheduler.tq_s);
  const mode = draft.mode ?? gpu.scheduler.anti_thrash;
  const wrong = quantumError(quantum);
  const patch = wrong === '' ? patchOf(gpu.scheduler, quantum, mode) : null;
  const changed = wrong !== '' || patch !== null;

  const apply = (event: React.FormEvent) => {
    event.preventDefault();
    if (patch === null || pending.busy) {
      return;
    }
    pending.run(async () => {
      await actions.set(gpu, patch);
      setDraft(UNTOUCHED);
    });
  };
  return (
    <form className="jp-Kiwi-form" onSubmit={apply} aria-busy={pending.busy} noValidate>
      <div className="jp-Kiwi-field">
        <label htmlFor={`${id}-tq`}>Turn</label>
        <span className="jp-Kiwi-unit">
          <input
            id={`${id}-tq`}
            data-kiwi="tq"
            className="jp-Kiwi-input"
            type="number"
            inputMode="decimal"
            min={LEAST_TQ_S}
            max={MOST_TQ_S}
            step="any"
            value={quantum}
            aria-invalid={wrong !== ''}
            aria-describedby={`${id}-wrong`}
            onChange={event => setDraft({ ...draft, quantum: event.target.value })}
          />
          <span aria-hidden="true">s</span>
          <span className="jp-Kiwi-hidden">seconds</span>
        </span>
      </div>
      <div className="jp-Kiwi-field">
        <label htmlFor={`${id}-mode`}>Take turns</label>
        <select
          id={`${id}-mode`}
          data-kiwi="mode"
          className="jp-Kiwi-input"
          value={mode}
          aria-describedby={`${id}-explained`}
          onChange={event => setDraft({ ...draft, mode: event.target.value as AntiThrash })}
        >
          {MODES.map(each => (
            <option key={each.value} value={each.value}>
              {each.label}
            </option>
          ))}
        </select>
      </div>
      <p id={`${id}-explained`} className="jp-Kiwi-quiet">
        {modeOf(mode).explanation}
      </p>
      {changed && (
        <div className="jp-Kiwi-buttons">
          <button
            type="submit"
            className="jp-Kiwi-button jp-mod-primary"
            data-kiwi="apply"
            disabled={patch === null || pending.busy}
          >
            {pending.busy ? 'Applying…' : 'Apply'}
          </button>
          <button
            type="button"
            className="jp-Kiwi-button"
            disabled={pending.busy}
            onClick={() => setDraft(UNTOUCHED)}
          >
            Undo
          </button>
        </div>
      )}
      <p id={`${id}-wrong`} className="jp-Kiwi-error" role="alert">
        {wrong || pending.error}
      </p>
    </form>
  );
}
