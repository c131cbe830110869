/** Whose session it is, in which order notebooks are told apart, and what they are called. */

import type { IGpu, IHistory, IWaiter, ISession } from '../model/types';

/** What the daemon calls everybody whose name the reader may not see. */
export const ANOTHER_USER = 'another user';

/** How many looks notebooks have (colour and texture, style/palette.css); then they come again. */
export const LOOKS = 6;

/** Which look a session has: the same wherever it is drawn, as long as the page is open. */
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

/** A session without a name (a program that gave none) is still somebody. */
export function nameOf(session: Pick<ISession, 'name'> | undefined): string {
  return session === undefined ? 'a notebook that ended' : session.name || 'an unnamed program';
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

/** Whether it can be told which notebook did that. */
export function isNamed({ name }: IHistory): boolean {
  return name !== '' && name !== ANOTHER_USER;
}

/** The session that is now where the one of `entry`, which ended, was: of the same notebook, by its
 * path, or by its name where its kernel is no more and so its path forgotten. undefined: there is
 * none, or it cannot be told (notebooks of one name in several folders). */
export function heirOf(gpu: IGpu, entry: IHistory): ISession | undefined {
  const heirs = gpu.sessions.filter(
    ({ mine, path, name }) =>
      mine && (entry.path === null ? name === entry.name : path === entry.path)
  );
  return heirs.length === 1 ? heirs[0] : undefined;
}

/** Whether the reader's own are told apart: not where all are, it would only be noise. */
export function marksOwn(gpu: IGpu): boolean {
  return gpu.sessions.some(session => !session.mine);
}

/** Sessions that neither hold the GPU nor wait for it: the reader's own first. */
export function restingOf(gpu: IGpu): { own: ISession[]; others: ISession[] } {
  const busy = new Set([...gpu.holders, ...gpu.queue.map(entry => entry.session)]);
  const resting = gpu.sessions.filter(session => !busy.has(session.id));
  return {
    own: resting.filter(session => session.mine),
    others: resting.filter(session => !session.mine)
  };
}
