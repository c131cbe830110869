import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import { describe, expect, it } from 'vitest';

import { formatBytes, formatWait, ordinal } from '../../src/model/format';

/** The Python side's tests read the same table. */
const TABLE = join(__dirname, '../../../tests/support/wait_words.json');
const WAITS = JSON.parse(readFileSync(TABLE, 'utf8')) as [
  number,
  number | null,
  number | null,
  string,
  string
][];

describe('formats', () => {
  it.each([
    [0, '0 B'],
    [1023, '1023 B'],
    [1024, '1 KiB'],
    [512 * 1024 ** 2, '512 MiB'],
    [38.4 * 1024 ** 3, '38.4 GiB'],
    [2 * 1024 ** 4, '2 TiB'],
    [5000 * 1024 ** 4, '5000 TiB']
  ])('%d bytes: %s', (bytes, text) => expect(formatBytes(bytes)).toBe(text));

  it.each(WAITS)('a wait of %d s, from %d to %d, %s: %s', (expected, low, high, why, text) =>
    expect(formatWait(expected, low, high, why)).toBe(text)
  );

  it.each([
    [1, '1st'],
    [2, '2nd'],
    [3, '3rd'],
    [4, '4th'],
    [11, '11th'],
    [12, '12th'],
    [13, '13th'],
    [21, '21st'],
    [102, '102nd'],
    [111, '111th']
  ])('place %d: %s', (position, text) => expect(ordinal(position)).toBe(text));
});
