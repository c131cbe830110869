/** The text of the status bar about the notebook in front. */

import type { IKiwiStore, IPlace } from './api';
import { holds, inLine, ownPlaces, queueEntry, subjectOf } from './find';
import { formatBytes, ordinal } from './format';
import { keptOutText, waitText } from './phrases';
import type { IGpu, IWaiter } from './types';

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
  const { state, connection, currentKernel } = store;
  if (state === null || state.gpus.length === 0) {
    return null;
  }
  if (connection === 'lost') {
    return makeStatus('unknown', 'Kiwi has lost the connection to the Jupyter server.', 'wrong');
  }
  const place = subjectOf(ownPlaces(state), currentKernel);
  if (place !== null) {
    return place.gpu.reachable ? ofSession(place, store) : away();
  }
  const reachable = state.gpus.filter(gpu => gpu.reachable);
  return reachable.length === 0 ? away() : ofGpus(reachable);
}

function makeStatus(text: string, label: string, tone: StatusTone, ticks = false): IStatus {
  return { text: `GPU: ${text}`, label, tone, ticks };
}

function away(): IStatus {
  return makeStatus('unknown', 'The Kiwi daemon of this GPU does not answer.', 'wrong');
}

function ofSession(place: IPlace, store: IKiwiStore): IStatus {
  const { session } = place;
  if (session.state === 'lost') {
    const text = session.problem_text || 'What it had in GPU memory is gone. Restart its kernel.';
    return makeStatus('memory lost', `${session.name}: ${text}`, 'wrong');
  }
  const entry = queueEntry(place);
  if (entry !== undefined) {
    return waiting(place, entry, store);
  }
  if (holds(place)) {
    return makeStatus('yours', `${session.name} has the GPU.`, 'yours');
  }
  if (session.kept_out) {
    return makeStatus(
      keptOutText(session.kept_out),
      `${session.name}: ${session.problem_text}`,
      'wrong'
    );
  }
  const size = formatBytes(session.paged_out_bytes || session.resident_bytes);
  switch (session.state) {
    case 'paged-out':
      return makeStatus(
        'paged out',
        `${size} of ${session.name} are in system RAM; they come back when you run a cell.`,
        'out'
      );
    case 'paging-out':
      return makeStatus(
        'paging out',
        `${size} of ${session.name} are moving to system RAM.`,
        'moving'
      );
    case 'paging-in':
      return makeStatus(
        'coming back',
        `${size} of ${session.name} are moving to the GPU.`,
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
  const held = session.state === 'suspended' ? ' It was suspended in mid-cell and goes on.' : '';
  return makeStatus(
    wait === '' ? position : `${position}, ${wait}`,
    `${session.name} waits for the GPU: ${position} of ${inLine(gpu)}` +
      `${wait === '' ? '' : `, ${wait}`}.${held}`,
    'waiting',
    wait !== ''
  );
}

/** Returns whether a cell of the reader would start at once on one of them. */
function ofGpus(gpus: readonly IGpu[]): IStatus {
  if (gpus.some(gpu => gpu.holders.length === 0 && inLine(gpu) === 0)) {
    return makeStatus('free', 'The GPU is free: a cell starts at once.', 'free');
  }
  return gpus.some(gpu => !gpu.scheduler.serialised)
    ? makeStatus('in use', 'Others use the GPU; a cell starts beside them if it fits.', 'busy')
    : makeStatus('busy', 'The GPU is in use: a cell waits for its turn.', 'busy');
}
