/** The texts of "my wait", computed from the state of one GPU. Pure. */

import { inLine, ownPlacesOn, subjectOf } from '../model/find';
import { formatBytes, ordinal } from '../model/format';
import type { IBareKernel, IGpu, IWaiter, ISession } from '../model/types';
import { heldUp, stateWord, takesNoPart } from '../model/terms';
import { trans } from '../model/translation';

import { nameOf, queueEntryOf, sessionOf } from './people';
import { asTitle } from './words';

/** The mood of the card: decides the colour of the edge and the icon. */
export type Tone = 'yours' | 'waiting' | 'moving' | 'free' | 'busy' | 'out' | 'wrong';

export interface IMyWait {
  readonly tone: Tone;
  /** The notebook of the card; null: the reader has none on this GPU. */
  readonly session: ISession | null;
  /** The headline; shown instead of a countdown, or if the countdown is unknown. */
  readonly headline: string;
  /** True if its wait is counted down in large. */
  readonly counts: boolean;
  /** True if it has the GPU: its time left stands below the headline. */
  readonly holds: boolean;
  /** Sentences below, the most important first. */
  readonly details: readonly string[];
}

/** `bare`: the environment of the kernel in front has no Kiwi. */
export function myWait(gpu: IGpu, currentKernel: string | null, bare?: IBareKernel): IMyWait {
  const session = subjectOf(ownPlacesOn(gpu), currentKernel)?.session;
  if (session === undefined) {
    return bare === undefined ? withoutSession(gpu) : withoutKiwi(gpu, bare);
  }
  const wait = ofSession(gpu, session);
  return bare === undefined || session.kernel_id !== currentKernel
    ? wait
    : { ...wait, details: [...wait.details, bare.text] };
}

function withoutKiwi(gpu: IGpu, bare: IBareKernel): IMyWait {
  return bare.takes_part
    ? { ...open(gpu, null), details: [bare.text] }
    : makeWait('wrong', null, asTitle(takesNoPart()), [bare.text]);
}

function ofSession(gpu: IGpu, session: ISession): IMyWait {
  const entry = queueEntryOf(gpu, session.id);
  if (session.state === 'lost') {
    return makeWait('wrong', session, trans.__('Memory lost'), [
      session.problem_text ||
        trans.__('What this notebook had in GPU memory is gone. Restart its kernel.')
    ]);
  }
  if (entry !== undefined) {
    return waiting(gpu, session, entry);
  }
  if (gpu.holders.includes(session.id)) {
    return holding(session);
  }
  if (session.kept_out) {
    return suspended(session);
  }
  return withProblem(resting(gpu, session));
}

function makeWait(
  tone: Tone,
  session: ISession | null,
  headline: string,
  details: readonly string[]
): IMyWait {
  return { tone, session, headline, counts: false, holds: false, details };
}

/** Returns the card for an old state: without promises and countdowns. */
export function noNews(last: IMyWait): IMyWait {
  const { headline } = last;
  const known = trans.__('Last known: %1.', headline.charAt(0).toLowerCase() + headline.slice(1));
  // "A cell starts at once" would be a promise; a place in the queue and a problem are not.
  const keeps = last.counts || last.tone === 'wrong' || last.tone === 'out';
  return makeWait('busy', last.session, trans.__('Not up to date'), [
    known,
    ...(keeps ? last.details : [])
  ]);
}

/** Adds the problem of a session that does not wait after its state. */
function withProblem(wait: IMyWait): IMyWait {
  const { session } = wait;
  const texts = [
    session?.problem_text,
    session?.stopped,
    session?.unguarded_text,
    session?.pager_text
  ];
  return { ...wait, details: [...wait.details, ...texts.filter(text => !!text)] as string[] };
}

// --- waiting ------------------------------------------------------------------------------------

function waiting(gpu: IGpu, session: ISession, entry: IWaiter): IMyWait {
  const before = whoIsBefore(gpu, entry);
  const position = ordinal(entry.position);
  const place =
    before === ''
      ? trans.__('%1 of %2', position, inLine(gpu))
      : trans.__('%1 of %2, after %3', position, inLine(gpu), before);
  if (entry.kept_out) {
    return suspended(session);
  }
  if (entry.blocked) {
    return makeWait('wrong', session, asTitle(heldUp()), [session.problem_text, `${place}.`]);
  }
  const details = [place];
  const doing = moving(gpu, session);
  if (doing !== '') {
    details.push(doing);
  }
  if (session.state === 'suspended') {
    details.push(trans.__('Suspended in mid-cell; it goes on by itself, and nothing is lost.'));
  }
  const tone = session.state === 'paging-in' ? 'moving' : 'waiting';
  return withProblem({ ...makeWait(tone, session, trans.__('Waiting'), details), counts: true });
}

/** Names who is next before a waiter: the one before it in the queue, or who has the GPU. */
function whoIsBefore(gpu: IGpu, entry: IWaiter): string {
  const next = gpu.queue.filter(each => each.position < entry.position && !each.kept_out).pop();
  const ids = next === undefined ? gpu.holders : [next.session];
  return ids.map(id => nameOf(sessionOf(gpu, id))).join(', ');
}

/** Returns the card of a session that a user keeps out of the GPU, waiting or not. */
function suspended(session: ISession): IMyWait {
  return makeWait('wrong', session, asTitle(stateWord('suspended')), [session.problem_text]);
}

/** Returns what is being done for a waiting session: its memory, or another session's, moves. */
function moving(gpu: IGpu, session: ISession): string {
  if (session.state === 'paging-in') {
    return trans.__('Its memory is paging in (%1).', formatBytes(session.paged_out_bytes));
  }
  if (session.state === 'paging-out') {
    return trans.__('Its memory is paging out to make room. Nothing is lost.');
  }
  const other = movingFirst(gpu, session);
  if (other === undefined) {
    return '';
  }
  return other.state === 'paging-out'
    ? trans.__('The memory of %1 is paging out to make room.', nameOf(other))
    : trans.__('The memory of %1 is paging in first.', nameOf(other));
}

/** Returns the session whose memory moves for `waiting`, so that the move is shown once. */
export function movingFirst(gpu: IGpu, waiting: ISession): ISession | undefined {
  if (waiting.state === 'paging-in' || waiting.state === 'paging-out') {
    return undefined;
  }
  const leaving = gpu.sessions.find(each => each.state === 'paging-out');
  return leaving ?? gpu.sessions.find(each => each.state === 'paging-in');
}

// --- holding ------------------------------------------------------------------------------------

/** The queue below says which sessions wait and which compute beside it. */
function holding(session: ISession): IMyWait {
  const details = session.lingering
    ? [trans.__('Its cell is over; something it started in the background goes on.')]
    : [];
  return withProblem({
    ...makeWait('yours', session, trans.__('Has the GPU'), details),
    holds: true
  });
}

// --- resting ------------------------------------------------------------------------------------

function resting(gpu: IGpu, session: ISession): IMyWait {
  if (session.keeps_until !== null) {
    return makeWait('free', session, trans.__('Free'), [
      trans.__('A cell starts at once: its place is kept for a while, though another one waits.')
    ]);
  }
  const size = formatBytes(session.paged_out_bytes || session.resident_bytes);
  switch (session.state) {
    case 'paged-out':
      return makeWait('out', session, asTitle(stateWord(session.state)), [
        trans.__('Its %1 are in system RAM and come back when you run a cell.', size),
        ...(isInUse(gpu) ? open(gpu, session).details : [])
      ]);
    case 'paging-out':
      return makeWait('moving', session, asTitle(stateWord(session.state)), [
        trans.__('%1 go to system RAM to make room. Nothing is lost.', size)
      ]);
    case 'paging-in':
      return makeWait('moving', session, asTitle(stateWord(session.state)), [
        trans.__('%1 come back from system RAM, so that your next cell starts at once.', size)
      ]);
    default:
      return open(gpu, session);
  }
}

function withoutSession(gpu: IGpu): IMyWait {
  const wait = open(gpu, null);
  const none = !gpu.sessions.some(session => session.mine);
  const who = none
    ? trans.__('None of your notebooks uses this GPU yet.')
    : trans.__('The notebook in front does not use this GPU yet.');
  return { ...wait, details: [...wait.details, who] };
}

/** Returns whether somebody has the GPU or waits for it. */
function isInUse(gpu: IGpu): boolean {
  return gpu.holders.length > 0 || inLine(gpu) > 0;
}

/** Returns whether a cell of the reader would start now. */
function open(gpu: IGpu, session: ISession | null): IMyWait {
  if (!isInUse(gpu)) {
    return makeWait('free', session, trans.__('Free'), [trans.__('A cell starts at once.')]);
  }
  return gpu.scheduler.serialised
    ? makeWait('busy', session, trans.__('Busy'), [
        trans.__('A cell that you run now waits for its turn.')
      ])
    : makeWait('busy', session, trans.__('In use'), [
        trans.__('A cell that you run now starts beside the others if it fits.')
      ]);
}
