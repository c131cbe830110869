import { describe, expect, it } from 'vitest';

import { ServerClock } from '../../src/model/clock';

describe('the server’s clock', () => {
  const OFFSET = 5000;
  let local = 0;
  const clock = () => {
    local = 0;
    return new ServerClock(() => local);
  };

  it('is this machine’s until the first message', () => {
    expect(Math.abs(clock().now() - Date.now() / 1000)).toBeLessThan(5);
  });

  it('is taken from the message that was least late', () => {
    const server = clock();
    for (const [at, late_s] of [
      [0, 0.4],
      [1, 0.01],
      [2, 0.9]
    ] as const) {
      local = at;
      server.observe(at + OFFSET - late_s);
    }
    expect(server.now()).toBeCloseTo(2 + OFFSET - 0.01, 6);
  });

  it('is right at once after the page has slept', () => {
    const server = clock();
    server.observe(OFFSET);
    local = 1; // this machine's clock stood still for an hour
    server.observe(OFFSET + 3601);
    expect(server.now()).toBe(OFFSET + 3601);
  });

  it('ignores one late message, but follows a clock that was set back', () => {
    const server = clock();
    server.observe(OFFSET);
    local = 10;
    server.observe(OFFSET); // ten seconds late
    expect(server.now()).toBe(OFFSET + 10);
    for (local = 11; local < 14; local += 1) {
      server.observe(local + OFFSET - 60);
    }
    expect(server.now()).toBeCloseTo(local + OFFSET - 60, 6);
  });
});
