/** One GPU: everything about it, the most wanted first. */

import * as React from 'react';

import type { IGpu } from '../model/types';

import { Controls } from './controls';
import { Memory } from './memory';
import { MyWait } from './mywait';
import type { IShared } from './parts';
import { GpuProblems } from './problems';
import { Holders, Queue, Resting } from './queue';
import { Timeline } from './timeline';
import type { Zoom } from './timeline-model';

interface IProps extends IShared {
  readonly gpu: IGpu;
  readonly zoom_s: Zoom;
  readonly setZoom: (zoom_s: Zoom) => void;
}

export function Card(props: IProps) {
  const { store, actions, gpu } = props;
  const heading = React.useId();
  return (
    <section
      className={gpu.reachable ? 'jp-Kiwi-card' : 'jp-Kiwi-card jp-mod-away'}
      data-kiwi="gpu"
      data-uuid={gpu.uuid}
      aria-labelledby={heading}
    >
      <Head gpu={gpu} id={heading} />
      <GpuProblems gpu={gpu} actions={actions} />
      <div className="jp-Kiwi-known">
        <MyWait store={store} actions={actions} gpu={gpu} />
        <Holders store={store} actions={actions} gpu={gpu} />
        <Queue store={store} actions={actions} gpu={gpu} />
        <Timeline store={store} gpu={gpu} zoom_s={props.zoom_s} setZoom={props.setZoom} />
        <Memory gpu={gpu} />
        <Resting store={store} actions={actions} gpu={gpu} />
        <Controls store={store} actions={actions} gpu={gpu} />
      </div>
    </section>
  );
}

function Head(props: { gpu: IGpu; id: string }) {
  const { gpu, id } = props;
  const driver = gpu.driver_version === '' ? '' : `driver ${gpu.driver_version}, `;
  const about = `${gpu.uuid}\n${driver}Kiwi daemon ${gpu.daemon_version}`;
  return (
    <header className="jp-Kiwi-head">
      <h2 id={id} title={about}>
        <span className="jp-Kiwi-index">GPU {gpu.index}</span> {gpu.name}
      </h2>
      {gpu.emulated && (
        <span
          className="jp-Kiwi-badge"
          data-kiwi="emulated"
          title="There is no GPU behind this: Kiwi emulates one in system RAM. Good for trying out and for tests; speeds mean nothing."
        >
          Emulated – not a real GPU
        </span>
      )}
    </header>
  );
}
