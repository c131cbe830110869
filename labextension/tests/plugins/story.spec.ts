import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import type { IStoryLine } from '../../src/model/types';
import { StoryView } from '../../src/plugins/story';
import { gpu, session, state } from '../../stories/make';
import { StillStore } from '../../stories/store';

beforeEach(() => {
  vi.useFakeTimers();
});

afterEach(() => {
  vi.useRealTimers();
});

async function pass(store: StillStore, seconds: number): Promise<void> {
  store.clock += seconds;
  await vi.advanceTimersByTimeAsync(seconds * 1000);
}

describe('what happened to a notebook', () => {
  it('ages while its dialog is open, and is read again when something has changed', async () => {
    const shown = state([gpu({ sessions: [session('a')] })]);
    const store = new StillStore(shown, 'live', 'kernel-a');
    const read = vi.fn(() => Promise.resolve<IStoryLine[]>([{ ago_s: 0.2, text: 'granted' }]));
    const view = new StoryView(store, read, [{ ago_s: 4, text: 'asked' }]);
    const lines = () => [...view.node.querySelectorAll('li')].map(each => each.textContent);
    expect(view.node.querySelector('p')?.textContent).toContain('a cell starts at once');
    expect(lines()).toEqual(['4 s ago: asked']);
    await pass(store, 3);
    expect(lines()).toEqual(['7 s ago: asked']);
    expect(read).not.toHaveBeenCalled();
    store.become({ state: shown });
    await pass(store, 1);
    expect(read).toHaveBeenCalledTimes(1);
    expect(lines()[0]).toContain('granted');
    view.dispose();
    store.become({ state: shown });
    await pass(store, 5);
    expect(read).toHaveBeenCalledTimes(1);
  });

  it('keeps what is known if nothing can be read, and says that nothing happened', async () => {
    const store = new StillStore(state([gpu()]));
    const read = vi.fn(() => Promise.reject(new Error('Gone.')));
    const view = new StoryView(store, read, []);
    expect(view.node.textContent).toContain('Nothing yet.');
    store.become({});
    await pass(store, 2);
    expect(read).toHaveBeenCalled();
    expect(view.node.textContent).toContain('Nothing yet.');
    view.dispose();
  });
});
