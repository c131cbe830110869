"""Tests of the owner of a linked process, which is read from ``/proc`` once, and bounded."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from kiwi_core.daemon.links.links import ANCESTORS_MAX, Links, above
from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry, session_id
from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef

if TYPE_CHECKING:
    from collections.abc import Iterator

UID = os.getuid()


def myself() -> ProcessRef:
    ref = processes.ref_of(os.getpid())
    assert ref is not None
    return ref


def test_no_walk_through_proc_for_each_session_that_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        registry = SessionRegistry(lambda _member: None)
        links = Links(registry, 1 << 30, lambda _link: None)
        me = myself()
        parent = next(processes.ancestors(me))
        link = links.take(me, UID, "")
        monkeypatch.setattr(processes, "ancestors", _fail)
        monkeypatch.setattr(processes, "stat_of", _fail)
        monkeypatch.setattr(processes, "ref_of", _fail)
        assert links.nearest(link) is None
        own, above_it = (SessionRecord(session_id(ref), ref, UID) for ref in (me, parent))
        registry._by_ref[parent] = above_it
        assert links.nearest(link) is above_it
        registry._by_ref[me] = own
        assert links.nearest(link) is own
        assert links.nearest(link, but=own) is above_it
        above_it.uid = UID + 1
        assert links.nearest(link, but=own) is None, "another user's"
        asyncio.get_running_loop().remove_reader(link.pidfd)
        os.close(link.pidfd)

    asyncio.run(story())


def _fail(*_: object) -> Iterator[ProcessRef]:
    raise AssertionError("looked at /proc")


def test_a_tower_of_ancestors_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = (ProcessRef(pid, 1) for pid in itertools.count(1))
    monkeypatch.setattr(processes, "ancestors", lambda _ref: tower)
    assert ANCESTORS_MAX < len(above(myself())) <= ANCESTORS_MAX + 2
