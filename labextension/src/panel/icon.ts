import { LabIcon } from '@jupyterlab/ui-components';

/** A slice of a kiwi: the skin, the core, seeds around it. Takes the theme's icon colour. */
const SLICE = `<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">
  <g class="jp-icon3" fill="#616161">
    <path d="M12 2a10 10 0 1 0 0 20 10 10 0 0 0 0-20zm0 2a8 8 0 1 1 0 16 8 8 0 0 1 0-16z"/>
    <ellipse cx="12" cy="12" rx="2.6" ry="2.1"/>
    <path d="M11.3 5.6h1.4l-.7 2.6zM11.3 18.4h1.4l-.7-2.6zM5.6 11.3v1.4l2.6-.7zM18.4 11.3v1.4l-2.6-.7z"/>
    <path d="M7 8l1-1 1.3 2.3zM17 8l-1-1-1.3 2.3zM7 16l1 1 1.3-2.3zM17 16l-1 1-1.3-2.3z"/>
  </g>
</svg>`;

export const kiwiIcon = new LabIcon({ name: 'kiwi-jupyter:slice', svgstr: SLICE });
