"""Seeded simulation with faults: at least 200,000 events, every invariant after each of them.

``python tests/sched/test_simulation.py FIRST LAST EVENTS`` runs other seeds by hand; if one fails,
it prints the end of the journal.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from simulation import Plan, Simulation, owned_plan_of, unguarded_plan_of

from kiwi_core.sched.policy import names
from kiwi_core.sched.replay import JournalEntry, Replay, decode_line, encode_line
from kiwi_core.states import Notice

CHUNKS = 16
SEEDS_PER_CHUNK = 25
OWNED_PER_CHUNK = 15
UNGUARDED_PER_CHUNK = 15
EVENTS_PER_SEED = 520


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_invariants_hold_over_many_seeds(chunk):
    events = 0
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        events += run(seed, EVENTS_PER_SEED).events
    assert events >= 200_000 // CHUNKS


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_hold_where_libraries_own_the_memory(chunk):
    for seed in range(chunk * OWNED_PER_CHUNK, (chunk + 1) * OWNED_PER_CHUNK):
        run(seed, EVENTS_PER_SEED, owned_plan_of(seed))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_they_hold_where_programs_have_no_gate_or_are_stopped(chunk):
    for seed in range(chunk * UNGUARDED_PER_CHUNK, (chunk + 1) * UNGUARDED_PER_CHUNK):
        run(seed, EVENTS_PER_SEED, unguarded_plan_of(seed))


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


def test_the_simulation_reaches_what_it_is_for():
    """A simulation in which nothing goes wrong proves nothing."""
    seen = Counter()
    notices = Counter()
    for seed in range(140):
        counts = Simulation(seed).run(300)
        notices.update(counts.notices)
        seen.update({name: n for name, n in vars(counts).items() if isinstance(n, int)})
    for name in (
        "suspensions", "page_ins", "refusals", "no_room", "overdue", "lost", "kills", "restarts",
        "granted_in_parallel", "brought_back", "room_made", "room_denied", "kept_out",
    ):  # fmt: skip
        assert seen[name] > 2, name
    # The first one comes only with programs without a gate; the second is shown, never sent.
    assert set(notices) == set(Notice) - {Notice.BLOCKED_UNGUARDED, Notice.STOPPED}


def test_so_does_that_of_libraries_that_own_the_memory():
    seen = Counter()
    for seed in range(40):
        counts = Simulation(seed, owned_plan_of(seed)).run(300)
        seen.update({name: n for name, n in vars(counts).items() if isinstance(n, int)})
    for name in ("rests", "lost", "overdue", "restarts"):
        assert seen[name] > 2, name


def test_so_does_that_of_programs_without_a_gate():
    seen = Counter()
    notices = Counter()
    for seed in range(40):
        counts = Simulation(seed, unguarded_plan_of(seed)).run(300)
        notices.update(counts.notices)
        seen.update({name: n for name, n in vars(counts).items() if isinstance(n, int)})
    for name in ("unguarded_grants", "stops", "suspensions", "page_ins", "restarts"):
        assert seen[name] > 2, name
    assert notices[Notice.BLOCKED_UNGUARDED] > 2


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
