/** Formats sizes, waits and places in line for users: the same on every surface. */

import { about, anyMoment, upTo } from './terms';
import { trans } from './translation';

const UNITS = ['KiB', 'MiB', 'GiB', 'TiB'] as const;

/** Text for a tooltip or a label, which cannot show `commands` as code. */
export function withoutMarks(text: string): string {
  return text.replaceAll('`', '');
}

/** `0 B`, `512 MiB`, `38.4 GiB`, as on the command line. */
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

/** Formats the rest of a wait: `any moment`, `about 12 s`, `10–25 s`, `up to 7 s`, `about 3 min
 * (others go first)`. Python's `format_wait_s` does the same. */
export function formatWait(
  expected_s: number,
  low_s: number | null = null,
  high_s: number | null = null,
  why = '',
  short = false
): string {
  let text = low_s === null || high_s === null ? '' : range(low_s, high_s);
  if (text === '') {
    const whole = amount(expected_s);
    const some = short ? `≈ ${whole}` : about(whole);
    text = whole === '0 s' ? anyMoment() : some;
  }
  return why === '' ? text : `${text} (${why})`;
}

/** Formats a range coarsely, so that it stands still while the wait gets shorter; "" if it is
 * one figure. */
function range(low_s: number, high_s: number): string {
  const low = amount(low_s, true);
  const high = amount(high_s, true);
  if (low === high || high_s <= low_s || high === '0 s') {
    return '';
  }
  if (low === '0 s') {
    return upTo(high);
  }
  const [number, unit] = low.split(' ');
  return `${high.endsWith(` ${unit}`) ? number : low}–${high}`;
}

/** Seconds below 100 s, minutes below 100 min; `coarse`: in steps of about a tenth, and below 90, or
 * 95 s would follow 1.5 min. */
function amount(wait_s: number, coarse = false): string {
  const seconds = rounded(wait_s, coarse && wait_s >= 20 ? 5 : 1);
  const most = coarse ? 90 : 100;
  if (seconds < most) {
    return `${seconds} s`;
  }
  const minutes = rounded(wait_s / 60, coarse && wait_s < 600 ? 0.5 : 1);
  return minutes < most ? `${minutes} min` : `${rounded(wait_s / 3600, coarse ? 0.5 : 1)} h`;
}

function rounded(value: number, step: number): number {
  return Math.floor(Math.max(0, value) / step + 0.5) * step;
}

/** Formats a countdown: whole seconds, and minutes from two minutes on. */
export function formatLeft(left_s: number): string {
  const whole = Math.max(0, Math.ceil(left_s));
  return whole < 120 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** `1st`, `2nd`, `3rd`, `4th`, `11th` … */
export function ordinal(position: number): string {
  if (position % 100 >= 10 && position % 100 <= 20) {
    return trans.__('%1th', position);
  }
  switch (position % 10) {
    case 1:
      return trans.__('%1st', position);
    case 2:
      return trans.__('%1nd', position);
    case 3:
      return trans.__('%1rd', position);
    default:
      return trans.__('%1th', position);
  }
}
