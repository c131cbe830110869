/** Everything about one GPU, the most important first. */

import * as React from 'react';

import type { IGpu } from '../model/types';
import { trans } from '../model/translation';

import { Controls } from './controls';
import { Load, Memory } from './memory';
import { MyWait } from './mywait';
import type { IPart } from './parts';
import { GpuProblems } from './problems';
import { Line, Resting } from './queue';
import { Timeline } from './timeline';
import type { Zoom } from './timeline-shapes';
import { WhatHappened } from './what-happened';

interface IProps extends IPart {
  readonly zoom_s: Zoom;
  readonly setZoom: (zoom_s: Zoom) => void;
}

export function Card(props: IProps) {
  const { zoom_s, setZoom, ...part } = props;
  const { store, actions, gpu, live } = part;
  const heading = React.useId();
  return (
    <section
      className={live ? 'jp-Kiwi-card' : 'jp-Kiwi-card jp-mod-last-known'}
      data-kiwi="gpu"
      data-uuid={gpu.uuid}
      aria-labelledby={heading}
    >
      <Head gpu={gpu} id={heading} />
      <GpuProblems gpu={gpu} actions={actions} now={() => store.now()} />
      <div className="jp-Kiwi-known">
        <MyWait {...part} />
        <Line {...part} />
        <Timeline store={store} gpu={gpu} live={live} zoom_s={zoom_s} setZoom={setZoom} />
        <Memory gpu={gpu} />
        <Resting {...part} />
        <details className="jp-Kiwi-fold jp-mod-more" data-kiwi="more">
          <summary>{trans.__('Load, history, settings')}</summary>
          {live && <Load gpu={gpu} />}
          <WhatHappened store={store} gpu={gpu} live={live} zoom_s={zoom_s} />
          <Controls {...part} />
        </details>
      </div>
    </section>
  );
}

function Head(props: { gpu: IGpu; id: string }) {
  const { gpu, id } = props;
  const { driver_version: driver, daemon_version: daemon } = gpu;
  const versions =
    driver === ''
      ? trans.__('Kiwi daemon %1', daemon)
      : trans.__('driver %1, Kiwi daemon %2', driver, daemon);
  const about = `${gpu.uuid}\n${versions}`;
  return (
    <header className="jp-Kiwi-head">
      <h2 id={id} title={`${gpu.name}\n${about}`}>
        <span className="jp-Kiwi-index">{trans.__('GPU %1', gpu.index)}</span>{' '}
        <span className="jp-Kiwi-name">{gpu.name}</span>
      </h2>
      {gpu.emulated && (
        <span
          className="jp-Kiwi-badge"
          data-kiwi="emulated"
          title={trans.__(
            'There is no GPU behind this: Kiwi emulates one in system RAM. Good for trying out and for tests; speeds mean nothing.'
          )}
        >
          {trans.__('Emulated – not a real GPU')}
        </span>
      )}
    </header>
  );
}
