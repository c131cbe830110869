import { describe, expect, it } from 'vitest';

import { formatLeft } from '../../src/model/format';
import { announcement, moments } from '../../src/panel/announce';
import {
  modeOf,
  modes,
  patchOf,
  policyOf,
  quantumError,
  settingsOf
} from '../../src/panel/controls-model';
import { formatDuration, formatSpeed } from '../../src/panel/words';
import { gpu, session, state, waits } from '../../stories/make';

describe('words', () => {
  it('write durations like the command line does', () => {
    expect([0.04, 9.94, 9.96, 59.4, 61, 7500].map(formatDuration)).toEqual([
      '0.0 s',
      '9.9 s',
      '10 s',
      '59 s',
      '1 min 1 s',
      '2 h 5 min'
    ]);
  });

  it('count down to 1 s and end', () => {
    expect([120.5, 119.2, 20.4, 0.2, 0, -3].map(formatLeft)).toEqual([
      '2 min 1 s',
      '2 min 0 s',
      '21 s',
      '1 s',
      '0 s',
      '0 s'
    ]);
  });

  it('give a speed only if it is known', () => {
    expect(formatSpeed(3e9, 2)).toBe('1.5 GB/s');
    expect(formatSpeed(4e7, 1)).toBe('0.04 GB/s');
    expect([formatSpeed(0, 2), formatSpeed(3e9, 0)]).toEqual(['', '']);
  });
});

describe('settings', () => {
  const now = gpu().scheduler;

  it('are refused before sending if the daemon would refuse them', () => {
    for (const good of ['0.1', '30', '12.5', ' 86400 ']) {
      expect(quantumError(good)).toBe('');
    }
    for (const bad of ['', ' ', '0', '-3', '0.05', '86401', 'ten', 'NaN', 'Infinity']) {
      expect(quantumError(bad)).not.toBe('');
    }
  });

  it('send what was changed, and nothing if nothing was changed', () => {
    const chosen = settingsOf(now);
    expect(patchOf(now, chosen)).toBeNull();
    expect(patchOf(now, { ...chosen, quantum: '30.0' })).toBeNull();
    expect(patchOf(now, { ...chosen, quantum: '10' })).toEqual({ tq_s: 10 });
    expect(patchOf(now, { ...chosen, policy: 'interactive' })).toEqual({ policy: 'interactive' });
    const all = { quantum: '10', mode: 'off', policy: 'interactive' } as const;
    const patch = { tq_s: 10, anti_thrash: 'off', policy: 'interactive' };
    expect(patchOf(now, all)).toEqual(patch);
  });

  it('explain every mode', () => {
    expect(new Set(modes().map(mode => mode.explanation)).size).toBe(3);
    expect(modeOf('always').label).toBe('always');
  });

  it('explain every known policy, and others in the daemon’s words', () => {
    const policies = [...gpu().policies, { name: 'lottery', summary: 'the lucky one first' }];
    const known = policies.map(policy => policyOf(gpu({ policies }), policy.name));
    expect(known.map(policy => policy.label)).toEqual(['round-robin', 'interactive', 'lottery']);
    expect(new Set(known.map(policy => policy.explanation)).size).toBe(3);
    expect(known[2]?.explanation).toBe('The lucky one first.');
    expect(policyOf(gpu(), 'gone').explanation).toBe('');
  });
});

describe('announcements', () => {
  const at = (...args: Parameters<typeof session>) => session(...args);
  const free = state([gpu({ sessions: [at('a')] })]);
  const waiting = (position: number, changes = {}, blocked = false) =>
    state([
      gpu({
        sessions: [at('a', { state: 'waiting', ...changes })],
        queue: [{ ...waits('a', position, 9), blocked }]
      })
    ]);
  const held = state([gpu({ sessions: [at('a', { state: 'running' })], holders: ['a'] })]);
  const suspended = waiting(1, { state: 'suspended' });

  it('announce a turn after a wait', () => {
    expect(announcement(moments(waiting(1)), held)).toBe('a.ipynb: your turn on GPU 0.');
  });

  it('say nothing about a turn without a wait, or about places and numbers', () => {
    expect(announcement(moments(free), held)).toBe('');
    expect(announcement(moments(waiting(2)), waiting(1))).toBe('');
    expect(announcement(moments(held), free)).toBe('');
  });

  it('announce the beginning of a wait, and a suspension', () => {
    expect(announcement(moments(free), waiting(2))).toBe('a.ipynb waits for GPU 0, 2nd in line.');
    expect(announcement(moments(held), suspended)).toBe(
      'a.ipynb was suspended; it goes on by itself.'
    );
    expect(announcement(moments(suspended), waiting(1))).toBe('');
  });

  it('announce faults', () => {
    const wrong = waiting(1, { problem_text: 'No room in RAM.' }, true);
    expect(announcement(moments(waiting(1)), wrong)).toBe('a.ipynb: No room in RAM.');
  });

  it('say nothing about the state in which the panel opened, or about others', () => {
    expect(announcement(moments(null), waiting(1))).toBe('');
    const other = (changes: object) =>
      state([gpu({ sessions: [at('x', { mine: false, ...changes })], holders: ['x'] })]);
    expect(announcement(moments(other({ state: 'waiting' })), other({ state: 'running' }))).toBe(
      ''
    );
  });
});
