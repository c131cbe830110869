import { Title, Widget } from '@lumino/widgets';
import { afterEach, describe, expect, it, vi } from 'vitest';

import { Signal } from '@lumino/signaling';

import { KiwiStore } from '../../src/model/store';
import type { IGpu } from '../../src/model/types';
import { canRelease } from '../../src/plugins/commands';
import { bringBack } from '../../src/plugins/hint';
import { isWorthIt, notifications } from '../../src/plugins/notifications';
import { KiwiSettings } from '../../src/plugins/settings';
import { StatusItem } from '../../src/plugins/statusbar';
import { markTab } from '../../src/plugins/tabs';
import type { IKiwi } from '../../src/plugins/token';
import { gpu, session, state, waits } from '../states';

function storeOf(gpus: readonly IGpu[], kernel: string | null = 'k-s1'): KiwiStore {
  const store = new KiwiStore();
  store.receive({ type: 'snapshot', ...state(gpus) });
  store.setConnection('live');
  store.currentKernel = kernel;
  return store;
}

afterEach(() => {
  vi.useRealTimers();
});

describe('the status-bar item', () => {
  it('appears with the first GPU, has a label for screen readers, and opens the panel', () => {
    const store = new KiwiStore();
    let opened = 0;
    let appeared = 0;
    const item = new StatusItem(store, () => (opened += 1));
    item.appeared.connect(() => (appeared += 1));
    const button = item.node.querySelector('button');
    expect(item.status).toBeNull();
    store.receive({ type: 'snapshot', ...state() });
    expect(appeared).toBe(1);
    expect(button?.textContent).toBe('Emulated GPU: free');
    expect(button?.getAttribute('aria-label')).toMatch(/^Emulated GPU: free\. .*Open Kiwi\.$/);
    expect(button?.dataset.kiwi).toBe('status-item');
    button?.click();
    expect(opened).toBe(1);
    store.receive({ type: 'snapshot', ...state([]) });
    expect(appeared).toBe(2);
    expect(item.status).toBeNull();
    item.dispose();
  });

  it('counts down by itself while it waits, and only then', () => {
    vi.useFakeTimers();
    const waiting = gpu({
      sessions: [session({ state: 'waiting' })],
      queue: [waits('s1', { expected_at: 1012 })],
      holders: ['s2']
    });
    const store = storeOf([waiting]);
    const item = new StatusItem(store, () => undefined);
    expect(item.node.textContent).toBe('Emulated GPU: 1st, about 12 s');
    vi.advanceTimersByTime(5000);
    expect(item.node.textContent).toBe('Emulated GPU: 1st, about 7 s');
    store.receive({ type: 'snapshot', ...state() });
    expect(item.node.textContent).toBe('Emulated GPU: free');
    expect(vi.getTimerCount()).toBe(0);
    item.dispose();
  });
});

describe('a tab', () => {
  const title = () =>
    new Title<Widget>({
      owner: new Widget(),
      caption: 'Name: a.ipynb',
      className: 'mine',
      dataset: { id: '7' }
    });

  it('shows that its notebook waits, and nothing otherwise', () => {
    const tab = title();
    markTab(tab, '2nd in line');
    expect(tab.className).toBe('mine jp-mod-kiwiWaiting');
    expect(tab.caption).toBe('Name: a.ipynb\nWaits for the GPU: 2nd in line');
    expect(tab.dataset).toEqual({ id: '7', kiwi: 'waiting' });
    markTab(tab, '1st in line');
    expect(tab.className).toBe('mine jp-mod-kiwiWaiting');
    expect(tab.caption).toBe('Name: a.ipynb\nWaits for the GPU: 1st in line');
    markTab(tab, null);
    expect([tab.className, tab.caption]).toEqual(['mine', 'Name: a.ipynb']);
    expect(tab.dataset).toEqual({ id: '7' });
  });

  it('is drawn again only when something changed', () => {
    const tab = title();
    let changes = 0;
    tab.changed.connect(() => (changes += 1));
    markTab(tab, null);
    expect(changes).toBe(0);
    markTab(tab, '2nd in line');
    const marked = changes;
    markTab(tab, '2nd in line');
    expect(changes).toBe(marked);
  });
});

describe('a notification', () => {
  const settings = (values: object) => {
    const all: Record<string, unknown> = { notify: true, notifyAfterSeconds: 30, ...values };
    return { get: (key: string) => all[key] } as unknown as KiwiSettings;
  };
  const wait = (waited_s: number) => ({ place: { gpu: gpu(), session: session() }, waited_s });

  it('is worth showing after a long wait that the user did not watch', () => {
    const away = storeOf([gpu()], 'k-other');
    expect(isWorthIt(wait(30), { store: away, settings: settings({}) })).toBe(true);
    expect(isWorthIt(wait(29), { store: away, settings: settings({}) })).toBe(false);
    expect(isWorthIt(wait(90), { store: away, settings: settings({ notify: false }) })).toBe(false);
    const watched = storeOf([gpu()], 'k-s1');
    expect(isWorthIt(wait(90), { store: watched, settings: settings({}) })).toBe(false);
  });

  it('is off until the user switches it on', () => {
    expect(new KiwiSettings().get('notify')).toBe(false);
  });

  it.each(['granted', 'default', 'denied'])(
    'is shown if the browser permits it: %s',
    permission => {
      const shown: Shown[] = [];
      class Shown {
        static permission = permission;
        onclick?: () => void;
        close = vi.fn();
        constructor(
          readonly title: string,
          readonly options: NotificationOptions
        ) {
          shown.push(this);
        }
      }
      vi.stubGlobal('Notification', Shown);
      vi.spyOn(window, 'focus').mockImplementation(() => undefined);
      const waiting = { sessions: [session({ state: 'waiting' as const })], queue: [waits('s1')] };
      const store = storeOf([gpu(waiting)], 'k-other');
      const open = vi.fn(() => Promise.resolve());
      const kiwi = { store, actions: { open }, settings: settings({}) };
      Object.assign(kiwi.settings, { changed: new Signal({}) });
      const app = { commands: { addCommand: vi.fn() } };
      void notifications.activate(app as never, kiwi as unknown as IKiwi, null as never);
      store.receive({ type: 'snapshot', ...state([gpu(waiting)]) });
      expect(shown).toEqual([]);
      const has = gpu({ sessions: [session({ state: 'running' })], holders: ['s1'] });
      store.receive({ type: 'snapshot', ...state([has], { now: 1042 }) });
      expect(shown.map(each => each.title)).toEqual(
        permission === 'granted' ? ['s1.ipynb has the GPU'] : []
      );
      shown[0]?.onclick?.();
      expect(open).toHaveBeenCalledTimes(shown.length);
      expect(shown.map(each => each.options.body)).toEqual(shown.map(() => 'It waited 42 s.'));
      vi.unstubAllGlobals();
    }
  );
});

describe('moving memory out', () => {
  it.each([
    ['idle with memory', session(), gpu(), true],
    ['idle and still holding', session(), gpu({ holders: ['s1'] }), true],
    ['idle without memory', session({ resident_bytes: 0 }), gpu(), false],
    ['running', session({ state: 'running' }), gpu({ holders: ['s1'] }), false],
    ['waiting', session({ state: 'waiting' }), gpu({ queue: [waits('s1')] }), false],
    ['without a daemon', session(), gpu({ reachable: false }), false]
  ])('is possible or not: %s', (_, own, card, possible) => {
    expect(canRelease({ session: own, gpu: card })).toBe(possible);
  });
});

describe('bringing back', () => {
  function running(kernel: string | null, values: object = {}) {
    const out = session({ state: 'paged-out' });
    const store = storeOf([gpu({ sessions: [out] })], null);
    const asked: string[] = [];
    const widget = new Widget();
    document.body.appendChild(widget.node);
    const kiwi = {
      store,
      rest: {
        bringBack: (_gpu: string, id: string) => {
          asked.push(id);
          return Promise.resolve({ begun: true, why: '' });
        }
      },
      documents: { current: { widget, kernel } },
      settings: {
        get: (key: string) => ({ bringBack: true, ...values })[key],
        changed: new Signal({})
      }
    } as unknown as IKiwi;
    void bringBack.activate({} as never, kiwi);
    store.currentKernel = kernel;
    return { asked, store, widget };
  }

  it('is requested when the notebook comes to the front', () => {
    expect(running('k-s1').asked).toEqual(['s1']);
    expect(running('k-other').asked).toEqual([]);
  });

  it('is requested when the user types in the notebook, not elsewhere', () => {
    const { asked, store, widget } = running('k-s1');
    const busy = gpu({ sessions: [session({ state: 'idle' })] });
    store.receive({ type: 'snapshot', ...state([busy]) });
    // Later it is out again, and no user has looked at it.
    const out = gpu({ sessions: [session({ state: 'paged-out' })] });
    store.receive({ type: 'snapshot', ...state([out], { now: 1100 }) });
    expect(asked).toEqual(['s1']);
    document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'a', bubbles: true }));
    expect(asked).toEqual(['s1']);
    widget.node.dispatchEvent(new KeyboardEvent('keydown', { key: 'a', bubbles: true }));
    expect(asked).toEqual(['s1', 's1']);
  });

  it('is not requested if it is switched off', () => {
    expect(running('k-s1', { bringBack: false }).asked).toEqual([]);
  });
});
