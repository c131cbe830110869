import { describe, expect, it } from 'vitest';

import { myWait, noNews } from '../../src/panel/mywait-model';
import { GIB, NOW, gpu, scheduler, session, waits } from '../../stories/make';

const busy = scheduler({ serialised: true, why: '' });

describe('my wait', () => {
  it('is counted down while the notebook waits, and says its place', () => {
    const wait = myWait(
      gpu({
        sessions: [
          session('a', { state: 'running' }),
          session('b', { state: 'waiting' }),
          session('c', { state: 'waiting', mine: false })
        ],
        holders: ['a'],
        queue: [waits('c', 1, 10), waits('b', 2, 40)]
      }),
      'kernel-b'
    );
    expect(wait).toMatchObject({ tone: 'waiting', counts: true, headline: 'Waiting' });
    expect(wait.session?.id).toBe('b');
    expect(wait.details[0]).toBe('2nd of 2, after another user');
  });

  it('is about the notebook in front, even if another own one is more pressing', () => {
    const sessions = [session('a', { state: 'waiting' }), session('b')];
    const queue = [waits('a', 1, 10)];
    expect(myWait(gpu({ sessions, queue }), 'kernel-b').session?.id).toBe('b');
    const elsewhere = myWait(gpu({ sessions, queue }), 'elsewhere');
    expect(elsewhere).toMatchObject({ session: null, tone: 'busy' });
    expect(elsewhere.details).toContain('The notebook in front does not use this GPU yet.');
    expect(myWait(gpu({ sessions, queue }), null).session?.id).toBe('a');
  });

  it('is about the first of several waiting notebooks', () => {
    const sessions = [session('a', { state: 'waiting' }), session('b', { state: 'suspended' })];
    const queue = [waits('b', 1, 10), waits('a', 2, 20)];
    expect(myWait(gpu({ sessions, queue }), null).session?.id).toBe('b');
  });

  it('is never about a notebook of another user', () => {
    const sessions = [session('x', { mine: false, state: 'running' })];
    const wait = myWait(gpu({ sessions, holders: ['x'], scheduler: busy }), null);
    expect(wait).toMatchObject({ session: null, headline: 'Busy', tone: 'busy' });
    expect(wait.details[0]).toBe('A cell that you run now waits for its turn.');
  });

  it('says of a kernel whose environment has no Kiwi what that means', () => {
    const text = 'It has no Kiwi.';
    const none = myWait(gpu(), 'k', { takes_part: false, text });
    expect(none).toMatchObject({ headline: 'Takes no part', tone: 'wrong', details: [text] });
    const gated = myWait(gpu(), 'k', { takes_part: true, text });
    expect(gated).toMatchObject({ headline: 'Free', details: [text] });
    const session_ = session('k', { kernel_id: 'k' });
    const running = gpu({ sessions: [session_], holders: ['k'] });
    expect(myWait(running, 'k', { takes_part: true, text })).toMatchObject({
      headline: 'Has the GPU',
      details: [text]
    });
  });

  it('says what moves while it waits', () => {
    const leaving = session('a', { state: 'paging-out' });
    const coming = session('b', { state: 'paging-in', paged_out_bytes: 3 * GIB });
    const waiting = session('c', { state: 'waiting' });
    const of = (...sessions: ReturnType<typeof session>[]) =>
      myWait(gpu({ sessions, queue: [waits(sessions[0]?.id ?? '', 1, 4)] }), null).details[1];
    expect(of(waiting, leaving)).toBe('The memory of a.ipynb is paging out to make room.');
    expect(of(waiting, coming)).toBe('The memory of b.ipynb is paging in first.');
    expect(of(coming)).toBe('Its memory is paging in (3 GiB).');
  });

  it('says that a suspended cell goes on by itself', () => {
    const sessions = [session('a', { state: 'suspended' })];
    expect(myWait(gpu({ sessions, queue: [waits('a', 1, 9)] }), null).details).toContain(
      'Suspended in mid-cell; it goes on by itself, and nothing is lost.'
    );
  });

  it('counts nothing down if a fault holds it up, and names the fault', () => {
    const sessions = [session('a', { state: 'waiting', problem_text: 'No room in RAM.' })];
    const blocked = { ...waits('a', 1, null), blocked: true };
    const wait = myWait(gpu({ sessions, queue: [blocked] }), null);
    expect(wait).toMatchObject({ tone: 'wrong', counts: false, headline: 'Held up' });
    expect(wait.details).toEqual(['No room in RAM.', '1st of 1.']);
  });

  it('says that the GPU is yours, alone or beside others', () => {
    const a = session('a', { state: 'running', turn_ends_at: NOW + 21 });
    const alone = myWait(gpu({ sessions: [a], holders: ['a'] }), null);
    expect(alone).toMatchObject({ headline: 'Has the GPU', tone: 'yours', holds: true });
    expect(alone.details).toEqual([]);
    const b = session('b', { state: 'running', mine: false });
    const both = myWait(gpu({ sessions: [a, b], holders: ['a', 'b'] }), null);
    expect(both.details).toEqual([]);
  });

  it('says where the memory is if it is not in the GPU', () => {
    const out = session('a', { state: 'paged-out', paged_out_bytes: 2 * GIB });
    expect(myWait(gpu({ sessions: [out] }), null)).toMatchObject({
      headline: 'Paged out',
      details: ['Its 2 GiB are in system RAM and come back when you run a cell.']
    });
    const lost = session('a', { state: 'lost', problem_text: 'Gone. Restart.' });
    expect(myWait(gpu({ sessions: [lost] }), null)).toMatchObject({
      tone: 'wrong',
      details: ['Gone. Restart.']
    });
  });

  it('says that the GPU is free if nobody is in the way, and also names faults', () => {
    expect(myWait(gpu(), null)).toMatchObject({ headline: 'Free', session: null });
    const refused = session('a', { problem: 'page-out-refused', problem_text: 'Could not move.' });
    expect(myWait(gpu({ sessions: [refused] }), null).details).toEqual([
      'A cell starts at once.',
      'Could not move.'
    ]);
  });

  it('says after the state why the driver moves what a library was asked to move', () => {
    const left = session('a', { pager_text: 'A profiler is in it.' });
    expect(myWait(gpu({ sessions: [left] }), 'kernel-a').details).toContain('A profiler is in it.');
  });

  it('says after the state that a notebook has no gate or is stopped', () => {
    const bare = session('a', { guarded: false, unguarded_text: 'No gate. Restart.' });
    expect(myWait(gpu({ sessions: [bare] }), 'kernel-a').details).toContain('No gate. Restart.');
    const stopped = session('a', { stopped: 'stopped by Ctrl-Z' });
    expect(myWait(gpu({ sessions: [stopped] }), 'kernel-a').details).toContain('stopped by Ctrl-Z');
  });

  it('promises nothing if it shows the last known state', () => {
    const a = session('a', { state: 'running', turn_ends_at: NOW + 21 });
    const wait = noNews(myWait(gpu({ sessions: [a], holders: ['a'] }), null));
    expect(wait).toMatchObject({ headline: 'Not up to date', counts: false, holds: false });
    expect(wait.details).toEqual(['Last known: has the GPU.']);
    expect(noNews(myWait(gpu(), null)).details).toEqual(['Last known: free.']);
    const waiting = gpu({
      sessions: [session('a', { state: 'waiting' })],
      queue: [waits('a', 1, 9)]
    });
    expect(noNews(myWait(waiting, null)).details).toEqual(['Last known: waiting.', '1st of 1']);
  });
});
