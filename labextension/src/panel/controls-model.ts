/** The settings of a GPU as people choose them: words for the modes, checks of what is typed. */

import type { ISettingsPatch } from '../model/api';
import type { AntiThrash, IScheduler } from '../model/types';

/** What the daemon accepts (docs/protocol.md, `set`). */
export const LEAST_TQ_S = 0.1;
export const MOST_TQ_S = 86_400;

export interface IMode {
  readonly value: AntiThrash;
  readonly label: string;
  readonly explanation: string;
}

const WHEN_NEEDED: IMode = {
  value: 'on',
  label: 'When needed',
  explanation:
    'Notebooks run side by side while their memory fits together, and take turns as soon as it does not.'
};

export const MODES: readonly IMode[] = [
  WHEN_NEEDED,
  {
    value: 'always',
    label: 'Always',
    explanation: 'One notebook at a time, even where their memory would fit together.'
  },
  {
    value: 'off',
    label: 'Never',
    explanation:
      'Everybody runs at once, at your own risk: cells fail with out-of-memory errors when the memory does not fit.'
  }
];

export function modeOf(value: AntiThrash): IMode {
  return MODES.find(mode => mode.value === value) ?? WHEN_NEEDED;
}

/** What is wrong with a time quantum as typed; '' if nothing. */
export function quantumError(text: string): string {
  const value = Number(text);
  if (text.trim() === '' || !Number.isFinite(value)) {
    return 'Give the length of a turn in seconds, for example 30.';
  }
  if (value < LEAST_TQ_S || value > MOST_TQ_S) {
    return 'A turn may last from 0.1 s to 86400 s (a day).';
  }
  return '';
}

/** What has to be set so that `now` becomes what was chosen; null: nothing. */
export function patchOf(now: IScheduler, quantum: string, mode: AntiThrash): ISettingsPatch | null {
  const patch: ISettingsPatch = {};
  if (Number(quantum) !== now.tq_s) {
    patch.tq_s = Number(quantum);
  }
  if (mode !== now.anti_thrash) {
    patch.anti_thrash = mode;
  }
  return Object.keys(patch).length > 0 ? patch : null;
}
