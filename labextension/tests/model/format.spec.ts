import { describe, expect, it } from 'vitest';

import { formatBytes, formatWait, ordinal } from '../../src/model/format';

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

  it.each([
    [0, 'any moment'],
    [0.4, 'any moment'],
    [0.6, 'about 1 s'],
    [12.3, 'about 12 s'],
    [99.4, 'about 99 s'],
    [100, 'about 2 min'],
    [5000, 'about 83 min'],
    [7200, 'about 2 h']
  ])('a wait of %d s: %s', (seconds, text) => expect(formatWait(seconds)).toBe(text));

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
