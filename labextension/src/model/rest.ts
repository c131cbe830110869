/** The only access to the server's REST interface (docs/rest.md). */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import type { ISettingsPatch } from './api';
import type { IBroughtBack, IProblem, IState, IStory, IStoryLine } from './types';
import { trans } from './translation';

/** The server refused or did not answer. The message is for users. */
export class KiwiRestError extends Error {
  /** `status`: the HTTP status; 0 without an answer. */
  constructor(
    readonly problem: IProblem,
    readonly status: number
  ) {
    super([problem.message, problem.remedy].filter(text => text !== '').join(' '));
    this.name = 'KiwiRestError';
  }
}

/** All methods reject with a {@link KiwiRestError}. */
export class KiwiRest {
  constructor(readonly settings: ServerConnection.ISettings) {}

  status(): Promise<IState> {
    return this._ask('GET', ['status']) as Promise<IState>;
  }

  async set(uuid: string, patch: ISettingsPatch): Promise<void> {
    await this._ask('PATCH', ['gpus', uuid], patch);
  }

  async release(uuid: string, session: string): Promise<void> {
    await this._ask('POST', ['gpus', uuid, 'sessions', session, 'release']);
  }

  /** Sends a hint that the session is about to be used; returns its effect. */
  bringBack(uuid: string, session: string): Promise<IBroughtBack> {
    const path = ['gpus', uuid, 'sessions', session, 'bring-back'];
    return this._ask('POST', path) as Promise<IBroughtBack>;
  }

  /** Returns the story of the session, oldest line first. */
  async story(uuid: string, session: string): Promise<readonly IStoryLine[]> {
    const answer = await this._ask('GET', ['gpus', uuid, 'sessions', session, 'story']);
    return (answer as IStory).lines;
  }

  /** Returns the stream's address, with the last position seen, so that the stream can go on
   * from there. */
  streamUrl(seen: Pick<IState, 'epoch' | 'seq'> | null): string {
    const { wsUrl, token, appendToken } = this.settings;
    const query: Record<string, string> = {};
    if (seen !== null) {
      query.epoch = seen.epoch;
      query.seq = String(seen.seq);
    }
    if (appendToken && token !== '') {
      query.token = token;
    }
    return URLExt.join(wsUrl, 'kiwi/api/events') + URLExt.objectToQueryString(query);
  }

  private async _ask(method: string, path: readonly string[], body?: unknown): Promise<unknown> {
    const words = path.map(encodeURIComponent).join('/');
    const url = URLExt.join(this.settings.baseUrl, 'kiwi/api', words);
    const init: RequestInit = { method };
    if (body !== undefined) {
      init.body = JSON.stringify(body);
    }
    let response: Response;
    try {
      response = await ServerConnection.makeRequest(url, init, this.settings);
    } catch {
      throw new KiwiRestError(noAnswer(), 0);
    }
    const answer: unknown = await response.json().catch(() => null);
    if (!response.ok || answer === null) {
      throw new KiwiRestError(problemOf(response.status, answer), response.status);
    }
    return answer;
  }
}

function noAnswer(): IProblem {
  return {
    code: 'no-answer',
    message: trans.__('The Jupyter server does not answer.'),
    remedy: trans.__('Is it still running, and are you still logged in?')
  };
}

function noExtension(): IProblem {
  return {
    code: 'no-extension',
    message: trans.__('This Jupyter server runs without Kiwi’s server extension.'),
    remedy: trans.__(
      'Install kiwi-jupyter where the Jupyter server runs, and start it again; `jupyter server extension list` shows whether it is enabled.'
    )
  };
}

function problemOf(status: number, answer: unknown): IProblem {
  if (isProblem(answer)) {
    return answer;
  }
  if (status === 404) {
    return noExtension();
  }
  return {
    code: status === 401 || status === 403 ? 'not-allowed' : 'bad-answer',
    message: trans.__('The Jupyter server refused (HTTP %1).', status),
    remedy: status === 401 || status === 403 ? trans.__('Log in again: reload the page.') : ''
  };
}

function isProblem(answer: unknown): answer is IProblem {
  const fields = answer as Partial<Record<keyof IProblem, unknown>> | null;
  return (
    typeof fields === 'object' &&
    fields !== null &&
    [fields.code, fields.message, fields.remedy].every(field => typeof field === 'string')
  );
}
