/**
 * The panel's only timer. Everything that shows passing time listens here, so that a hidden tab
 * does no work at all and a visible one has one timer however many countdowns it shows.
 */

/** Twice a second: a countdown that ticks by whole seconds then never skips one by drift. */
const PERIOD_MS = 500;

const listeners = new Set<() => void>();
let timer: ReturnType<typeof setInterval> | null = null;

function tick(): void {
  if (document.hidden) {
    return;
  }
  for (const listener of [...listeners]) {
    listener();
  }
}

/** Calls `listener` twice a second while the page is visible, and at once when it becomes so
 * again. Returns how to stop. */
export function onTick(listener: () => void): () => void {
  listeners.add(listener);
  if (timer === null) {
    timer = setInterval(tick, PERIOD_MS);
    document.addEventListener('visibilitychange', tick);
  }
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0 && timer !== null) {
      clearInterval(timer);
      timer = null;
      document.removeEventListener('visibilitychange', tick);
    }
  };
}
