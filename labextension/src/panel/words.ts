/** Formats times of day, durations and speeds for the panel. */

/** A term as a title: with a capital letter. */
export function asTitle(term: string): string {
  return term.charAt(0).toUpperCase() + term.slice(1);
}

/** `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`: as the command line writes them. */
export function formatDuration(duration_s: number): string {
  if (duration_s < 9.95) {
    return `${Math.max(0, duration_s).toFixed(1)} s`;
  }
  const whole = Math.round(duration_s);
  if (whole < 60) {
    return `${whole} s`;
  }
  if (whole < 3600) {
    return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  }
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Formats a duration that still grows in whole seconds: tenths would flicker. */
export function formatSoFar(duration_s: number): string {
  const whole = Math.max(0, Math.floor(duration_s));
  return whole < 10 ? `${whole} s` : formatDuration(whole);
}

/** `3.2 GB/s` (decimal, as bus speeds are given); '' if unknown. */
export function formatSpeed(bytes: number, seconds: number): string {
  if (bytes <= 0 || seconds <= 0) {
    return '';
  }
  const speed = bytes / 1e9 / seconds;
  return `${speed < 0.1 ? speed.toPrecision(1) : speed.toFixed(1)} GB/s`;
}

/** Formats the reader's local time of day. */
export function formatClock(unix_s: number, seconds: boolean): string {
  const at = new Date(unix_s * 1000);
  const parts = [at.getHours(), at.getMinutes(), ...(seconds ? [at.getSeconds()] : [])];
  return parts.map(part => String(part).padStart(2, '0')).join(':');
}
