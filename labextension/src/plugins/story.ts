/** The story of one notebook while its dialog is open: the last things that the daemon recorded,
 * with their ages, and the present state. */

import { Widget } from '@lumino/widgets';

import type { IKiwiStore } from '../model/api';
import type { IStoryLine } from '../model/types';
import { statusOf } from '../model/status';
import { trans } from '../model/translation';
import { onTick } from '../panel/ticker';
import { formatSoFar } from '../panel/words';

/** Seconds between two requests: statuses may change many times a second. */
const ASK_EVERY_S = 1;

export class StoryView extends Widget {
  constructor(
    private readonly _store: IKiwiStore,
    private readonly _read: () => Promise<readonly IStoryLine[]>,
    lines: readonly IStoryLine[]
  ) {
    super({ node: document.createElement('div') });
    this.addClass('jp-Kiwi-story');
    this.node.append(this._now, this._list);
    this._take(lines);
    _store.changed.connect(this._changed, this);
    this._stopTicking = onTick(() => this._tick());
  }

  override dispose(): void {
    this._stopTicking();
    this._store.changed.disconnect(this._changed, this);
    super.dispose();
  }

  private _changed(): void {
    this._stale = true;
  }

  private _tick(): void {
    if (this._stale && !this._asking && this._store.now() - this._asked >= ASK_EVERY_S) {
      void this._ask();
    }
    this._draw();
  }

  private async _ask(): Promise<void> {
    this._stale = false;
    this._asking = true;
    try {
      this._take(await this._read());
    } catch {
      // The session or the daemon has ended: the last known lines stay, and their ages grow.
    } finally {
      this._asking = false;
    }
  }

  private _take(lines: readonly IStoryLine[]): void {
    this._asked = this._store.now();
    this._lines = lines.map(({ ago_s, text }) => ({ at: this._asked - ago_s, text }));
    this._draw();
  }

  private _draw(): void {
    this._now.textContent = statusOf(this._store)?.label ?? '';
    const now = this._store.now();
    const texts = this._lines.map(({ at, text }) =>
      trans.__('%1 ago: %2', formatSoFar(now - at), text)
    );
    if (this._lines.length === 0) {
      this._list.textContent = trans.__('Nothing yet.');
      return;
    }
    this._list.replaceChildren(
      ...texts.map(text => {
        const item = document.createElement('li');
        item.textContent = text;
        return item;
      })
    );
  }

  private readonly _now = document.createElement('p');
  private readonly _list = document.createElement('ol');
  private _lines: readonly { readonly at: number; readonly text: string }[] = [];
  private _asked = 0;
  private _asking = false;
  private _stale = false;
  private readonly _stopTicking: () => void;
}
