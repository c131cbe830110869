/**
 * The user's language. JupyterLab reloads the page when the language changes, so it is read once: the
 * model's plugin, which all others need, sets it before any word is drawn. Without a language pack
 * for Kiwi, and in tests, every text is its own translation.
 *
 * A text is given to `trans` as a literal, with %1, %2 … for what changes: `npm run catalogue` collects
 * them. No module calls `trans` while it is loaded. Units (s, min, GiB) are symbols and stay.
 */

import type { ITranslator, TranslationBundle } from '@jupyterlab/translation';
import { nullTranslator } from '@jupyterlab/translation';

/** The name under which language packs have Kiwi's words. */
export const DOMAIN = 'kiwi_jupyter';

export let trans: TranslationBundle = nullTranslator.load(DOMAIN);

export function setTranslator(translator: ITranslator): void {
  try {
    trans = translator.load(DOMAIN);
  } catch (reason) {
    console.warn('Kiwi: the language pack has no usable texts; they stay English.', reason);
  }
}
