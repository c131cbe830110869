/** The timeline in words, for screen readers, for exact times, and for sizes and speeds without a
 * mouse. It shows the latest lines; the rest can be expanded. */

import * as React from 'react';

import type { IKiwiStore } from '../model/api';
import type { IGpu } from '../model/types';
import { trans } from '../model/translation';

import { useTicking } from './hooks';
import type { Zoom } from './timeline-shapes';
import { listed } from './timeline-words';
import type { IListed } from './timeline-words';

/** Number of lines shown at first, and in all. */
const LATEST = 3;
const ALL = 40;

export function WhatHappened(props: { store: IKiwiStore; gpu: IGpu; live: boolean; zoom_s: Zoom }) {
  const { store, gpu, live, zoom_s } = props;
  const [open, setOpen] = React.useState(false);
  // Entries that go on are updated each second, however rarely the picture is drawn.
  const goesOn = live && gpu.history.some(entry => entry.ended_at === null);
  useTicking(() => (goesOn ? Math.floor(store.now()) : 0));
  const edge = live ? store.now() : (store.state?.now ?? store.now());
  const lines = listed(gpu, edge, zoom_s, ALL);
  if (lines.length === 0) {
    return null;
  }
  return (
    <section className="jp-Kiwi-part" data-kiwi="what-happened">
      <h3>{trans.__('What happened')}</h3>
      <Lines lines={lines.slice(0, LATEST)} />
      {lines.length > LATEST && (
        <details
          className="jp-Kiwi-fold"
          onToggle={event => setOpen((event.target as HTMLDetailsElement).open)}
        >
          <summary>{trans.__('Before that')}</summary>
          <div
            className="jp-Kiwi-scroll"
            tabIndex={0}
            role="group"
            aria-label={trans.__('What happened before')}
          >
            {open && <Lines lines={lines.slice(LATEST)} />}
          </div>
        </details>
      )}
    </section>
  );
}

function Lines(props: { lines: readonly IListed[] }) {
  return (
    <ol className="jp-Kiwi-events">
      {props.lines.map(line => (
        <li key={line.key}>
          <time>{line.time}</time> <b>{line.name}</b> {line.what}
        </li>
      ))}
    </ol>
  );
}
