/** The server's clock, estimated from the times in its messages. */

/** Number of samples kept: some minutes, with a heartbeat each 10 s. */
const KEPT = 32;

/** If the newest samples are this far below the best one, it is not latency … */
const STEP_S = 2;

/** … once there are this many in a row: the server's clock was set back. */
const STEP_SAMPLES = 3;

/**
 * A message arrives late, never early. So the greatest recent difference between the server's time
 * and ours has the smallest error. After a page has slept the difference is greater, so the first
 * message corrects the clock.
 */
export class ServerClock {
  /** `local_s`: seconds of this machine, any origin, preferably monotonic. */
  constructor(private readonly local_s: () => number = monotonic_s) {}

  private _samples: number[] = [];
  private _offset_s: number | null = null;

  /** Takes a message in which the server's clock shows `server_s`. */
  observe(server_s: number): void {
    const sample = server_s - this.local_s();
    const recent = this._samples.slice(1 - STEP_SAMPLES);
    const setBack =
      this._offset_s !== null &&
      recent.length === STEP_SAMPLES - 1 &&
      [...recent, sample].every(each => each < (this._offset_s ?? 0) - STEP_S);
    this._samples = setBack ? [sample] : [...this._samples, sample].slice(-KEPT);
    this._offset_s = Math.max(...this._samples);
  }

  /** Unix seconds; before the first message, this machine's. */
  now(): number {
    return this._offset_s === null ? Date.now() / 1000 : this.local_s() + this._offset_s;
  }
}

function monotonic_s(): number {
  return performance.now() / 1000;
}
