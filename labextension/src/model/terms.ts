/**
 * The words that every surface uses for the same thing.
 *
 * Written by packaging/typescript_terms.py from kiwi_core/terms.py: do not edit.
 */

import type { SessionState } from './types';
import { trans } from './translation';

export function stateWord(state: SessionState): string {
  switch (state) {
    case 'idle':
      return trans.__('idle');
    case 'waiting':
      return trans.__('waiting');
    case 'running':
      return trans.__('running');
    case 'suspended':
      return trans.__('suspended');
    case 'paging-out':
      return trans.__('paging out');
    case 'paged-out':
      return trans.__('paged out');
    case 'paging-in':
      return trans.__('paging in');
    case 'lost':
      return trans.__('lost');
  }
}

export function anyMoment(): string {
  return trans.__('any moment');
}

export function about(amount: string | number): string {
  return trans.__('about %1', amount);
}

export function upTo(amount: string | number): string {
  return trans.__('up to %1', amount);
}

export function nobodyCanTell(): string {
  return trans.__('nobody can tell');
}

export function heldUp(): string {
  return trans.__('held up');
}

export function takesNoPart(): string {
  return trans.__('takes no part');
}

export function keptOut(who: string | number): string {
  return trans.__('suspended by %1 until kiwi resume', who);
}

export function untilOthersAsk(): string {
  return trans.__('until others ask');
}

export function untilDone(): string {
  return trans.__('until it is done');
}

export function turnOver(): string {
  return trans.__('its turn is over');
}

export function atMost(left: string | number): string {
  return trans.__('at most %1 more', left);
}

export function keeps(left: string | number): string {
  return trans.__('keeps the GPU for up to %1 in case its next cell comes', left);
}

export function oneAtATime(): string {
  return trans.__('one at a time');
}

export function inParallel(): string {
  return trans.__('in parallel');
}

export function quantum(): string {
  return trans.__('quantum');
}

export function antiThrash(): string {
  return trans.__('anti-thrash');
}

export function policy(): string {
  return trans.__('policy');
}

export function ended(): string {
  return trans.__('a program that has ended');
}

export function busy(percent: string | number): string {
  return trans.__('%1 % busy', percent);
}

export function program(name: string | number, pid: string | number): string {
  return trans.__('%1 (pid %2)', name, pid);
}

export function outside(): string {
  return trans.__('held by programs outside Kiwi');
}

export function unnamed(): string {
  return trans.__('held by the driver, or by programs that it does not name');
}

export const UNNAMED_LEAST_BYTES = 67108864;
