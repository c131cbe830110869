/** Mounts one story: `?story=two-waiting`. What tools/stories.py photographs. */

import * as React from 'react';
import { createRoot } from 'react-dom/client';

import { KiwiPanel } from '../src/panel/index';

import '@jupyterlab/apputils/style/materialcolors.css';
import '../style/base.css';

import { STORIES } from './states';
import { NO_ACTIONS, StillStore } from './store';

const query = new URLSearchParams(window.location.search);
const story = STORIES[query.get('story') ?? 'idle'];
const root = document.getElementById('root');
if (story === undefined || root === null) {
  throw new Error(`There is no such story; there are: ${Object.keys(STORIES).join(', ')}`);
}
const store = new StillStore(story.state, story.connection, story.currentKernel ?? null);
createRoot(root).render(
  <React.StrictMode>
    <KiwiPanel store={store} actions={NO_ACTIONS} zoom_s={story.zoom_s} />
  </React.StrictMode>
);
