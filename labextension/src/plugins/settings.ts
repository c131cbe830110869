/** The user's settings (schema/plugin.json), with their types. */

import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

export interface ISettingValues {
  statusBar: boolean;
  bringBack: boolean;
  notify: boolean;
  notifyAfterSeconds: number;
  timelineMinutes: number;
  markTabs: boolean;
}

/** The defaults of the schema: valid until the settings are read, or if there are none. */
export const DEFAULTS: Readonly<ISettingValues> = {
  statusBar: true,
  bringBack: true,
  notify: false,
  notifyAfterSeconds: 30,
  timelineMinutes: 5,
  markTabs: true
};

export class KiwiSettings {
  get<K extends keyof ISettingValues>(key: K): ISettingValues[K] {
    const value = this._stored?.get(key).composite;
    return typeof value === typeof DEFAULTS[key] ? (value as ISettingValues[K]) : DEFAULTS[key];
  }

  async set<K extends keyof ISettingValues>(key: K, value: ISettingValues[K]): Promise<void> {
    await this._stored?.set(key, value);
  }

  /** Emitted when a value changed. */
  get changed(): ISignal<KiwiSettings, void> {
    return this._changed;
  }

  /** Resolves when the settings have been read. */
  follow(stored: ISettingRegistry.ISettings): void {
    this._stored = stored;
    stored.changed.connect(() => this._changed.emit());
    this._changed.emit();
  }

  private _stored: ISettingRegistry.ISettings | null = null;
  private readonly _changed = new Signal<KiwiSettings, void>(this);
}
