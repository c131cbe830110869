/** Names, owners, order and looks of sessions. */

import type { IGpu, IHistory, IWaiter, ISession } from '../model/types';
import { ended } from '../model/terms';
import { trans } from '../model/translation';

/** The daemon's name for users whose name the reader may not see. */
export const ANOTHER_USER = 'another user';

/** Number of looks of notebooks (colour and texture), used in turn. */
export const LOOKS = 6;

/** Returns the look of a session: the same everywhere, for as long as the page is open. */
export function lookOf(gpu: IGpu, session: string): number {
  const index = gpu.sessions.findIndex(each => each.id === session);
  return index < 0 ? LOOKS : index % LOOKS;
}

export function sessionOf(gpu: IGpu, id: string): ISession | undefined {
  return gpu.sessions.find(session => session.id === id);
}

export function queueEntryOf(gpu: IGpu, id: string): IWaiter | undefined {
  return gpu.queue.find(entry => entry.session === id);
}

/** Returns a name, also for a session without one (a program that gave none). */
export function nameOf(session: Pick<ISession, 'name'> | undefined): string {
  return session === undefined ? ended() : session.name || trans.__('an unnamed program');
}

/** Characters at the end of a long name that are always shown: `…-v2.ipynb` tells more than `run-…`. */
const TAIL = 9;

/** Names up to this long are never cut by more than a few characters; they stay whole. */
const WHOLE = 12;

/** A name in two parts, of which the first may be cut at its end; the second is '' for short ones. */
export function cutInTwo(name: string): [string, string] {
  const letters = Array.from(name);
  return letters.length <= WHOLE
    ? [name, '']
    : [letters.slice(0, -TAIL).join(''), letters.slice(-TAIL).join('')];
}

/** Returns whether the notebook of the entry is known. */
export function isNamed({ name }: IHistory): boolean {
  return name !== '' && name !== ANOTHER_USER;
}

/** Returns the present session of the notebook of `entry`, whose own session has ended. It is found
 * by its path, or by its name if the kernel has ended and its path is forgotten. undefined: there
 * is none, or it is ambiguous (notebooks of one name in several folders). */
export function heirOf(gpu: IGpu, entry: IHistory): ISession | undefined {
  const heirs = gpu.sessions.filter(
    ({ mine, path, name }) =>
      mine && (entry.path === null ? name === entry.name : path === entry.path)
  );
  return heirs.length === 1 ? heirs[0] : undefined;
}

/** Returns whether to mark the reader's own sessions: not if all are the reader's. */
export function marksOwn(gpu: IGpu): boolean {
  return gpu.sessions.some(session => !session.mine);
}

/** Returns sessions that neither hold the GPU nor wait: the reader's own first. */
export function restingOf(gpu: IGpu): { own: ISession[]; others: ISession[] } {
  const busy = new Set([...gpu.holders, ...gpu.queue.map(entry => entry.session)]);
  const resting = gpu.sessions.filter(session => !busy.has(session.id));
  return {
    own: resting.filter(session => session.mine),
    others: resting.filter(session => !session.mine)
  };
}
