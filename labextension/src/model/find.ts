/** Looks up sessions and GPUs in the state. */

import type { IKiwiStore, IPlace } from './api';
import type { IBareKernel, IGpu, IWaiter, ISession, IState } from './types';

/** Returns the reader's own session of that kernel, and its GPU. */
export function placeOfKernel(state: IState | null, kernel: string | null): IPlace | null {
  if (kernel === null || kernel === '') {
    return null;
  }
  for (const gpu of state?.gpus ?? []) {
    const session = gpu.sessions.find(each => each.mine && each.kernel_id === kernel);
    if (session !== undefined) {
      return { gpu, session };
    }
  }
  return null;
}

/** The reader's own sessions on one GPU. */
export function ownPlacesOn(gpu: IGpu): IPlace[] {
  return gpu.sessions.filter(session => session.mine).map(session => ({ gpu, session }));
}

/** All of the reader's own sessions. */
export function ownPlaces(state: IState | null): IPlace[] {
  return (state?.gpus ?? []).flatMap(ownPlacesOn);
}

/** How much of the user's attention a state deserves; the smallest comes first. */
const PRESSING: Readonly<Record<ISession['state'], number>> = {
  lost: 0,
  waiting: 1,
  suspended: 1,
  running: 2,
  'paging-in': 3,
  'paging-out': 3,
  'paged-out': 4,
  idle: 5
};

/**
 * Returns the reader's own session, and its GPU, that a surface is about: that of the notebook in
 * front or, if none is in front, the most pressing one of `places`. null: there is none. If a
 * notebook is in front, no other one counts: "yours" beside another name would seem to be about
 * that notebook.
 */
export function subjectOf(places: readonly IPlace[], currentKernel: string | null): IPlace | null {
  if (currentKernel !== null) {
    const isFront = ({ session }: IPlace) =>
      session.kernel_id !== '' && session.kernel_id === currentKernel;
    return places.find(isFront) ?? null;
  }
  const place = (each: IPlace) => queueEntry(each)?.position ?? 0;
  const pressing = (each: IPlace) =>
    // A session that waits may be moving at the moment; it still waits.
    Math.min(PRESSING[each.session.state], place(each) > 0 ? PRESSING.waiting : Infinity);
  return [...places].sort((a, b) => pressing(a) - pressing(b) || place(a) - place(b))[0] ?? null;
}

/** Returns its place in line, if it waits. */
export function queueEntry(place: IPlace): IWaiter | undefined {
  return place.gpu.queue.find(entry => entry.session === place.session.id);
}

export function holds(place: IPlace): boolean {
  return place.gpu.holders.includes(place.session.id);
}

/** Returns how many wait for their turn. Sessions that are kept out of the GPU do not count. */
export function inLine(gpu: IGpu): number {
  return gpu.queue.filter(entry => !entry.kept_out).length;
}

/** What is to be said of the kernel in front if its environment has no Kiwi. */
export function bareKernel({ state, currentKernel }: IKiwiStore): IBareKernel | undefined {
  return state?.server.bare_kernels[currentKernel ?? ''];
}
