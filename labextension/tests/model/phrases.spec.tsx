import { readFileSync } from 'node:fs';

import { cleanup, render } from '@testing-library/react';
import * as React from 'react';
import { afterEach, describe, expect, it } from 'vitest';

import { ownPlacesOn, subjectOf } from '../../src/model/find';
import { statusOf } from '../../src/model/status';
import { loads, keepsText, turnText, waitText } from '../../src/model/phrases';
import type { IGauges, IGpu, IWaiter, ISession } from '../../src/model/types';
import { KiwiPanel } from '../../src/panel/index';
import { NOW, gpu, session, state, waits } from '../../stories/make';
import { NO_ACTIONS, StillStore } from '../../stories/store';

interface ICase {
  readonly about: string;
  readonly gpu: Pick<IGpu, 'holders'> & {
    readonly serialised: boolean;
    readonly gauges?: Partial<IGauges>;
    readonly queue: readonly (Partial<IWaiter> & {
      readonly expected_low_s?: number;
      readonly expected_high_s?: number;
    })[];
  };
  /** How hard the GPU works. */
  readonly load?: string;
  readonly sessions: Readonly<Record<string, Partial<ISession>>>;
  readonly turns: Readonly<Record<string, string>>;
  readonly keeps?: Readonly<Record<string, string>>;
  readonly waits: Readonly<Record<string, string>>;
  /** By the notebook in front ('': none): the status bar's text, then the sidebar's. */
  readonly places: Readonly<Record<string, readonly [string, ...string[]]>>;
}

const CASES = JSON.parse(readFileSync('../tests/support/surface_words.json', 'utf-8')) as ICase[];
const after = (seconds?: number | null) => (typeof seconds === 'number' ? NOW + seconds : null);

/** Makes a GPU as kiwi_jupyter/server_ext/to_rest.py does. */
function gpuOf({ gpu: { holders, serialised, queue, gauges }, sessions }: ICase): IGpu {
  const plain = gpu();
  return gpu({
    holders,
    gauges: { ...plain.gauges, ...gauges },
    scheduler: { ...plain.scheduler, serialised },
    queue: queue.map(({ session: id = '', position = 0, ...fields }) => ({
      ...waits(id, position, fields.expected_wait_s ?? null),
      ...fields,
      expected_low_at: after(fields.expected_low_s),
      expected_high_at: after(fields.expected_high_s)
    })),
    sessions: Object.entries(sessions).map(([id, fields]) =>
      session(id, {
        ...fields,
        turn_ends_at: after(fields.time_left_s),
        keeps_until: after(fields.keeps_s)
      })
    )
  });
}

afterEach(cleanup);

describe('the texts of every surface', () => {
  it.each(CASES)('$about', one => {
    const shared = gpuOf(one);
    const store = new StillStore(state([shared]));
    const byId = new Map(shared.sessions.map(each => [each.id, each]));
    const load = loads(shared.gauges).map(each => each.text);
    expect(load.join(', ')).toBe(one.load ?? '');
    for (const [id, words] of Object.entries(one.turns)) {
      expect(turnText(shared, byId.get(id) ?? session(id), NOW)).toBe(words);
    }
    const kept = Object.entries(one.keeps ?? {});
    for (const [id, words] of kept) {
      expect(keepsText(byId.get(id) ?? session(id), NOW)).toBe(words);
    }
    for (const entry of shared.queue) {
      expect(waitText(store, entry)).toBe(one.waits[entry.session]);
    }
    for (const [front, [bar, ...card]] of Object.entries(one.places)) {
      const kernel = front === '' ? null : `kernel-${front}`;
      const seen = new StillStore(state([shared]), 'live', kernel);
      expect(statusOf(seen)?.text).toBe(bar);
      const { container, unmount } = render(<KiwiPanel store={seen} actions={NO_ACTIONS} />);
      const texts = (hook: string) =>
        [...container.querySelectorAll(`[data-kiwi="${hook}"]`)].map(each => each.textContent);
      for (const words of card) {
        expect(texts('my-wait').join()).toContain(words);
      }
      // The line omits the large notebook's figure, which is above it.
      const subject = subjectOf(ownPlacesOn(shared), kernel)?.session.id;
      const figure = (id: string, words: string) => (id === subject ? 'this one' : words);
      expect(texts('holder')).toEqual(
        shared.holders.map(id =>
          expect.stringContaining(`${id}.ipynb${figure(id, one.turns[id] ?? '?')}`)
        )
      );
      expect(texts('keeper')).toEqual(kept.map(([, words]) => expect.stringContaining(words)));
      const short = (text = '?') => (text || 'nobody can tell').replace(/^about /, '≈ ');
      expect(texts('queue-entry')).toEqual(
        shared.queue.map(({ session: id }) =>
          expect.stringContaining(figure(id, short(one.waits[id])))
        )
      );
      unmount();
    }
  });
});
