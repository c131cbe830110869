/** The settings of a GPU as people choose them: the text of each choice, and checks of the input. */

import type { ISettingsPatch } from '../model/api';
import type { AntiThrash, IGpu, IScheduler } from '../model/types';
import { trans } from '../model/translation';

/** What the daemon accepts (docs/protocol.md, `set`). */
export const LEAST_TQ_S = 0.1;
export const MOST_TQ_S = 86_400;

/** One of the values of a setting. */
export interface IChoice<Value extends string = string> {
  readonly value: Value;
  readonly label: string;
  readonly explanation: string;
}

function whenNeeded(): IChoice<AntiThrash> {
  return {
    value: 'on',
    label: trans.__('on'),
    explanation: trans.__(
      'Notebooks run in parallel while their memory fits together, and one at a time as soon as it does not.'
    )
  };
}

/** When notebooks take turns. */
export function modes(): readonly IChoice<AntiThrash>[] {
  return [
    whenNeeded(),
    {
      value: 'always',
      label: trans.__('always'),
      explanation: trans.__('One notebook at a time, even where their memory would fit together.')
    },
    {
      value: 'off',
      label: trans.__('off'),
      explanation: trans.__(
        'Everybody runs at once, at your own risk: cells fail with out-of-memory errors when the memory does not fit.'
      )
    }
  ];
}

export function modeOf(value: AntiThrash): IChoice<AntiThrash> {
  return modes().find(mode => mode.value === value) ?? whenNeeded();
}

function policies(): readonly IChoice[] {
  return [
    {
      value: 'interactive',
      label: trans.__('interactive'),
      explanation: trans.__(
        'Short cells go first: long ones make way for them, and wait longer at a stretch.'
      )
    },
    {
      value: 'round-robin',
      label: trans.__('round-robin'),
      explanation: trans.__('Everybody gets a whole turn, in the order in which they came.')
    }
  ];
}

/** Returns the text of a policy; a policy that only this daemon knows is described in the daemon's
 * words. */
export function policyOf(gpu: IGpu, name: string): IChoice {
  const summary = gpu.policies.find(policy => policy.name === name)?.summary ?? '';
  const explanation =
    summary === '' ? '' : `${summary.charAt(0).toUpperCase()}${summary.slice(1)}.`;
  return (
    policies().find(policy => policy.value === name) ?? { value: name, label: name, explanation }
  );
}

/** Returns what is wrong with a typed time quantum; '' if nothing. */
export function quantumError(text: string): string {
  const value = Number(text);
  if (text.trim() === '' || !Number.isFinite(value)) {
    return trans.__(
      'Give the quantum, the longest turn while others wait, in seconds: for example 30.'
    );
  }
  if (value < LEAST_TQ_S || value > MOST_TQ_S) {
    return trans.__('The quantum may be from 0.1 s to 86400 s (a day).');
  }
  return '';
}

/** The values in the form. */
export interface ISettings {
  readonly quantum: string;
  readonly mode: AntiThrash;
  readonly policy: string;
}

export function settingsOf(scheduler: IScheduler): ISettings {
  const { tq_s, anti_thrash, policy } = scheduler;
  return { quantum: String(tq_s), mode: anti_thrash, policy };
}

/** Returns the fields of a draft that were changed after it had been sent as `sent`. */
export function changedSince(
  sent: Partial<ISettings>,
  now: Partial<ISettings>
): Partial<ISettings> {
  const names = Object.keys(now) as (keyof ISettings)[];
  return Object.fromEntries(
    names.filter(name => now[name] !== sent[name]).map(name => [name, now[name]])
  );
}

/** Returns the settings that differ from `now`; null: none. */
export function patchOf(now: IScheduler, chosen: ISettings): ISettingsPatch | null {
  const patch: ISettingsPatch = {};
  if (Number(chosen.quantum) !== now.tq_s) {
    patch.tq_s = Number(chosen.quantum);
  }
  if (chosen.mode !== now.anti_thrash) {
    patch.anti_thrash = chosen.mode;
  }
  if (chosen.policy !== now.policy) {
    patch.policy = chosen.policy;
  }
  return Object.keys(patch).length > 0 ? patch : null;
}
