/** Names that may be too long for the sidebar: the middle is cut, start and end stay. */

import * as React from 'react';

import { cutInTwo } from './people';

/** Shows `run-2026…-v2.ipynb`. A screen reader says the whole name; the tooltip is the caller's. */
export function CutName(props: { name: string }) {
  const [start, end] = cutInTwo(props.name);
  if (end === '') {
    return <>{start}</>;
  }
  return (
    <>
      <span className="jp-Kiwi-cut" aria-hidden="true">
        <span className="jp-Kiwi-cut-start">{start}</span>
        <span>{end}</span>
      </span>
      <span className="jp-Kiwi-hidden">{props.name}</span>
    </>
  );
}
