/** The load of the GPU, and two bars: memory in the GPU and in system RAM. */

import * as React from 'react';

import { formatBytes } from '../model/format';
import { loads } from '../model/phrases';
import type { IGpu } from '../model/types';
import { trans } from '../model/translation';

import { gpuBar, hostBar } from './memory-model';
import type { IBar, ISegment } from './memory-model';
import { CutName } from './name';
import { Textures, textureOf } from './textures';

/** Utilisation, power and temperature, as `nvidia-smi` shows them; nothing without NVML. */
export function Load(props: { gpu: IGpu }) {
  const figures = loads(props.gpu.gauges);
  if (figures.length === 0) {
    return null;
  }
  return (
    <section className="jp-Kiwi-part" data-kiwi="load">
      <h3>{trans.__('GPU load')}</h3>
      <ul className="jp-Kiwi-loads">
        {figures.map(({ text, share }) => (
          <li key={text.replace(/\d+/g, '')}>
            {text}
            {share !== null && (
              <svg className="jp-Kiwi-gauge" aria-hidden="true">
                <rect width={`${Math.round(100 * Math.min(1, share))}%`} height="100%" />
              </svg>
            )}
          </li>
        ))}
      </ul>
    </section>
  );
}

export function Memory(props: { gpu: IGpu }) {
  const inGpu = gpuBar(props.gpu);
  const onHost = hostBar(props.gpu);
  return (
    <section className="jp-Kiwi-part" data-kiwi="memory">
      <Bar bar={inGpu} scope={`${props.gpu.uuid}-gpu`} />
      {onHost !== null && <Bar bar={onHost} scope={`${props.gpu.uuid}-host`} />}
    </section>
  );
}

function Bar(props: { bar: IBar; scope: string }) {
  const { bar, scope } = props;
  let from = 0;
  return (
    <>
      <h3>
        {bar.title} <span className="jp-Kiwi-amount">{bar.summary}</span>
      </h3>
      <svg
        className={bar.segments.some(each => each.share > 0) ? 'jp-Kiwi-bar' : 'jp-Kiwi-hidden'}
        role="img"
        aria-label={bar.text}
      >
        <Textures scope={scope} looks={bar.segments.map(each => each.look)} />
        {bar.segments.map(segment => {
          if (segment.share === 0) {
            return null;
          }
          const x = from;
          from += segment.share;
          return <Segment key={segment.key} segment={segment} x={x} scope={scope} />;
        })}
      </svg>
      <ul
        className={bar.columns.length > 0 ? 'jp-Kiwi-legend jp-mod-two' : 'jp-Kiwi-legend'}
        aria-hidden="true"
      >
        {bar.columns.length > 0 && (
          <li className="jp-Kiwi-columns">
            {bar.columns.map(column => (
              <span key={column}>{column}</span>
            ))}
          </li>
        )}
        {bar.segments.map(segment => (
          <li key={segment.key} title={segment.title}>
            <svg className="jp-Kiwi-swatch">
              <Swatch look={segment.look} scope={scope} />
            </svg>
            <span className="jp-Kiwi-name">
              <CutName name={segment.label} />
            </span>
            {segment.mine && bar.columns.length === 0 && (
              <span className="jp-Kiwi-yours">{trans.__('yours')}</span>
            )}
            <span className="jp-Kiwi-amount">{formatBytes(segment.bytes)}</span>
            {bar.columns.length > 0 && <span className="jp-Kiwi-beside">{segment.beside}</span>}
          </li>
        ))}
      </ul>
    </>
  );
}

function Segment(props: { segment: ISegment; x: number; scope: string }) {
  const { segment, x, scope } = props;
  return (
    <svg x={`${100 * x}%`} width={`${100 * segment.share}%`} height="100%">
      <title>{segment.title}</title>
      <Swatch look={segment.look} scope={scope} />
      <line className="jp-Kiwi-gap" x1="100%" x2="100%" y1="0" y2="100%" />
    </svg>
  );
}

/** Fills its parent with the look: the colour, and the texture over it. */
function Swatch(props: { look: ISegment['look']; scope: string }) {
  const texture = textureOf(props.look, props.scope);
  return (
    <>
      <rect className="jp-Kiwi-fill" data-look={props.look} width="100%" height="100%" />
      {texture !== null && <rect fill={texture} width="100%" height="100%" />}
    </>
  );
}
