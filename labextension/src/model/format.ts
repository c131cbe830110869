/** Sizes, waits and places in line as people read them: the same words on every surface. */

const UNITS = ['KiB', 'MiB', 'GiB', 'TiB'] as const;

/** `0 B`, `512 MiB`, `38.4 GiB`: like the command line writes them. */
export function formatBytes(size_bytes: number): string {
  let text = `${Math.round(size_bytes)} B`;
  let value = size_bytes;
  for (const unit of UNITS) {
    value /= 1024;
    if (Math.abs(value) < 1) {
      break;
    }
    text = `${Number.isInteger(value) ? value : value.toFixed(1)} ${unit}`;
  }
  return text;
}

/** How long a wait may still take: `any moment`, `about 12 s`, `about 3 min`, `about 2 h`. */
export function formatWait(wait_s: number): string {
  const whole = Math.round(wait_s);
  if (whole < 1) {
    return 'any moment';
  }
  if (whole < 100) {
    return `about ${whole} s`;
  }
  const minutes = Math.round(whole / 60);
  return minutes < 100 ? `about ${minutes} min` : `about ${Math.round(minutes / 60)} h`;
}

/** `1st`, `2nd`, `3rd`, `4th`, `11th` … */
export function ordinal(position: number): string {
  if (position % 100 >= 10 && position % 100 <= 20) {
    return `${position}th`;
  }
  return `${position}${{ 1: 'st', 2: 'nd', 3: 'rd' }[position % 10] ?? 'th'}`;
}
