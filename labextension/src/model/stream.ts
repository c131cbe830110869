/**
 * Receives updates from the server: over a WebSocket, which goes on where it broke off, or, if
 * WebSockets are blocked, by requests every few seconds. While nobody can see the page it does
 * nothing.
 */

import type { Connection } from './api';
import { KiwiRestError } from './rest';
import type { IState, StreamMessage } from './types';

/** A longer silence means a dead connection: the server sends something every 10 s at least. */
export const SILENCE_MS = 25_000;

/** Pause between tries: doubled each time, with a random part so that many browsers spread out. */
export const FIRST_PAUSE_MS = 1_000;
export const LONGEST_PAUSE_MS = 30_000;

/** After this many silent WebSockets in a row, ask over REST: they may be blocked. */
export const DEAD_SOCKETS = 2;

/** Interval of requests over REST, and their number between two tries of a WebSocket. */
export const POLL_MS = 5_000;
export const POLLS_PER_TRY = 12;

/** A page hidden for a moment (switching tabs to and fro) keeps its connection. */
export const HIDDEN_GRACE_MS = 5_000;

export interface IStreamHost {
  /** Opens a WebSocket that continues after the last message. */
  open(): WebSocket;
  /** Fetches the whole state over REST. */
  ask(): Promise<IState>;
  /** Returns false if a message was missed: then the whole state is requested again. */
  receive(message: StreamMessage): boolean;
  /** Forgets the position in the stream: the next connection begins with a snapshot. */
  forget(): void;
  /** Takes a refusal: the server answers, but does not give Kiwi's state. */
  refused(error: KiwiRestError): void;
  connection(now: Connection): void;
  /** Whether to go on listening while the page is hidden. */
  listensHidden(): boolean;
}

export class Stream {
  constructor(private readonly _host: IStreamHost) {}

  start(): void {
    document.addEventListener('visibilitychange', this._onVisibility);
    this._go();
  }

  stop(): void {
    document.removeEventListener('visibilitychange', this._onVisibility);
    this._stopped = true;
    this._rest();
  }

  /** Tries again now instead of after the pause. */
  retry(): void {
    if (this._socket === null && !this._stopped) {
      this._failures = 0;
      this._go();
    }
  }

  /** Asks `listensHidden` again, whose answer may have changed. */
  review(): void {
    this._onVisibility();
  }

  private _go(): void {
    this._clear();
    if (this._stopped || this._socket !== null) {
      return;
    }
    if (document.hidden && !this._host.listensHidden()) {
      this._resting = true;
      return;
    }
    if (this._failures >= DEAD_SOCKETS && this._polls % POLLS_PER_TRY !== 0) {
      void this._poll();
    } else {
      this._connect();
    }
  }

  // --- WebSocket ----------------------------------------------------------------------------------

  private _connect(): void {
    let socket: WebSocket;
    try {
      socket = this._host.open();
    } catch {
      this._handleClose(false);
      return;
    }
    let received = false;
    this._socket = socket;
    this._watch(socket);
    socket.onmessage = event => {
      const message = parse(event.data);
      if (this._socket !== socket || message === null) {
        return;
      }
      received = true;
      this._failures = 0;
      this._polls = 0;
      this._watch(socket);
      if (this._host.receive(message)) {
        this._host.connection('live');
      } else {
        this._host.forget();
        this._drop();
        this._go();
      }
    };
    socket.onclose = () => {
      if (this._socket === socket) {
        this._drop();
        this._handleClose(received);
      }
    };
  }

  /** Treats a connection that was silent for too long as closed. */
  private _watch(socket: WebSocket): void {
    clearTimeout(this._silence);
    this._silence = setTimeout(() => {
      if (this._socket === socket) {
        this._drop();
        this._handleClose(false);
      }
    }, SILENCE_MS);
  }

  private _drop(): void {
    const socket = this._socket;
    this._socket = null;
    clearTimeout(this._silence);
    if (socket !== null) {
      socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  /** Handles the end of the connection; `received`: it had worked. */
  private _handleClose(received: boolean): void {
    if (received) {
      this._host.connection('lost');
      this._later(FIRST_PAUSE_MS);
      return;
    }
    this._failures += 1;
    if (this._failures >= DEAD_SOCKETS) {
      void this._poll();
    } else {
      this._later(FIRST_PAUSE_MS);
    }
  }

  // --- REST ---------------------------------------------------------------------------------------

  private async _poll(): Promise<void> {
    const asked = (this._asked += 1);
    this._polls += 1;
    let pause_ms = POLL_MS;
    try {
      const state = await this._host.ask();
      if (asked === this._asked && this._socket === null) {
        this._host.receive({ type: 'snapshot', ...state });
        this._host.connection('live');
      }
    } catch (error) {
      if (asked !== this._asked) {
        return;
      }
      pause_ms = this._pause_ms();
      this._failures += 1;
      this._polls = 0; // the server may have been away altogether: WebSocket first
      if (error instanceof KiwiRestError && [401, 403, 404].includes(error.status)) {
        this._host.refused(error);
        pause_ms = LONGEST_PAUSE_MS;
      } else {
        this._host.connection('lost');
      }
    }
    if (asked === this._asked) {
      this._later(pause_ms);
    }
  }

  private _pause_ms(): number {
    const doubled = FIRST_PAUSE_MS * 2 ** Math.min(10, this._failures - DEAD_SOCKETS);
    return Math.min(LONGEST_PAUSE_MS, doubled) * (0.75 + Math.random() / 4);
  }

  // --- time and visibility ------------------------------------------------------------------------

  private _later(pause_ms: number): void {
    clearTimeout(this._next);
    this._next = setTimeout(() => this._go(), pause_ms);
  }

  private _clear(): void {
    clearTimeout(this._next);
    clearTimeout(this._leave);
    this._leave = undefined;
    this._asked += 1;
  }

  private readonly _onVisibility = (): void => {
    if (this._stopped) {
      return;
    }
    if (!document.hidden || this._host.listensHidden()) {
      clearTimeout(this._leave);
      this._leave = undefined;
      if (this._resting) {
        this._resting = false;
        this._failures = 0;
        this._go();
      }
    } else if (!this._resting && this._leave === undefined) {
      this._leave = setTimeout(() => this._rest(), HIDDEN_GRACE_MS);
    }
  };

  private _rest(): void {
    this._resting = true;
    this._clear();
    this._drop();
  }

  private _socket: WebSocket | null = null;
  private _failures = 0;
  private _polls = 0;
  /** Counts requests over REST, so that answers to abandoned ones are ignored. */
  private _asked = 0;
  /** True while the page is hidden: nothing is done until it is visible again. */
  private _resting = false;
  private _stopped = false;
  private _next: ReturnType<typeof setTimeout> | undefined;
  private _silence: ReturnType<typeof setTimeout> | undefined;
  private _leave: ReturnType<typeof setTimeout> | undefined;
}

function parse(data: unknown): StreamMessage | null {
  try {
    const message = JSON.parse(String(data)) as StreamMessage;
    return ['snapshot', 'delta', 'heartbeat'].includes(message.type) ? message : null;
  } catch {
    return null;
  }
}
