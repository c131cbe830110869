import { act, cleanup, fireEvent, render, within } from '@testing-library/react';
import * as React from 'react';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import type { IKiwiActions } from '../../src/model/api';
import { OnScreen } from '../../src/panel/hooks';
import { KiwiPanel } from '../../src/panel/index';
import { GIB, NOW, did, gpu, session, state, waits } from '../../stories/make';
import { STORIES } from '../../stories/states';
import { StillStore } from '../../stories/store';

function actions(): { [Name in keyof IKiwiActions]: ReturnType<typeof vi.fn> } {
  const done = () => vi.fn(() => Promise.resolve());
  return { open: done(), set: done(), release: done(), leave: done(), retry: done() };
}

/** The library's own `screen` keeps the document of whichever file has imported it first. */
const page = () => within(document.body);

function hook(name: string): HTMLElement {
  const found = document.querySelector<HTMLElement>(`[data-kiwi="${name}"]`);
  if (found === null) {
    throw new Error(`There is no data-kiwi="${name}"`);
  }
  return found;
}

const hooks = (name: string) => [...document.querySelectorAll(`[data-kiwi="${name}"]`)];

function waiting(wait_s: number | null = 62) {
  return state([
    gpu({
      sessions: [
        session('a', { state: 'running', turn_ends_at: NOW + 21 }),
        session('b', { state: 'waiting' })
      ],
      holders: ['a'],
      queue: [waits('b', 1, wait_s)],
      history: [did(session('a'), 'held', 9, null)]
    })
  ]);
}

beforeEach(() => {
  vi.useFakeTimers();
  window.localStorage.clear();
});

afterEach(() => {
  cleanup();
  vi.useRealTimers();
});

function pass(store: StillStore, seconds: number): void {
  store.clock += seconds;
  act(() => {
    vi.advanceTimersByTime(seconds * 1000);
  });
}

async function settle(): Promise<void> {
  await act(async () => {
    await vi.advanceTimersByTimeAsync(0);
  });
}

describe('the panel', () => {
  it.each(Object.keys(STORIES))('shows the story "%s" without a complaint of React', name => {
    const complain = vi.spyOn(console, 'error');
    const story = STORIES[name];
    const store = new StillStore(story?.state ?? null, story?.connection, story?.currentKernel);
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hooks('gpu')).toHaveLength(story?.state?.gpus.length ?? 0);
    expect(complain).not.toHaveBeenCalled();
    complain.mockRestore();
  });

  it('counts down the wait and the turn by itself', () => {
    const store = new StillStore(waiting(), 'live', 'kernel-b');
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('countdown').textContent).toBe('about 62 s');
    expect(hook('holder').textContent).toContain('at most 21 s more');
    pass(store, 2);
    expect(hook('countdown').textContent).toBe('about 60 s');
    expect(hook('holder').textContent).toContain('at most 19 s more');
  });

  it('says that the length of the wait is unknown', () => {
    const store = new StillStore(waiting(null), 'live', 'kernel-b');
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('countdown').textContent).toBe('Waiting');
    expect(hook('my-wait').textContent).not.toContain('WaitingWaiting');
    // It shows only the place of the notebook above: each figure appears once.
    expect(hook('queue-entry').textContent).toBe('1b.ipynbthis one');
  });

  it('follows the model, and announces the turn', () => {
    const store = new StillStore(waiting(), 'live', 'kernel-b');
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('announcer').textContent).toBe('');
    const done = gpu({
      sessions: [session('a'), session('b', { state: 'running' })],
      holders: ['b']
    });
    act(() => store.become({ state: state([done]) }));
    expect(hook('my-wait').textContent).toContain('Has the GPU');
    expect(hook('announcer').textContent).toBe('b.ipynb: your turn on GPU 0.');
    act(() => void vi.advanceTimersByTime(10_000));
    expect(hook('announcer').textContent).toBe('');
  });

  it('does nothing while it is hidden, and is up to date when it is visible again', () => {
    const store = new StillStore(waiting(), 'live', 'kernel-b');
    const panel = (shown: boolean) => (
      <OnScreen.Provider value={shown}>
        <KiwiPanel store={store} actions={actions()} />
      </OnScreen.Provider>
    );
    const { rerender } = render(panel(true));
    rerender(panel(false));
    expect(vi.getTimerCount()).toBe(0);
    act(() => store.become({ state: state([gpu({ sessions: [session('b')] })]) }));
    expect(hook('my-wait').textContent).toContain('about 62 s');
    rerender(panel(true));
    expect(hook('my-wait').textContent).toContain('Free');
  });

  it('opens the notebook whose name is clicked, if it is the reader’s own', () => {
    const does = actions();
    const sessions = [session('a'), session('x', { mine: false })];
    render(<KiwiPanel store={new StillStore(state([gpu({ sessions })]))} actions={does} />);
    fireEvent.click(within(hook('resting')).getByRole('button', { name: 'a.ipynb' }));
    expect(does.open).toHaveBeenCalledWith(sessions[0]);
    expect(page().queryByRole('button', { name: 'another user' })).toBeNull();
  });

  it('stops counting when the daemon is away or the stream is lost', () => {
    const away = waiting().gpus.map(each => ({ ...each, reachable: false }));
    const store = new StillStore(state(away), 'live', 'kernel-b');
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('my-wait').textContent).toContain('Not up to date');
    expect(hook('problem').textContent).toContain('comes back by itself');
    expect(hooks('retry')).toHaveLength(0);
    expect(hooks('tq')).toHaveLength(0);
    act(() => store.become({ state: waiting(), connection: 'lost' }));
    expect(hook('my-wait').textContent).toContain('Not up to date');
    expect(hook('problem').textContent).toContain('was lost');
    act(() => store.become({ connection: 'live' }));
    expect(hook('countdown').textContent).toBe('about 62 s');
    expect(hooks('problem')).toHaveLength(0);
  });

  it('continues the timeline as time passes, and stops if the state is unknown', () => {
    const store = new StillStore(waiting(), 'live', 'kernel-b');
    render(<KiwiPanel store={store} actions={actions()} />);
    const width = () => hook('span').querySelector('rect')?.getAttribute('width');
    expect(width()).toBe('3%');
    pass(store, 6);
    expect(width()).toBe('5%');
    act(() => store.become({ connection: 'lost' }));
    pass(store, 60);
    expect(width()).toBe('5%');
  });

  it('moves nothing by itself with reduced motion, but draws what is new', () => {
    vi.stubGlobal('matchMedia', (query: string) => ({ matches: query.includes('reduce') }));
    const store = new StillStore(waiting(), 'live', 'kernel-b');
    render(<KiwiPanel store={store} actions={actions()} />);
    const width = () => hook('span').querySelector('rect')?.getAttribute('width');
    pass(store, 30);
    expect(width()).toBe('3%');
    expect(hook('countdown').textContent).toBe('about 32 s');
    act(() => store.become({ state: waiting() }));
    expect(width()).toBe('13%');
    vi.unstubAllGlobals();
  });

  it('remembers the zoom', () => {
    const store = new StillStore(waiting());
    const first = render(<KiwiPanel store={store} actions={actions()} />);
    const pressed = () => page().getByRole('button', { pressed: true }).textContent;
    expect(pressed()).toBe('5 min');
    fireEvent.click(page().getByRole('button', { name: '30 min' }));
    first.unmount();
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(pressed()).toBe('30 min');
  });

  it('moves between the notebooks of the queue with the arrow keys', () => {
    const sessions = ['a', 'b', 'c'].map(id => session(id, { state: 'suspended' }));
    const queue = sessions.map((each, index) => waits(each.id, index + 1, 9));
    render(
      <KiwiPanel store={new StillStore(state([gpu({ sessions, queue })]))} actions={actions()} />
    );
    const buttons = within(hook('queue')).getAllByRole('button');
    expect(buttons.map(button => button.tabIndex)).toEqual([0, -1, -1]);
    buttons[0]?.focus();
    fireEvent.keyDown(hook('queue'), { key: 'ArrowDown' });
    expect(document.activeElement).toBe(buttons[1]);
    fireEvent.keyDown(hook('queue'), { key: 'End' });
    expect(document.activeElement).toBe(buttons[2]);
    expect(buttons.map(button => button.tabIndex)).toEqual([-1, -1, 0]);
  });

  it('lets own cells that have not begun leave the queue, each by one button', async () => {
    const sessions = [
      session('a', { state: 'waiting' }),
      session('b', { state: 'waiting' }),
      session('c', { state: 'suspended' }),
      session('x', { state: 'waiting', mine: false })
    ];
    const queue = sessions.map((each, index) => waits(each.id, index + 1, 9));
    const does = actions();
    const shown = gpu({ sessions, queue });
    const store = new StillStore(state([shown]), 'live', 'kernel-a');
    render(<KiwiPanel store={store} actions={does} />);
    const names = hooks('leave-queue').map(each => each.getAttribute('aria-label'));
    expect(names).toEqual(['Leave the line with a.ipynb', 'Leave the line with b.ipynb']);
    does.leave.mockRejectedValueOnce(new Error('No such kernel.'));
    fireEvent.click(within(hook('my-wait')).getByRole('button', { name: /Leave the line/ }));
    expect(does.leave).toHaveBeenCalledWith({ gpu: shown, session: sessions[0] });
    await settle();
    expect(
      page()
        .getAllByRole('alert')
        .map(each => each.textContent)
    ).toContain('No such kernel.');
  });
});

describe('the queue', () => {
  it('shows the first places and own ones; the others are collapsed', () => {
    const story = STORIES['crowd'];
    const store = new StillStore(story?.state ?? null, 'live');
    render(<KiwiPanel store={store} actions={actions()} />);
    const places = [...hook('queue').querySelectorAll('.jp-Kiwi-place')];
    expect(places.map(each => each.textContent)).toEqual(['1', '2', '3', '4', '5', '7']);
    expect(page().getByText('3 more wait')).toBeTruthy();
  });

  it('says once for each move whose memory moves', () => {
    const story = STORIES['mid-swap'];
    const store = new StillStore(story?.state ?? null, 'live', 'kernel-explore');
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('my-wait').textContent).toContain('The memory of train.ipynb is paging out');
    expect(hook('queue').textContent).not.toContain('paging');
    cleanup();
    store.become({ currentKernel: 'kernel-train' });
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('my-wait').textContent).toContain('Its memory is paging out to make room');
  });

  it('cuts a long name in its middle, and says it whole to a screen reader', () => {
    const name = 'finetune-llama-70b-fold1.ipynb';
    const shown = gpu({ sessions: [session('a', { name, path: name })] });
    render(<KiwiPanel store={new StillStore(state([shown]))} actions={actions()} />);
    const button = within(hook('resting')).getByRole('button', { name });
    expect(button.title).toBe(`Open ${name}`);
    expect(button.querySelector('.jp-Kiwi-cut')?.textContent).toBe(name);
    expect(button.querySelector('.jp-Kiwi-cut-start')?.textContent).toBe(name.slice(0, -9));
  });
});

describe('a missing daemon', () => {
  it('gives a plain notice at first, and later says what to do', () => {
    const away = state([{ ...gpu(), reachable: false }]);
    const store = new StillStore(away);
    render(<KiwiPanel store={store} actions={actions()} />);
    expect(hook('problem').className).toContain('jp-mod-calm');
    pass(store, 61);
    expect(hook('problem').dataset['code']).toBe('daemon-gone');
    expect(hook('problem').className).not.toContain('jp-mod-calm');
    expect(hooks('retry')).toHaveLength(1);
    act(() => store.become({ state: state([gpu()]) }));
    expect(hooks('problem')).toHaveLength(0);
    act(() => store.become({ state: away }));
    expect(hook('problem').dataset['code']).toBe('daemon-away');
  });

  it('gives only a remark on a machine without a GPU', () => {
    const story = STORIES['no-gpu'];
    render(<KiwiPanel store={new StillStore(story?.state ?? null)} actions={actions()} />);
    expect(hook('problem').className).toContain('jp-mod-quiet');
    expect(hooks('retry')).toHaveLength(0);
  });
});

describe('what happened', () => {
  it('is listed in words, the latest first, and updated each second', () => {
    const story = STORIES['two-waiting'];
    const store = new StillStore(story?.state ?? null, 'live', 'kernel-explore');
    render(<KiwiPanel store={store} actions={actions()} />);
    const lines = () =>
      [...hook('what-happened').querySelectorAll('li')].map(each => each.textContent ?? '');
    expect(lines()).toHaveLength(3);
    expect(lines()[0]).toContain('explore.ipynb waits for the GPU for 4 s');
    pass(store, 2);
    expect(lines()[0]).toContain('explore.ipynb waits for the GPU for 6 s');
  });
});

describe('settings', () => {
  const show = (does: ReturnType<typeof actions>, changes = {}) => {
    const store = new StillStore(state([gpu(changes)]));
    render(<KiwiPanel store={store} actions={does} />);
    return store;
  };
  const type = (text: string) => fireEvent.change(hook('tq'), { target: { value: text } });
  const submit = () => fireEvent.submit(hook('tq').closest('form') as HTMLFormElement);

  it('are sent when applied, and shown as in force afterwards', async () => {
    const does = actions();
    const store = show(does);
    type('10');
    submit();
    expect(does.set).toHaveBeenCalledWith(store.state?.gpus[0], { tq_s: 10 });
    expect(hook('apply').textContent).toBe('Applying…');
    await settle();
    const now = { ...gpu().scheduler, tq_s: 10 };
    act(() => store.become({ state: state([gpu({ scheduler: now })]) }));
    expect((hook('tq') as HTMLInputElement).value).toBe('10');
    expect(hooks('apply')).toHaveLength(0);
  });

  it('that are changed while others are being sent are kept', async () => {
    const does = actions();
    show(does);
    type('10');
    submit();
    fireEvent.change(hook('mode'), { target: { value: 'always' } });
    await settle();
    expect((hook('tq') as HTMLInputElement).value).toBe('30');
    expect((hook('mode') as HTMLSelectElement).value).toBe('always');
    submit();
    expect(does.set.mock.calls.map(call => call[1])).toEqual([
      { tq_s: 10 },
      { anti_thrash: 'always' }
    ]);
  });

  it('with invalid values are not sent', () => {
    const does = actions();
    show(does);
    type('0');
    submit();
    expect(does.set).not.toHaveBeenCalled();
    expect(hook('tq').getAttribute('aria-invalid')).toBe('true');
    const message = hook('tq-error');
    expect(message.textContent).toContain('0.1 s');
    expect(message.closest('.jp-Kiwi-field')).toBe(hook('tq').closest('.jp-Kiwi-field'));
    expect(hook('tq').getAttribute('aria-describedby')).toBe(message.id);
  });

  it('that were refused show the reason, and stay as typed', async () => {
    const does = actions();
    does.set.mockRejectedValueOnce(new Error('You may not change this. Ask the owner.'));
    show(does);
    fireEvent.change(hook('mode'), { target: { value: 'off' } });
    submit();
    await settle();
    expect(hook('set-error').textContent).toBe('You may not change this. Ask the owner.');
    expect((hook('mode') as HTMLSelectElement).value).toBe('off');
  });

  it('explain a policy before it is applied', async () => {
    const does = actions();
    const store = show(does);
    const policy = hook('policy') as HTMLSelectElement;
    const explained = () =>
      document.getElementById(policy.getAttribute('aria-describedby') ?? '')?.textContent;
    expect([...policy.options].map(option => option.value)).toEqual(['round-robin', 'interactive']);
    expect(policy.labels?.[0]?.textContent).toBe('Policy');
    expect(explained()).toContain('whole turn');
    fireEvent.change(policy, { target: { value: 'interactive' } });
    expect(explained()).toContain('make way');
    expect(does.set).not.toHaveBeenCalled();
    submit();
    expect(does.set).toHaveBeenCalledWith(store.state?.gpus[0], { policy: 'interactive' });
    await settle();
    const now = { ...gpu().scheduler, policy: 'interactive' };
    act(() => store.become({ state: state([gpu({ scheduler: now })]) }));
    expect(policy.value).toBe('interactive');
    expect(hooks('apply')).toHaveLength(0);
  });

  it('offer no policy if the daemon reports none', () => {
    show(actions(), { policies: [] });
    expect(hooks('policy')).toHaveLength(0);
    expect(hooks('mode')).toHaveLength(1);
  });

  it('follow what others set, unless the user is changing them', () => {
    const store = show(actions());
    const set = (tq_s: number) =>
      act(() => store.become({ state: state([gpu({ scheduler: { ...gpu().scheduler, tq_s } })]) }));
    set(20);
    expect((hook('tq') as HTMLInputElement).value).toBe('20');
    type('7');
    set(15);
    expect((hook('tq') as HTMLInputElement).value).toBe('7');
  });

  it('are plain text for users who may not change them', () => {
    show(actions(), { may_set: false });
    expect([...hooks('tq'), ...hooks('policy')]).toHaveLength(0);
    expect(page().getByText(/Quantum: 30 s.*whole turn/)).toBeTruthy();
  });
});

describe('releasing memory', () => {
  const sessions = [
    session('mine', { resident_bytes: GIB }),
    session('empty'),
    session('out', { state: 'paged-out', paged_out_bytes: GIB }),
    session('x', { mine: false, resident_bytes: GIB })
  ];

  it('is offered for own idle memory only', () => {
    render(<KiwiPanel store={new StillStore(state([gpu({ sessions })]))} actions={actions()} />);
    expect(hooks('release').map(button => button.getAttribute('aria-label'))).toEqual([
      'Release to RAM: the memory of mine.ipynb'
    ]);
  });

  it('says when it failed', async () => {
    const does = actions();
    does.release.mockRejectedValueOnce(new Error('It is in a burst.'));
    render(<KiwiPanel store={new StillStore(state([gpu({ sessions })]))} actions={does} />);
    fireEvent.click(hook('release'));
    expect(does.release.mock.calls[0]?.[0]).toMatchObject({ session: { id: 'mine' } });
    await settle();
    expect(hook('resting').textContent).toContain('It is in a burst.');
  });
});

describe('problems', () => {
  it('say what to do, with a button to try again', async () => {
    const does = actions();
    does.retry.mockRejectedValueOnce(new Error('Still no daemon.'));
    const problem = { code: 'start-failed', message: 'No daemon.', remedy: 'Run `kiwi doctor`.' };
    render(<KiwiPanel store={new StillStore(state([], problem))} actions={does} />);
    expect(hook('problem').querySelector('code')?.textContent).toBe('kiwi doctor');
    fireEvent.click(hook('retry'));
    await settle();
    expect(hook('problem').textContent).toContain('Still no daemon.');
  });

  it('have no button to try again if that would be useless', () => {
    const problem = { code: 'disabled', message: 'Kiwi is switched off here.', remedy: '' };
    render(<KiwiPanel store={new StillStore(state([gpu()], problem))} actions={actions()} />);
    expect(hook('problem').textContent).toContain('switched off');
    expect(document.querySelector('[data-kiwi=gpu]')).not.toBeNull();
    expect(document.querySelector('[data-kiwi=retry]')).toBeNull();
  });
});
