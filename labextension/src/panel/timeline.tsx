/** The last minutes as a picture: a row per notebook, time to the right, "now" at the edge. */

import * as React from 'react';

import type { IKiwiStore } from '../model/api';
import type { IGpu } from '../model/types';
import { trans } from '../model/translation';

import { prefersReducedMotion, useTicking } from './hooks';
import { CutName } from './name';
import { Key } from './timeline-key';
import { FEW_ROWS, redrawEvery_s, timeline } from './timeline-model';
import type { IRow, ITimeline } from './timeline-model';
import { ZOOMS } from './timeline-shapes';
import type { IMark, ISpan, Zoom } from './timeline-shapes';
import { Hatches, hatchOf } from './textures';

interface IProps {
  readonly store: IKiwiStore;
  readonly gpu: IGpu;
  readonly live: boolean;
  readonly zoom_s: Zoom;
  readonly setZoom: (zoom_s: Zoom) => void;
}

/** Pixels: of a row, and of the parts in it (label, bar, strip of marks). */
const ROW = 40;
const LABEL = 16;
const BAR = 13;
const STRIP = LABEL + BAR + 1;
const AXIS = 18;

const ALL_ROWS = 50;

export function Timeline(props: IProps) {
  const { store, gpu, live, zoom_s, setZoom } = props;
  const [all, setAll] = React.useState(false);
  const history_s = store.state?.server.history_s ?? 0;
  const now = useRightEdge(store, zoom_s, live);
  const picture = timeline(gpu, now, zoom_s, history_s, all ? ALL_ROWS : FEW_ROWS);
  return (
    <section className="jp-Kiwi-part">
      <div className="jp-Kiwi-titlebar">
        <h3>{trans.__('Timeline')}</h3>
        <Zooms zoom_s={zoom_s} setZoom={setZoom} />
      </div>
      {picture.rows.length === 0 ? (
        <p className="jp-Kiwi-quiet">{trans.__('Nobody used the GPU in this time.')}</p>
      ) : (
        <>
          <Picture picture={picture} scope={gpu.uuid} />
          <Key names={picture.key} />
        </>
      )}
      {(picture.hidden > 0 || all) && (
        <button type="button" className="jp-Kiwi-button" onClick={() => setAll(!all)}>
          {all
            ? trans.__('Show fewer')
            : trans._n('Show %1 more notebook', 'Show %1 more notebooks', picture.hidden)}
        </button>
      )}
    </section>
  );
}

/** The time at the right edge. It moves by about a pixel at a time. With reduced motion it moves
 * only when there is something new to draw. It does not move while the state is unknown. */
function useRightEdge(store: IKiwiStore, zoom_s: Zoom, live: boolean): number {
  const every_s = redrawEvery_s(zoom_s);
  const still = !live || prefersReducedMotion();
  useTicking(() => (still ? 0 : Math.floor(store.now() / every_s)));
  const edge = React.useRef(store.state?.now ?? store.now());
  if (live) {
    edge.current = store.now();
  }
  return edge.current;
}

function Zooms(props: { zoom_s: Zoom; setZoom: (zoom_s: Zoom) => void }) {
  return (
    <div className="jp-Kiwi-zooms" role="group" aria-label={trans.__('Time shown')}>
      {ZOOMS.map(zoom_s => (
        <button
          key={zoom_s}
          type="button"
          className="jp-Kiwi-button"
          aria-pressed={zoom_s === props.zoom_s}
          title={trans._n('Show the last %1 minute', 'Show the last %1 minutes', zoom_s / 60)}
          onClick={() => props.setZoom(zoom_s)}
        >
          {zoom_s / 60} min
        </button>
      ))}
    </div>
  );
}

function Picture(props: { picture: ITimeline; scope: string }) {
  const { picture, scope } = props;
  const floor = picture.rows.length * ROW;
  const coarse = picture.key.includes('share');
  return (
    <div className="jp-Kiwi-timeline">
      <svg
        data-kiwi="timeline"
        role="img"
        aria-label={picture.text}
        height={floor + AXIS}
        width="100%"
      >
        <Hatches scope={scope} />
        {picture.unrecorded > 0 && (
          <rect className="jp-Kiwi-unrecorded" width={`${picture.unrecorded}%`} height={floor}>
            <title>{trans.__('Nothing is recorded from this time.')}</title>
          </rect>
        )}
        {picture.ticks.map(tick => (
          <g key={tick.key} className="jp-Kiwi-tick">
            <line x1={`${tick.x}%`} x2={`${tick.x}%`} y1={0} y2={floor + 3} />
            <text x={`${tick.x}%`} y={floor + 14} textAnchor="middle">
              {tick.label}
            </text>
          </g>
        ))}
        <g className="jp-Kiwi-tick jp-mod-now">
          <line x1="100%" x2="100%" y1={0} y2={floor + 3} />
          <text x="100%" y={floor + 14} textAnchor="end">
            {trans.__('now')}
          </text>
        </g>
        {picture.rows.map((row, index) => (
          <Row key={row.session} row={row} y={index * ROW} scope={scope} coarse={coarse} />
        ))}
      </svg>
      {picture.rows.map((row, index) => (
        <span
          key={row.session}
          className={row.mine ? 'jp-Kiwi-row-name jp-mod-mine' : 'jp-Kiwi-row-name'}
          style={{ top: index * ROW }}
          aria-hidden="true"
        >
          <CutName name={row.name} />
        </span>
      ))}
    </div>
  );
}

function Row(props: { row: IRow; y: number; scope: string; coarse: boolean }) {
  const { row, y, scope, coarse } = props;
  return (
    <svg y={y} width="100%" height={ROW} data-look={row.look} data-coarse={coarse || undefined}>
      <line className="jp-Kiwi-lane" x1="0" x2="100%" y1={LABEL + BAR} y2={LABEL + BAR} />
      {row.spans.map(span => (
        <Span key={span.key} span={span} row={row} scope={scope} />
      ))}
      {row.marks.map(mark => (
        <Mark key={mark.key} mark={mark} row={row} />
      ))}
    </svg>
  );
}

function Span(props: { span: ISpan; row: IRow; scope: string }) {
  const { span, row, scope } = props;
  const height = BAR * span.share;
  const y = LABEL + BAR * (1 - span.from) - height;
  const place = { x: `${span.x}%`, width: `${span.width}%`, y, height };
  return (
    <g data-kiwi="span" data-kind={span.kind} data-session={row.session} data-share={span.share}>
      <title>{span.title}</title>
      <rect className="jp-Kiwi-span" data-kind={span.kind} data-look={row.look} {...place} />
      {span.kind !== 'held' && <rect fill={hatchOf(span.kind, scope)} {...place} />}
    </g>
  );
}

function Mark(props: { mark: IMark; row: IRow }) {
  const { mark, row } = props;
  const out = mark.direction === 'out';
  return (
    <g
      className={mark.ok ? 'jp-Kiwi-mark' : 'jp-Kiwi-mark jp-mod-failed'}
      data-kiwi="swap"
      data-direction={mark.direction}
      data-session={row.session}
    >
      <title>{mark.title}</title>
      <rect x={`${mark.from}%`} width={`${mark.width}%`} y={STRIP + (out ? 0 : 6)} height="2" />
      <svg x={`${mark.x}%`} y={STRIP} overflow="visible">
        <rect className="jp-Kiwi-target" x="-6" y="-2" width="12" height="12" />
        <path d={out ? 'M-4 1h8l-4 6z' : 'M-4 7h8l-4 -6z'} />
      </svg>
    </g>
  );
}
