import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import type { Connection } from '../../src/model/api';
import { KiwiRestError } from '../../src/model/rest';
import {
  DEAD_SOCKETS,
  FIRST_PAUSE_MS,
  HIDDEN_GRACE_MS,
  LONGEST_PAUSE_MS,
  POLL_MS,
  POLLS_PER_TRY,
  SILENCE_MS,
  Stream
} from '../../src/model/stream';
import type { IState, StreamMessage } from '../../src/model/types';
import { state } from '../states';

class Socket {
  onmessage: ((event: { data: string }) => void) | null = null;
  onclose: (() => void) | null = null;
  closed = false;
  close(): void {
    this.closed = true;
  }
  deliver(message: object): void {
    this.onmessage?.({ data: JSON.stringify(message) });
  }
  /** Ends the connection from the other side. */
  breaks(): void {
    this.onclose?.();
  }
}

/** The world around the stream. */
class Host {
  sockets: Socket[] = [];
  asked = 0;
  heard: StreamMessage[] = [];
  connections: Connection[] = [];
  refusals: KiwiRestError[] = [];
  forgotten = 0;
  answer: () => Promise<IState> = () => Promise.reject(new Error('nobody'));
  gap = false;
  hidden = false;

  get socket(): Socket {
    const socket = this.sockets.at(-1);
    if (socket === undefined) {
      throw new Error('no socket was opened');
    }
    return socket;
  }

  open = () => {
    const socket = new Socket();
    this.sockets.push(socket);
    return socket as unknown as WebSocket;
  };
  ask = () => {
    this.asked += 1;
    return this.answer();
  };
  receive = (message: StreamMessage) => {
    this.heard.push(message);
    return !this.gap;
  };
  forget = () => {
    this.forgotten += 1;
  };
  refused = (error: KiwiRestError) => {
    this.refusals.push(error);
  };
  connection = (now: Connection) => {
    if (now !== this.connections.at(-1)) {
      this.connections.push(now);
    }
  };
  listensHidden = () => this.hidden;
}

const SNAPSHOT = { type: 'snapshot', ...state() };
const HEARTBEAT = { type: 'heartbeat', seq: 5, now: 1010 };

let host: Host;
let stream: Stream;

function show(visible: boolean): void {
  Object.defineProperty(document, 'hidden', { configurable: true, value: !visible });
  document.dispatchEvent(new Event('visibilitychange'));
}

const pass = (ms: number) => vi.advanceTimersByTimeAsync(ms);

beforeEach(() => {
  vi.useFakeTimers();
  show(true);
  host = new Host();
  stream = new Stream(host);
});

afterEach(() => {
  stream.stop();
  expect(vi.getTimerCount()).toBe(0);
  vi.useRealTimers();
  show(true);
});

describe('the stream', () => {
  it('is live with the first message', () => {
    stream.start();
    expect(host.connections).toEqual([]);
    host.socket.deliver(SNAPSHOT);
    expect(host.connections).toEqual(['live']);
    expect(host.heard).toEqual([SNAPSHOT]);
  });

  it('ignores what it does not know', () => {
    stream.start();
    host.socket.onmessage?.({ data: 'nonsense' });
    host.socket.deliver({ type: 'something-new' });
    expect(host.heard).toEqual([]);
    expect(host.sockets).toHaveLength(1);
  });

  it('connects again when the connection breaks', async () => {
    stream.start();
    host.socket.deliver(SNAPSHOT);
    host.socket.breaks();
    expect(host.connections).toEqual(['live', 'lost']);
    await pass(FIRST_PAUSE_MS);
    expect(host.sockets).toHaveLength(2);
    host.socket.deliver(HEARTBEAT);
    expect(host.connections).toEqual(['live', 'lost', 'live']);
    expect(host.asked).toBe(0);
  });

  it('treats a silent connection as broken, but not one with heartbeats', async () => {
    stream.start();
    host.socket.deliver(SNAPSHOT);
    for (let time = 0; time < 10; time += 1) {
      await pass(10_000);
      host.socket.deliver(HEARTBEAT);
    }
    expect(host.sockets).toHaveLength(1);
    await pass(SILENCE_MS);
    expect(host.sockets[0]?.closed).toBe(true);
    await pass(FIRST_PAUSE_MS);
    expect(host.sockets).toHaveLength(2);
  });

  it('begins again after a gap', () => {
    stream.start();
    host.gap = true;
    const first = host.socket;
    first.deliver({ type: 'delta', seq: 9, now: 1 });
    expect(host.forgotten).toBe(1);
    expect(first.closed).toBe(true);
    expect(host.sockets).toHaveLength(2);
  });

  it('asks over REST if WebSockets are blocked, and tries WebSockets again now and then', async () => {
    host.answer = () => Promise.resolve(state());
    stream.start();
    for (let time = 0; time < DEAD_SOCKETS; time += 1) {
      host.socket.breaks();
      await pass(time === DEAD_SOCKETS - 1 ? 0 : FIRST_PAUSE_MS);
    }
    expect(host.asked).toBe(1);
    expect(host.connections).toEqual(['live']);
    expect(host.heard).toEqual([SNAPSHOT]);
    await pass(POLL_MS);
    expect(host.asked).toBe(2);
    await pass(POLL_MS * (POLLS_PER_TRY - 1));
    expect(host.sockets).toHaveLength(DEAD_SOCKETS + 1);
    expect(host.asked).toBe(POLLS_PER_TRY);
    host.socket.deliver(SNAPSHOT); // no longer blocked
    await pass(POLL_MS * 2);
    expect(host.asked).toBe(POLLS_PER_TRY);
  });

  it('makes ever longer pauses while the server is away, up to a limit', async () => {
    stream.start();
    for (let round = 0; round < 14; round += 1) {
      host.socket.breaks();
      await pass(LONGEST_PAUSE_MS);
    }
    expect(host.connections).toEqual(['lost']);
    const before = host.sockets.length;
    host.socket.breaks();
    await pass(LONGEST_PAUSE_MS / 2);
    expect(host.sockets).toHaveLength(before);
    await pass(LONGEST_PAUSE_MS / 2);
    expect(host.sockets).toHaveLength(before + 1);
  });

  it('reports that the server refuses', async () => {
    const error = new KiwiRestError({ code: 'no-extension', message: 'a', remedy: 'b' }, 404);
    host.answer = () => Promise.reject(error);
    stream.start();
    host.socket.breaks();
    await pass(FIRST_PAUSE_MS);
    host.socket.breaks();
    await pass(0);
    expect(host.refusals).toEqual([error]);
    expect(host.connections).toEqual([]);
  });

  it('tries at once on request', async () => {
    stream.start();
    for (let round = 0; round < 6; round += 1) {
      host.socket.breaks();
      await pass(LONGEST_PAUSE_MS);
    }
    host.socket.breaks();
    await pass(0);
    const before = host.sockets.length;
    stream.retry();
    expect(host.sockets).toHaveLength(before + 1);
    stream.retry(); // under way
    expect(host.sockets).toHaveLength(before + 1);
  });

  it('does nothing while the page is hidden, and continues when it is visible', async () => {
    stream.start();
    host.socket.deliver(SNAPSHOT);
    show(false);
    await pass(HIDDEN_GRACE_MS - 1);
    expect(host.socket.closed).toBe(false);
    await pass(1);
    expect(host.socket.closed).toBe(true);
    expect(vi.getTimerCount()).toBe(0);
    await pass(3_600_000);
    expect(host.sockets).toHaveLength(1);
    expect(host.connections).toEqual(['live']); // a resting stream is not lost
    show(true);
    expect(host.sockets).toHaveLength(2);
  });

  it('keeps its connection while the page is hidden for a moment', async () => {
    stream.start();
    host.socket.deliver(SNAPSHOT);
    show(false);
    await pass(HIDDEN_GRACE_MS / 2);
    show(true);
    await pass(HIDDEN_GRACE_MS);
    expect(host.socket.closed).toBe(false);
    expect(host.sockets).toHaveLength(1);
  });

  it('begins only when the page is visible', () => {
    show(false);
    stream.start();
    expect(host.sockets).toHaveLength(0);
    show(true);
    expect(host.sockets).toHaveLength(1);
  });

  it('goes on listening while hidden if it has to notify', async () => {
    host.hidden = true;
    stream.start();
    host.socket.deliver(SNAPSHOT);
    show(false);
    await pass(HIDDEN_GRACE_MS * 2);
    expect(host.socket.closed).toBe(false);
    host.hidden = false;
    stream.review();
    await pass(HIDDEN_GRACE_MS);
    expect(host.socket.closed).toBe(true);
  });

  it('ignores an answer that comes after it stopped', async () => {
    let settle: (whole: IState) => void = () => undefined;
    host.answer = () => new Promise(resolve => (settle = resolve));
    stream.start();
    host.socket.breaks();
    await pass(FIRST_PAUSE_MS);
    host.socket.breaks();
    expect(host.asked).toBe(1);
    stream.stop();
    settle(state());
    await pass(POLL_MS);
    expect(host.heard).toEqual([]);
    expect(host.asked).toBe(1);
  });
});
