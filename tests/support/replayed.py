"""Check that the scheduler makes the decisions of a journal again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.replay import JournalEntry, JournalHeader, Replay, goes_on

if TYPE_CHECKING:
    from collections.abc import Iterable


def differences(records: Iterable[JournalHeader | JournalEntry]) -> int:
    """Return how many answers differ from the recorded ones. Fail if a part of the journal cannot
    be checked."""
    players: list[Replay] = []
    for record in records:
        if isinstance(record, JournalEntry):
            players[-1].feed(record)
        elif not players or not goes_on(record):
            players.append(Replay(record))
    assert players
    assert all(player.checked for player in players)
    return sum(player.differences for player in players)
