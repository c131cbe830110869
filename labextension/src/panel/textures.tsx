/** SVG patterns, which tell notebooks and states apart where colour does not. */

import * as React from 'react';

type Look = number | string;

/** Drawn over a notebook's colour, by look. null: the plain colour. Diagonals are the timeline's. */
const TEXTURES: Readonly<Record<Look, React.ReactElement | null>> = {
  0: null,
  1: <circle cx="3" cy="3" r="1.2" />,
  2: <path d="M0 1h6M0 4h6" />,
  3: <path d="M1 0v6M4 0v6" />,
  4: <path d="M0 3h6M3 0v6" />,
  5: <path d="M1.5 1.5h3v3h-3z" />,
  outside: <path d="M0 0l6 6M6 0l-6 6" />
};

function idOf(look: Look, scope: string): string {
  return `kiwi-texture-${scope.replace(/[^\w-]/g, '_')}-${look}`;
}

export function textureOf(look: Look, scope: string): string | null {
  return TEXTURES[look] ? `url(#${idOf(look, scope)})` : null;
}

/** The definitions; `scope` keeps the ids of several pictures on one page apart. */
export function Textures(props: { scope: string; looks: readonly Look[] }) {
  return (
    <defs>
      {[...new Set(props.looks)].map(look => {
        const texture = TEXTURES[look];
        return texture ? (
          <pattern
            key={look}
            id={idOf(look, props.scope)}
            className="jp-Kiwi-texture"
            width="6"
            height="6"
            patternUnits="userSpaceOnUse"
          >
            {texture}
          </pattern>
        ) : null;
      })}
    </defs>
  );
}

/** Diagonals of the timeline: rising for a wait, falling and dense for a suspension. */
export function Hatches(props: { scope: string }) {
  return (
    <defs>
      <pattern
        id={idOf('waited', props.scope)}
        className="jp-Kiwi-hatch"
        width="6"
        height="6"
        patternUnits="userSpaceOnUse"
      >
        <path d="M-1 1l2-2M0 6l6-6M5 7l2-2" />
      </pattern>
      <pattern
        id={idOf('suspended', props.scope)}
        className="jp-Kiwi-hatch jp-mod-dense"
        width="4"
        height="4"
        patternUnits="userSpaceOnUse"
      >
        <path d="M-1 3l2 2M0 0l4 4M3 -1l2 2" />
      </pattern>
    </defs>
  );
}

export function hatchOf(kind: 'waited' | 'suspended', scope: string): string {
  return `url(#${idOf(kind, scope)})`;
}
