/** The key of the timeline: only the marks that it contains. */

import * as React from 'react';

import { trans } from '../model/translation';

import { Hatches, hatchOf } from './textures';
import type { KeyName } from './timeline-model';

const means = (): Readonly<Record<KeyName, string>> => ({
  held: trans.__('has GPU'),
  waited: trans.__('waits'),
  suspended: trans.__('suspended'),
  share: trans.__('share of each 30 s'),
  out: trans.__('paged out'),
  in: trans.__('paged in'),
  failed: trans.__('not moved'),
  unrecorded: trans.__('not recorded')
});

export function Key(props: { names: readonly KeyName[] }) {
  const meanings = means();
  return (
    <ul className="jp-Kiwi-key" aria-hidden="true" data-kiwi="timeline-key">
      {props.names.map(name => (
        <li key={name} data-name={name}>
          <Sample name={name} />
          {meanings[name]}
        </li>
      ))}
    </ul>
  );
}

function Sample(props: { name: KeyName }) {
  const { name } = props;
  switch (name) {
    case 'held':
    case 'waited':
    case 'suspended':
      return <SpanSample kind={name} />;
    case 'share':
      return (
        <svg className="jp-Kiwi-swatch">
          <path className="jp-Kiwi-span" d="M0 12V4h4V12zM4 12V7h4V12zM8 12V1h4V12z" />
        </svg>
      );
    case 'unrecorded':
      return (
        <svg className="jp-Kiwi-swatch">
          <rect className="jp-Kiwi-unrecorded" width="100%" height="100%" />
        </svg>
      );
    default:
      return (
        <svg className={`jp-Kiwi-swatch jp-Kiwi-mark${name === 'failed' ? ' jp-mod-failed' : ''}`}>
          <path d={name === 'in' ? 'M2 9h8l-4 -6z' : 'M2 3h8l-4 6z'} />
        </svg>
      );
  }
}

function SpanSample(props: { kind: 'held' | 'waited' | 'suspended' }) {
  const { kind } = props;
  const scope = `key-${kind}`;
  return (
    <svg className="jp-Kiwi-swatch">
      <Hatches scope={scope} />
      <rect className="jp-Kiwi-span" data-kind={kind} width="100%" height="100%" />
      {kind !== 'held' && <rect fill={hatchOf(kind, scope)} width="100%" height="100%" />}
    </svg>
  );
}
