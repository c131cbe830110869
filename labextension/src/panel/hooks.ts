/** React hooks of the panel: the model, the clock, actions under way. */

import * as React from 'react';

import type { IKiwiStore } from '../model/api';

import { onTick } from './ticker';

/** True while the panel is visible; a hidden panel is not rendered again. */
export const OnScreen = React.createContext(true);

/** Renders the caller again whenever the model has changed. */
export function useModel(store: IKiwiStore): void {
  const onScreen = React.useContext(OnScreen);
  const [, redraw] = React.useReducer((count: number) => count + 1, 0);
  React.useEffect(() => {
    if (!onScreen) {
      return;
    }
    store.changed.connect(redraw);
    redraw(); // changes between the first drawing and now
    return () => {
      store.changed.disconnect(redraw);
    };
  }, [store, onScreen]);
}

/** Returns `read()`, evaluated again as time passes; renders only when the result changes. */
export function useTicking<T>(read: () => T): T {
  const onScreen = React.useContext(OnScreen);
  const latest = React.useRef(read);
  latest.current = read;
  const [, show] = React.useState(read);
  React.useEffect(() => {
    if (!onScreen) {
      return;
    }
    const look = () => show(latest.current);
    look();
    return onTick(look);
  }, [onScreen]);
  return read();
}

export interface IPending {
  /** True while the action runs. */
  readonly busy: boolean;
  /** The last error, for users; '' if there was none. */
  readonly error: string;
  run(action: () => Promise<void>): void;
}

/** An action that the user started here: running, done or failed. */
export function usePending(): IPending {
  const [busy, setBusy] = React.useState(false);
  const [error, setError] = React.useState('');
  const run = (action: () => Promise<void>) => {
    setBusy(true);
    setError('');
    action()
      .catch((reason: unknown) => {
        setError(reason instanceof Error ? reason.message : String(reason));
      })
      .finally(() => setBusy(false));
  };
  return { busy, error, run };
}

/** A choice that this browser remembers. A stored value that is not among `choices` is ignored. */
export function useRemembered<T extends number>(
  key: string,
  choices: readonly T[],
  fallback: T
): [T, (value: T) => void] {
  const [value, setValue] = React.useState<T | null>(() => {
    const stored = Number(read(key));
    return choices.find(choice => choice === stored) ?? null;
  });
  const remember = (chosen: T) => {
    setValue(chosen);
    write(key, String(chosen));
  };
  return [value ?? fallback, remember];
}

function read(key: string): string | null {
  try {
    return window.localStorage.getItem(key);
  } catch {
    return null; // storage is switched off: remembered until the page is closed
  }
}

function write(key: string, value: string): void {
  try {
    window.localStorage.setItem(key, value);
  } catch {
    // as above
  }
}

export function prefersReducedMotion(): boolean {
  return window.matchMedia?.('(prefers-reduced-motion: reduce)').matches ?? false;
}
