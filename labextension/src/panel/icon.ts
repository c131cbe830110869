import { LabIcon } from '@jupyterlab/ui-components';

/** Seeds around the core, like the hours of a clock. */
const SEEDS = [0, 45, 90, 135, 180, 225, 270, 315]
  .map(angle => `<ellipse cx="12" cy="6.9" rx=".85" ry="1.5" transform="rotate(${angle} 12 12)"/>`)
  .join('');

/** A slice of a kiwi: the skin, seeds, the core. It has the theme's colour for icons. */
const SLICE = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <path d="M12 1.5a10.5 10.5 0 1 0 0 21 10.5 10.5 0 0 0 0-21zm0 2a8.5 8.5 0 1 1 0 17 8.5 8.5 0 0 1 0-17z"/>
    ${SEEDS}
    <ellipse cx="12" cy="12" rx="2.9" ry="2.2"/>
  </g>
</svg>`;

export const kiwiIcon = new LabIcon({ name: 'kiwi-jupyter:slice', svgstr: SLICE });
