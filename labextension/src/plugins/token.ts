import { Token } from '@lumino/coreutils';

import type { IKiwiActions } from '../model/api';
import type { KiwiRest } from '../model/rest';
import type { KiwiStore } from '../model/store';

import type { KiwiDocuments } from './documents';
import type { KiwiSettings } from './settings';

/** What Kiwi's plugins share. */
export interface IKiwi {
  readonly store: KiwiStore;
  readonly actions: IKiwiActions;
  readonly rest: KiwiRest;
  readonly documents: KiwiDocuments;
  readonly settings: KiwiSettings;
}

export const IKiwi = new Token<IKiwi>(
  'kiwi-jupyter:IKiwi',
  'Who has the GPU, who waits, and what can be done about it.'
);

/** Ids of commands: part of the interface, like those of the elements (data-kiwi). */
export const CommandIds = {
  openPanel: 'kiwi:open-panel',
  release: 'kiwi:release',
  status: 'kiwi:status',
  toggleNotifications: 'kiwi:toggle-notifications',
  toggleBringBack: 'kiwi:toggle-bring-back'
} as const;

export const PANEL_ID = 'kiwi-panel';
