"""Seeded simulation with faults: at least 200,000 events, every invariant after each of them.

``python tests/sched/test_simulation.py FIRST LAST EVENTS`` runs other seeds by hand; if one fails,
it prints the end of the journal.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter

import pytest
from simulation import (
    Plan,
    Simulation,
    away_plan_of,
    cramped_plan_of,
    owned_plan_of,
    unguarded_plan_of,
)

from kiwi_core.sched.policy import names
from kiwi_core.sched.replay import JournalEntry, Replay, decode_line, encode_line
from kiwi_core.states import Notice

pytestmark = pytest.mark.seeded

CHUNKS = 16
SEEDS_PER_CHUNK = 25
OWNED_PER_CHUNK = 15
AWAY_PER_CHUNK = 5
UNGUARDED_PER_CHUNK = 15
CRAMPED_PER_CHUNK = 15
EVENTS_PER_SEED = 520


@functools.cache
def played(chunk, seeds, plan_of=lambda seed: None):
    """Return the counts of a chunk's seeds in all, and its notices."""
    seen, notices = Counter(), Counter()
    for seed in range(chunk * seeds, (chunk + 1) * seeds):
        counts = run(seed, EVENTS_PER_SEED, plan_of(seed))
        notices.update(counts.notices)
        seen.update({name: n for name, n in vars(counts).items() if isinstance(n, int)})
    return seen, notices


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_invariants_hold_over_many_seeds(chunk):
    seen, _ = played(chunk, SEEDS_PER_CHUNK)
    assert seen["events"] >= 200_000 // CHUNKS


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_hold_where_libraries_own_the_memory(chunk):
    played(chunk, OWNED_PER_CHUNK, owned_plan_of)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_hold_where_contexts_fill_the_gpu(chunk):
    played(chunk, AWAY_PER_CHUNK, away_plan_of)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_hold_where_programs_have_no_gate_or_are_stopped(chunk):
    played(chunk, UNGUARDED_PER_CHUNK, unguarded_plan_of)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_hold_where_jobs_have_too_little_ram(chunk):
    played(chunk, CRAMPED_PER_CHUNK, cramped_plan_of)


def run(seed, events, plan=None):
    simulation = Simulation(seed, plan)
    try:
        return simulation.run(events)
    except Exception as error:
        ending = "\n".join(tail(simulation, 40))
        raise AssertionError(
            f"seed {seed}, event {simulation.counts.events}: {error}\n{simulation.plan}\n{ending}"
        ) from error


def tail(simulation, lines):
    player = Replay(simulation.header, checks=False)
    told = [str(line) for entry in simulation.journal for line in player.feed(entry)]
    return told[-lines:]


QUICK_CHUNKS = range(2)
"""Those of ``make test`` (``tests/thorough.txt``): they reach everything."""


def in_all(seeds, *plan_of):
    seen, notices = Counter(), Counter()
    for chunk in QUICK_CHUNKS:
        more_seen, more_notices = played(chunk, seeds, *plan_of)
        seen += more_seen
        notices += more_notices
    return seen, notices


def test_the_simulation_reaches_what_it_is_for():
    """A simulation in which nothing goes wrong proves nothing."""
    seen, notices = in_all(SEEDS_PER_CHUNK)
    for name in (
        "suspensions", "page_ins", "refusals", "no_room", "overdue", "lost", "kills", "restarts",
        "granted_in_parallel", "brought_back", "room_made", "room_denied", "kept_out",
    ):  # fmt: skip
        assert seen[name] > 2, name
    # The first two come only with programs without a gate and with jobs of too little RAM; the
    # third is shown, never sent; the daemon sends the others itself.
    others = {Notice.BLOCKED_UNGUARDED, Notice.STOPPED, Notice.LITTLE_RAM}
    assert set(notices) == set(Notice) - others


def test_the_simulation_of_owning_libraries_reaches_what_it_is_for():
    seen, _ = in_all(OWNED_PER_CHUNK, owned_plan_of)
    for name in ("rests", "rests_back", "lost", "overdue", "restarts"):
        assert seen[name] > 2, name


def test_the_simulation_of_contexts_reaches_what_it_is_for():
    seen, _ = in_all(AWAY_PER_CHUNK, away_plan_of)
    for name in ("rests", "rests_early", "rests_back", "rests_back_at_once", "lost"):
        assert seen[name] > 2, name


def test_the_simulation_of_programs_without_a_gate_reaches_what_it_is_for():
    seen, notices = in_all(UNGUARDED_PER_CHUNK, unguarded_plan_of)
    for name in ("unguarded_grants", "stops", "suspensions", "page_ins", "restarts"):
        assert seen[name] > 2, name
    assert notices[Notice.BLOCKED_UNGUARDED] > 2


def test_the_simulation_of_cramped_jobs_reaches_what_it_is_for():
    seen, notices = in_all(CRAMPED_PER_CHUNK, cramped_plan_of)
    for name in ("stops", "kills", "page_ins", "restarts"):
        assert seen[name] > 2, name
    assert notices[Notice.PAGE_OUT_REFUSED] > 2


@pytest.mark.parametrize("policy", names())
def test_the_bound_holds_in_a_crowd(policy):
    """Ten sessions each want most of the GPU all the time, and nothing fails."""
    for seed in range(5):
        Simulation(seed, Plan(sessions=10, bytes_max=900 << 20, policy=policy)).run(1000)


def test_a_journal_replays_to_the_same_answers():
    for seed in (1, 2, 4, 5):
        simulation = Simulation(seed)
        simulation.run(400)
        player = Replay(decode_line(encode_line(simulation.header)))
        for entry in simulation.journal:
            again = decode_line(encode_line(entry))
            assert isinstance(again, JournalEntry)
            assert again == entry
            player.feed(again)
        assert player.differences == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_events():
    for seed in range(10_000, 11_000):
        run(seed, 1000)


if __name__ == "__main__":
    first, last, events = map(int, sys.argv[1:4])
    for seed in range(first, last):
        run(seed, events)
