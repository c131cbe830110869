/** The text of the status bar about the notebook in front. */

import type { IKiwiStore, IPlace } from './api';
import { bareKernel, holds, inLine, ownPlaces, queueEntry, subjectOf } from './find';
import { formatBytes, ordinal, withoutMarks } from './format';
import { waitText } from './phrases';
import { keptOut, stateWord, takesNoPart } from './terms';
import type { IGpu, IWaiter } from './types';
import { trans } from './translation';

export type StatusTone = 'yours' | 'waiting' | 'moving' | 'out' | 'free' | 'busy' | 'wrong';

export interface IStatus {
  /** The text shown: `GPU: yours`. */
  readonly text: string;
  /** The whole sentence, for screen readers and the tooltip. */
  readonly label: string;
  readonly tone: StatusTone;
  /** True if it changes as time passes. */
  readonly ticks: boolean;
}

/** null: nothing to show in the status bar (no GPU here, or nothing known yet). */
export function statusOf(store: IKiwiStore): IStatus | null {
  const status = ofStore(store);
  const gpus = store.state?.gpus ?? [];
  // Nobody should take it for a real one.
  return status !== null && gpus.every(gpu => gpu.emulated)
    ? { ...status, text: trans.__('Emulated %1', status.text) }
    : status;
}

function ofStore(store: IKiwiStore): IStatus | null {
  const { state, connection, currentKernel } = store;
  if (state === null || state.gpus.length === 0) {
    return null;
  }
  if (connection === 'lost') {
    return makeStatus(
      trans.__('unknown'),
      trans.__('Kiwi has lost the connection to the Jupyter server.'),
      'wrong'
    );
  }
  const place = subjectOf(ownPlaces(state), currentKernel);
  const bare = bareKernel(store);
  if (place === null && bare?.takes_part === false) {
    return makeStatus(takesNoPart(), bare.text, 'wrong');
  }
  if (place !== null) {
    return place.gpu.reachable ? ofSession(place, store) : away();
  }
  const reachable = state.gpus.filter(gpu => gpu.reachable);
  return reachable.length === 0 ? away() : ofGpus(reachable);
}

function makeStatus(text: string, label: string, tone: StatusTone, ticks = false): IStatus {
  return { text: trans.__('GPU: %1', text), label: withoutMarks(label), tone, ticks };
}

function away(): IStatus {
  return makeStatus(
    trans.__('unknown'),
    trans.__('The Kiwi daemon of this GPU does not answer.'),
    'wrong'
  );
}

function ofSession(place: IPlace, store: IKiwiStore): IStatus {
  const { session } = place;
  if (session.state === 'lost') {
    const text =
      session.problem_text || trans.__('What it had in GPU memory is gone. Restart its kernel.');
    return makeStatus(trans.__('memory lost'), `${session.name}: ${text}`, 'wrong');
  }
  const entry = queueEntry(place);
  if (entry !== undefined) {
    return waiting(place, entry, store);
  }
  if (holds(place)) {
    return makeStatus(trans.__('yours'), trans.__('%1 has the GPU.', session.name), 'yours');
  }
  if (session.kept_out) {
    return makeStatus(
      keptOut(session.kept_out),
      `${session.name}: ${session.problem_text}`,
      'wrong'
    );
  }
  if (session.keeps_until !== null) {
    return makeStatus(
      trans.__('free'),
      trans.__('The place of %1 is kept for a while: a cell starts at once.', session.name),
      'free'
    );
  }
  const size = formatBytes(session.paged_out_bytes || session.resident_bytes);
  switch (session.state) {
    case 'paged-out':
      return makeStatus(
        stateWord(session.state),
        trans.__(
          '%1 of %2 are in system RAM; they come back when you run a cell.',
          size,
          session.name
        ),
        'out'
      );
    case 'paging-out':
      return makeStatus(
        stateWord(session.state),
        trans.__('%1 of %2 are on their way to system RAM.', size, session.name),
        'moving'
      );
    case 'paging-in':
      return makeStatus(
        stateWord(session.state),
        trans.__('%1 of %2 are on their way back into the GPU.', size, session.name),
        'moving'
      );
    default:
      return ofGpus([place.gpu]);
  }
}

function waiting(place: IPlace, entry: IWaiter, store: IKiwiStore): IStatus {
  const { gpu, session } = place;
  const position = ordinal(entry.position);
  const wait = waitText(store, entry);
  if (entry.blocked) {
    return makeStatus(
      wait,
      `${session.name}: ${session.problem_text}`,
      'wrong',
      store.expected(session.id) !== null
    );
  }
  const all = inLine(gpu);
  const label =
    wait === ''
      ? trans.__('%1 waits for the GPU: %2 of %3.', session.name, position, all)
      : trans.__('%1 waits for the GPU: %2 of %3, %4.', session.name, position, all, wait);
  const held =
    session.state === 'suspended'
      ? ` ${trans.__('It was suspended in mid-cell and goes on.')}`
      : '';
  return makeStatus(
    wait === '' ? position : `${position}, ${wait}`,
    label + held,
    'waiting',
    wait !== ''
  );
}

/** Returns whether a cell of the reader would start at once on one of them. */
function ofGpus(gpus: readonly IGpu[]): IStatus {
  if (gpus.some(gpu => gpu.holders.length === 0 && inLine(gpu) === 0)) {
    return makeStatus(
      trans.__('free'),
      trans.__('The GPU is free: a cell starts at once.'),
      'free'
    );
  }
  return gpus.some(gpu => !gpu.scheduler.serialised)
    ? makeStatus(
        trans.__('in use'),
        trans.__('Others use the GPU; a cell starts beside them if it fits.'),
        'busy'
      )
    : makeStatus(
        trans.__('busy'),
        trans.__('The GPU is in use: a cell waits for its turn.'),
        'busy'
      );
}
