/** Small components that several parts of the panel use. */

import * as React from 'react';

import type { IKiwiActions, IKiwiStore } from '../model/api';
import { keepsText, turnText, waitText } from '../model/phrases';
import type { IGpu, IWaiter, ISession } from '../model/types';
import { trans } from '../model/translation';

import { usePending, useTicking } from './hooks';
import { CutName } from './name';
import { marksOwn, nameOf, queueEntryOf } from './people';

/** What every part of a card needs. */
export interface IPart {
  readonly store: IKiwiStore;
  readonly actions: IKiwiActions;
  readonly gpu: IGpu;
  /** false: the panel shows the last known state, so there are no countdowns and no settings. */
  readonly live: boolean;
}

/** The name of a session: a button that opens its notebook if it is one of the reader's. */
export function SessionName(props: { session: ISession | undefined; actions: IKiwiActions }) {
  const { session, actions } = props;
  const name = nameOf(session);
  if (session === undefined || session.path === null) {
    return (
      <span className="jp-Kiwi-name" title={name}>
        <CutName name={name} />
      </span>
    );
  }
  const open = () => {
    // Opening fails with the document manager's own dialog; there is nothing to add to it here.
    actions.open(session).catch(() => undefined);
  };
  return (
    <button
      type="button"
      className="jp-Kiwi-name jp-Kiwi-link"
      title={trans.__('Open %1', session.path)}
      onClick={open}
    >
      <CutName name={name} />
    </button>
  );
}

/** Marks a session as the reader's own, if there are others'. "you" would read as "has the GPU". */
export function Yours(props: { gpu: IGpu; session: ISession | undefined }) {
  return props.session?.mine === true && marksOwn(props.gpu) ? (
    <span className="jp-Kiwi-yours">{trans.__('yours')}</span>
  ) : null;
}

/** "about 12 s" or "10–25 s", counting down by itself; `short`: "≈ 12 s". `unknown` is shown
 * while the wait is not known. */
export function Countdown(props: {
  store: IKiwiStore;
  entry: IWaiter;
  unknown: string;
  short?: boolean;
  /** Shows the figure large, and below it, smaller, why it got longer. */
  large?: boolean;
}) {
  const { store, entry, unknown, short, large } = props;
  const text = useTicking(() => waitText(store, entry, short) || unknown);
  const why = large ? text.indexOf(' (') : -1;
  if (why >= 0) {
    return (
      <>
        {text.slice(0, why)}
        <span className="jp-Kiwi-wait-why">{text.slice(why)}</span>
      </>
    );
  }
  return <>{text}</>;
}

/** "at most 21 s more", counting down by itself. `otherwise` is shown where that is not known. */
export function Turn(props: {
  store: IKiwiStore;
  gpu: IGpu;
  holder: ISession;
  otherwise?: string;
}) {
  const { store, gpu, holder, otherwise } = props;
  return <>{useTicking(() => turnText(gpu, holder, store.now()) || (otherwise ?? ''))}</>;
}

/** For how long a session keeps its place in the GPU in case its next cell comes. */
export function Keeps(props: { store: IKiwiStore; session: ISession }) {
  const { store, session } = props;
  return <>{useTicking(() => keepsText(session, store.now()))}</>;
}

/** Gives up the place in the queue of one of the reader's waiting cells. */
export function LeaveQueue(props: { gpu: IGpu; session: ISession; actions: IKiwiActions }) {
  const { gpu, session, actions } = props;
  const pending = usePending();
  const waits = session.state === 'waiting' && queueEntryOf(gpu, session.id) !== undefined;
  if (!waits || session.path === null) {
    return null;
  }
  return (
    <>
      <button
        type="button"
        className="jp-Kiwi-button"
        data-kiwi="leave-queue"
        disabled={pending.busy}
        aria-label={trans.__('Leave the line with %1', nameOf(session))}
        title={trans.__('Interrupts the cell that waits, as Kernel → Interrupt does.')}
        onClick={() => pending.run(() => actions.leave({ gpu, session }))}
      >
        {pending.busy ? trans.__('Leaving…') : trans.__('Leave the line')}
      </button>
      {pending.error !== '' && (
        <span className="jp-Kiwi-error" role="alert">
          {pending.error}
        </span>
      )}
    </>
  );
}

/** Text with `code` between backticks, as in the daemon's remedies. */
export function Prose(props: { text: string }) {
  const parts = props.text.split('`');
  return (
    <>
      {parts.map((part, index) =>
        index % 2 === 1 ? <code key={index}>{part}</code> : <span key={index}>{part}</span>
      )}
    </>
  );
}

/** Arrow keys, Home and End move between the buttons of a long list; Tab leaves it. */
export function useRoving<T extends HTMLElement>(): {
  ref: React.RefObject<T>;
  onKeyDown: (event: React.KeyboardEvent) => void;
  onFocus: (event: React.FocusEvent) => void;
} {
  const ref = React.useRef<T>(null);
  const stops = () => [...(ref.current?.querySelectorAll<HTMLElement>('button') ?? [])];
  const enter = (chosen: HTMLElement | undefined) => {
    for (const stop of stops()) {
      stop.tabIndex = stop === chosen ? 0 : -1;
    }
  };
  React.useEffect(() => {
    const all = stops();
    enter(
      all.find(stop => stop === document.activeElement) ??
        all.find(stop => stop.tabIndex === 0) ??
        all[0]
    );
  });
  const onKeyDown = (event: React.KeyboardEvent) => {
    const all = stops();
    const at = all.indexOf(document.activeElement as HTMLElement);
    const goal = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || goal === undefined || all[goal] === undefined) {
      return;
    }
    event.preventDefault();
    all[goal].focus();
  };
  const onFocus = (event: React.FocusEvent) => {
    const stop = stops().find(each => each === event.target);
    if (stop !== undefined) {
      enter(stop);
    }
  };
  return { ref, onKeyDown, onFocus };
}
