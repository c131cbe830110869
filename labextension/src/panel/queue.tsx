/** Shows which sessions have the GPU, wait for it, or are idle on it. */

import * as React from 'react';

import { inLine, ownPlacesOn, subjectOf } from '../model/find';
import { sharingText } from '../model/phrases';
import type { IGpu, IWaiter, ISession } from '../model/types';
import { formatBytes, withoutMarks } from '../model/format';
import { keptOut, nobodyCanTell, stateWord } from '../model/terms';
import { trans } from '../model/translation';

import { usePending } from './hooks';
import { Countdown, Keeps, LeaveQueue, Prose, SessionName, Turn, Yours, useRoving } from './parts';
import type { IPart } from './parts';
import { movingFirst } from './mywait-model';
import { marksOwn, nameOf, queueEntryOf, restingOf, sessionOf } from './people';
import { asTitle } from './words';

/** The line for the GPU: who has it, who waits in which order, and why they do not run in parallel.
 * For the notebook of "my wait", it shows only the place, because the figure is above. */
export function Line(props: IPart) {
  const { gpu } = props;
  const kept = gpu.sessions.some(session => session.keeps_until !== null);
  if (gpu.holders.length + gpu.queue.length === 0 && !kept) {
    return null;
  }
  const waiting = inLine(gpu);
  return (
    <section className="jp-Kiwi-part jp-mod-line">
      <h3>
        {trans.__('Line')}{' '}
        {waiting > 0 && (
          <span className="jp-Kiwi-count">{trans._n('%1 waits', '%1 wait', waiting)}</span>
        )}
      </h3>
      <Holders {...props} />
      <Queue {...props} />
      {gpu.holders.length + gpu.queue.length > 1 && (
        <p className="jp-Kiwi-quiet" data-kiwi="why" data-serialised={gpu.scheduler.serialised}>
          {asTitle(sharingText(gpu.scheduler))}.
        </p>
      )}
    </section>
  );
}

function Holders(props: IPart) {
  const { store, actions, gpu, live } = props;
  const kept = gpu.sessions.filter(session => session.keeps_until !== null);
  const shown = [...gpu.holders, ...kept.map(session => session.id)];
  return (
    <ul className="jp-Kiwi-people" aria-label={trans.__('Has the GPU')}>
      {shown.map(id => {
        const session = sessionOf(gpu, id);
        const isSubject = isSubjectOf(gpu, store.currentKernel, session);
        const holds = gpu.holders.includes(id);
        return (
          <li
            key={id}
            className={isSubject ? 'jp-Kiwi-person jp-mod-subject' : 'jp-Kiwi-person'}
            data-kiwi={holds ? 'holder' : 'keeper'}
            data-session={id}
          >
            <div className="jp-Kiwi-line">
              <span className="jp-Kiwi-place" aria-hidden="true" title={trans.__('Has the GPU')}>
                ▶
              </span>
              <SessionName session={session} actions={actions} />
              {!isSubject && <Yours gpu={gpu} session={session} />}
              <span className="jp-Kiwi-amount">
                {isSubject
                  ? subjectMark()
                  : live &&
                    session?.keeps_until === null && (
                      <Turn store={store} gpu={gpu} holder={session} otherwise={hasIt()} />
                    )}
              </span>
            </div>
            {live && session !== undefined && session.keeps_until !== null && (
              <span className="jp-Kiwi-note" data-kiwi="keeps">
                <Keeps store={store} session={session} />
              </span>
            )}
            {!isSubject && <Marks session={session} />}
          </li>
        );
      })}
    </ul>
  );
}

/** Shown where nobody can tell for how long. */
const hasIt = () => trans.__('has the GPU');

/** Shown instead of the large figure above. */
const subjectMark = () => trans.__('this one');

/** Marks sessions that cannot be stopped as usual: a word each, and the reason as its tooltip. */
function Marks(props: { session: ISession | undefined }) {
  const { session } = props;
  return (
    <>
      {session?.guarded === false && (
        <span
          className="jp-Kiwi-note"
          data-kiwi="unguarded"
          title={withoutMarks(session.unguarded_text)}
        >
          {trans.__('unguarded')}
        </span>
      )}
      {session?.stopped && (
        <span className="jp-Kiwi-note" data-kiwi="stopped" title={withoutMarks(session.stopped)}>
          {trans.__('stopped')}
        </span>
      )}
    </>
  );
}

/** Number of places that are always shown; further places are shown only if they are the
 * reader's own. */
const FIRST_PLACES = 5;

function Queue(props: IPart) {
  const { gpu } = props;
  const roving = useRoving<HTMLOListElement>();
  const folded = useRoving<HTMLOListElement>();
  if (gpu.queue.length === 0) {
    return null;
  }
  const own = (entry: IWaiter) => sessionOf(gpu, entry.session)?.mine === true;
  const far = gpu.queue.filter(entry => entry.position > FIRST_PLACES && !own(entry));
  const rest = far.length > 1 ? far : [];
  const rows = (entries: readonly IWaiter[]) =>
    entries.map(entry => <Waiting key={entry.session} {...props} entry={entry} />);
  return (
    <>
      <ol className="jp-Kiwi-people" data-kiwi="queue" aria-label={trans.__('Waiting')} {...roving}>
        {rows(gpu.queue.filter(entry => !rest.includes(entry)))}
      </ol>
      {rest.length > 0 && (
        <details className="jp-Kiwi-fold">
          <summary>{trans._n('%1 more waits', '%1 more wait', rest.length)}</summary>
          <ol
            className="jp-Kiwi-people"
            tabIndex={0}
            aria-label={trans.__('Others that wait')}
            {...folded}
          >
            {rows(rest)}
          </ol>
        </details>
      )}
    </>
  );
}

function Waiting(props: IPart & { entry: IWaiter }) {
  const { store, actions, gpu, live, entry } = props;
  const session = sessionOf(gpu, entry.session);
  const isSubject = isSubjectOf(gpu, store.currentKernel, session);
  const note = isSubject ? '' : noteOf(props, entry, session);
  const look = isSubject ? ' jp-mod-subject' : '';
  const mine = session?.mine && marksOwn(gpu) ? ' jp-mod-mine' : '';
  return (
    <li
      className={`jp-Kiwi-person${mine}${look}`}
      data-mine={session?.mine ?? false}
      data-kiwi="queue-entry"
      data-session={entry.session}
    >
      <div className="jp-Kiwi-line">
        <span className="jp-Kiwi-place" aria-hidden="true">
          {entry.position}
        </span>
        <SessionName session={session} actions={actions} />
        {!isSubject && <Yours gpu={gpu} session={session} />}
        <span
          className="jp-Kiwi-amount"
          title={withoutMarks(session?.problem_text ?? '') || undefined}
        >
          {isSubject
            ? subjectMark()
            : live && <Countdown store={store} entry={entry} unknown={nobodyCanTell()} short />}
        </span>
      </div>
      {note && (
        <span className="jp-Kiwi-note" data-kiwi="queue-note">
          {note}
        </span>
      )}
      {live && session && !isSubject && (
        <LeaveQueue gpu={gpu} session={session} actions={actions} />
      )}
      {!isSubject && <Marks session={session} />}
    </li>
  );
}

/** Returns what stands below the row of a waiting session: what its state adds to its place, and
 * why the figure got longer. */
function noteOf(part: IPart, entry: IWaiter, session: ISession | undefined): string {
  if (entry.kept_out) {
    return keptOut(entry.kept_out);
  }
  const state = entry.blocked || isInMyWait(part, session) ? '' : doing(session);
  const why = part.live ? (part.store.expected(entry.session)?.why ?? '') : '';
  return [state, why].filter(words => words !== '').join(', ');
}

/** Returns what a waiting session's state adds to its place. */
function doing(session: ISession | undefined): string {
  switch (session?.state) {
    case 'suspended':
      return trans.__('suspended in mid-cell');
    case 'paging-in':
    case 'paging-out':
      return stateWord(session.state);
    default:
      return '';
  }
}

/** Returns whether "my wait" already says that the memory of `session` moves. */
function isInMyWait({ gpu, store }: IPart, session: ISession | undefined): boolean {
  const subject = subjectOf(ownPlacesOn(gpu), store.currentKernel)?.session;
  const waits = subject !== undefined && queueEntryOf(gpu, subject.id) !== undefined;
  return waits && session !== undefined && movingFirst(gpu, subject) === session;
}

/** Returns whether "my wait", above, is about `session`. */
function isSubjectOf(gpu: IGpu, currentKernel: string | null, session?: ISession): boolean {
  return subjectOf(ownPlacesOn(gpu), currentKernel)?.session === session;
}

/** The reader's further idle sessions, and all idle sessions of others, are collapsed. */
const SHOWN_AT_ONCE = 4;

export function Resting(props: IPart) {
  const { own, others } = restingOf(props.gpu);
  const roving = useRoving<HTMLUListElement>();
  const folded = useRoving<HTMLUListElement>();
  if (own.length + others.length === 0) {
    return null;
  }
  const shown = own.slice(0, SHOWN_AT_ONCE);
  const rest = [...own.slice(SHOWN_AT_ONCE), ...others];
  return (
    <section className="jp-Kiwi-part">
      {shown.length > 0 && (
        <>
          <h3>{trans.__('Idle')}</h3>
          <ul className="jp-Kiwi-people" {...roving}>
            {shown.map(session => (
              <Idle key={session.id} {...props} session={session} />
            ))}
          </ul>
        </>
      )}
      {rest.length > 0 && (
        <details className="jp-Kiwi-fold">
          <summary>
            {shown.length > 0
              ? trans._n('%1 more idle notebook', '%1 more idle notebooks', rest.length)
              : trans._n('%1 idle notebook', '%1 idle notebooks', rest.length)}
          </summary>
          <ul
            className="jp-Kiwi-people"
            tabIndex={0}
            aria-label={trans.__('Idle notebooks')}
            {...folded}
          >
            {rest.map(session => (
              <Idle key={session.id} {...props} session={session} />
            ))}
          </ul>
        </details>
      )}
    </section>
  );
}

function Idle(props: IPart & { session: ISession }) {
  const { store, actions, gpu, live, session } = props;
  const pending = usePending();
  const frees = live && session.mine && session.state === 'idle' && session.resident_bytes > 0;
  const release = () => pending.run(() => actions.release({ gpu, session }));
  const size = formatBytes(session.resident_bytes);
  // The problem of the notebook in "my wait" is shown there already.
  const wrong = isSubjectOf(gpu, store.currentKernel, session) ? '' : session.problem_text;
  return (
    <li className="jp-Kiwi-person" data-kiwi="resting" data-session={session.id}>
      <div className="jp-Kiwi-line">
        <SessionName session={session} actions={actions} />
        {!frees && <span className="jp-Kiwi-amount">{memoryOf(session)}</span>}
      </div>
      {frees && (
        <div className="jp-Kiwi-line">
          <span className="jp-Kiwi-small">{memoryOf(session)}</span>
          <button
            type="button"
            className="jp-Kiwi-button"
            data-kiwi="release"
            disabled={pending.busy}
            aria-label={trans.__('Release to RAM: the memory of %1', nameOf(session))}
            title={trans.__(
              'Moves %1 to system RAM, so that others have more room. Nothing is lost: it comes back when the notebook next runs a GPU cell.',
              size
            )}
            onClick={release}
          >
            {pending.busy ? trans.__('Releasing…') : trans.__('Release to RAM')}
          </button>
        </div>
      )}
      {pending.error !== '' && (
        <span className="jp-Kiwi-error" role="alert">
          {pending.error}
        </span>
      )}
      {wrong !== '' && (
        <span className="jp-Kiwi-note">
          <Prose text={wrong} />
        </span>
      )}
      <Marks session={session} />
    </li>
  );
}

function memoryOf(session: ISession): string {
  switch (session.state) {
    case 'lost':
      return trans.__('memory lost');
    case 'paging-out':
    case 'paging-in':
      return stateWord(session.state);
    default:
  }
  if (session.paged_out_bytes > 0) {
    return trans.__('%1 paged out', formatBytes(session.paged_out_bytes));
  }
  return session.resident_bytes > 0
    ? trans.__('%1 in the GPU', formatBytes(session.resident_bytes))
    : trans.__('no GPU memory');
}
