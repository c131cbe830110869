import { ServerConnection } from '@jupyterlab/services';
import { describe, expect, it } from 'vitest';

import { KiwiActions } from '../../src/model/actions';
import { KiwiRest, KiwiRestError } from '../../src/model/rest';
import { gpu, session, state } from '../states';

interface ICall {
  url: string;
  method: string;
  body: string;
}

function rest(answer: (call: ICall) => Response | Promise<Response>, token = '') {
  const calls: ICall[] = [];
  const settings = ServerConnection.makeSettings({
    baseUrl: 'http://host/base/',
    wsUrl: 'ws://host/base/',
    token,
    appendToken: token !== '',
    fetch: async (input, init) => {
      const request = new Request(input, init);
      // JupyterLab adds the time, so that nothing comes from a cache.
      const url = request.url.replace(/\?\d+$/, '');
      const call = { url, method: request.method, body: await request.text() };
      calls.push(call);
      return answer(call);
    },
    Request,
    Headers
  });
  return { rest: new KiwiRest(settings), calls };
}

const json = (body: unknown, status = 200) => new Response(JSON.stringify(body), { status });

async function failure(promise: Promise<unknown>): Promise<KiwiRestError> {
  const error: unknown = await promise.then(
    () => null,
    reason => reason
  );
  expect(error).toBeInstanceOf(KiwiRestError);
  return error as KiwiRestError;
}

describe('the REST interface', () => {
  it('is requested at its address', async () => {
    const { rest: it_, calls } = rest(({ url }) =>
      json(url.endsWith('/story') ? { lines: [{ ago_s: 1, text: 'x' }] } : state())
    );
    expect(await it_.status()).toEqual(state());
    await it_.set('GPU-1', { tq_s: 10 });
    await it_.release('GPU-1', 'a/b');
    await it_.bringBack('GPU-1', 's1');
    expect(await it_.story('GPU-1', 's1')).toEqual([{ ago_s: 1, text: 'x' }]);
    expect(calls).toEqual([
      { url: 'http://host/base/kiwi/api/status', method: 'GET', body: '' },
      { url: 'http://host/base/kiwi/api/gpus/GPU-1', method: 'PATCH', body: '{"tq_s":10}' },
      {
        url: 'http://host/base/kiwi/api/gpus/GPU-1/sessions/a%2Fb/release',
        method: 'POST',
        body: ''
      },
      {
        url: 'http://host/base/kiwi/api/gpus/GPU-1/sessions/s1/bring-back',
        method: 'POST',
        body: ''
      },
      { url: 'http://host/base/kiwi/api/gpus/GPU-1/sessions/s1/story', method: 'GET', body: '' }
    ]);
  });

  it('reports errors in the server’s words', async () => {
    const problem = { code: 'in-burst', message: 'It runs.', remedy: 'Interrupt it first.' };
    const error = await failure(rest(() => json(problem, 409)).rest.release('g', 's'));
    expect(error.message).toBe('It runs. Interrupt it first.');
    expect(error.problem).toEqual(problem);
    expect(error.status).toBe(409);
  });

  it.each([
    [404, 'no-extension'],
    [403, 'not-allowed'],
    [401, 'not-allowed'],
    [500, 'bad-answer']
  ])('tells a bare %d as %s', async (status, code) => {
    const error = await failure(rest(() => new Response('<html>', { status })).rest.status());
    expect(error.problem.code).toBe(code);
    expect(error.message).not.toBe('');
  });

  it('does not accept an HTML page as an answer', async () => {
    const error = await failure(rest(() => new Response('<html>login')).rest.status());
    expect(error.problem.code).toBe('bad-answer');
  });

  it('reports that the server does not answer', async () => {
    const error = await failure(rest(() => Promise.reject(new TypeError('fetch'))).rest.status());
    expect(error.problem.code).toBe('no-answer');
    expect(error.status).toBe(0);
  });

  it('continues the stream from the last position', () => {
    const plain = rest(() => json({})).rest;
    expect(plain.streamUrl(null)).toBe('ws://host/base/kiwi/api/events');
    expect(plain.streamUrl({ epoch: 'a b', seq: 7 })).toBe(
      'ws://host/base/kiwi/api/events?epoch=a%20b&seq=7'
    );
    expect(rest(() => json({}), 'secret').rest.streamUrl(null)).toContain('token=secret');
  });
});

describe('actions', () => {
  it('reach the server', async () => {
    const { rest: it_, calls } = rest(() => json({}));
    const opened: string[] = [];
    let again = 0;
    const actions = new KiwiActions(
      it_,
      () => (again += 1),
      one => Promise.resolve(void opened.push(one.id))
    );
    await actions.set(gpu(), { anti_thrash: 'always' });
    await actions.release({ gpu: gpu(), session: session() });
    await actions.open(session());
    await actions.retry();
    expect(calls.map(call => `${call.method} ${call.url.slice(25)} ${call.body}`)).toEqual([
      'PATCH /gpus/GPU-1 {"anti_thrash":"always"}',
      'POST /gpus/GPU-1/sessions/s1/release ',
      'GET /status '
    ]);
    expect(opened).toEqual(['s1']);
    expect(again).toBe(1);
  });

  it('do not reconnect if the server does not answer', async () => {
    const it_ = rest(() => Promise.reject(new TypeError('fetch'))).rest;
    let again = 0;
    const actions = new KiwiActions(
      it_,
      () => (again += 1),
      () => Promise.resolve()
    );
    await failure(actions.retry());
    expect(again).toBe(0);
  });
});
