"""Tests of the stream without a server: a snapshot and its deltas always give the state."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from stream_reader import applied
from untimed import UNTIMED

from kiwi_core.errors import PeerError
from kiwi_core.states import AntiThrash, HistoryKind, SessionState
from kiwi_core.wire import messages as w
from kiwi_jupyter.server_ext import diff, state_feed
from kiwi_jupyter.server_ext.daemon_follower import DaemonLost, StatusReceived
from kiwi_jupyter.server_ext.gpu_record import GpuRecord
from kiwi_jupyter.server_ext.model import Delta, Heartbeat, Server, Snapshot, State
from kiwi_jupyter.server_ext.state_feed import StateFeed


@pytest.fixture(autouse=True)
def jp_server_cleanup() -> None:
    """Replace the fixture that needs a server."""


@pytest.fixture(autouse=True)
def jp_asyncio_loop() -> None:
    """Replace the fixture that needs an event loop."""


SERVER = Server(version="1", may_set=True, history_s=1e9)
NAMES = ["s1", "s2", "s3"]
PATHS: list[dict[str, str]] = [{}, {"k1": "a.ipynb"}, {"k1": "b.ipynb", "k2": "c.ipynb"}]

seconds = st.sampled_from([0.0, 0.1, 0.25, 0.4, 5.0, 30.0])
maybe_seconds = st.none() | seconds


@st.composite
def statuses(draw: st.DrawFn) -> w.GpuStatus:
    there = draw(st.lists(st.sampled_from(NAMES), unique=True))
    waiting = draw(st.lists(st.sampled_from(there), unique=True)) if there else []
    return w.GpuStatus(
        uuid="GPU-1",
        name="A GPU",
        index=0,
        emulated=True,
        memory=w.MemoryStatus(
            total_bytes=100,
            free_bytes=draw(st.sampled_from([10, 90])),
            paged_out_bytes=0,
            host_budget_bytes=50,
        ),
        scheduler=w.SchedulerStatus(
            tq_s=draw(st.sampled_from([5.0, 30.0])), anti_thrash=AntiThrash.ON, serialised=False
        ),
        holders=[name for name in there if name not in waiting][:1],
        queue=[
            w.QueueEntry(
                session=name,
                position=place,
                expected_wait_s=draw(maybe_seconds),
                waited_s=draw(seconds),
            )
            for place, name in enumerate(waiting, 1)
        ],
        sessions=[
            w.SessionStatus(
                id=name,
                pid=int(name[1:]),
                owner="me",
                name=name,
                state=draw(st.sampled_from([SessionState.IDLE, SessionState.RUNNING])),
                resident_bytes=draw(st.sampled_from([0, 7])),
                paged_out_bytes=0,
                suspensions=0,
                held_s=draw(seconds),
                waited_s=draw(seconds),
                mine=True,
                kernel_id=f"k{name[1:]}",
                time_left_s=draw(maybe_seconds),
            )
            for name in there
        ],
        swaps=[
            w.SwapStatus(session=name, direction="out", bytes_moved=1, seconds=1.0, ago_s=3.0)
            for name in draw(st.lists(st.sampled_from(NAMES), max_size=2))
        ],
        daemon_pid=draw(st.sampled_from([10, 11])),
        uptime_s=draw(st.sampled_from([1.0, 100.0])),
        history_serial=1,
        may_set=draw(st.booleans()),
    )


@st.composite
def histories(draw: st.DrawFn) -> w.HistoryReport:
    entries = [
        w.HistoryEntry(
            id=id_,
            serial=id_,
            session=draw(st.sampled_from(NAMES)),
            kind=draw(st.sampled_from(list(HistoryKind))),
            began_ago_s=draw(seconds) + 30.0,
            ended_ago_s=draw(maybe_seconds),
        )
        for id_ in draw(st.lists(st.integers(1, 4), unique=True))
    ]
    named = {
        name: w.HistorySession(name=name, mine=True, kernel_id=f"k{name[1:]}") for name in NAMES
    }
    return w.HistoryReport(last=9, entries=entries, sessions=named)


steps = st.one_of(
    st.tuples(st.just("heard"), statuses(), st.none() | histories()),
    st.tuples(st.just("lost"), st.booleans(), st.none()),
    st.tuples(st.just("renamed"), st.sampled_from(PATHS), st.none()),
    st.tuples(st.just("gone"), st.none(), st.none()),
)


class World:
    """A hub that is fed as the service feeds it, with its own clock."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.feed = StateFeed(SERVER, wall=lambda: self.now)
        self.record = GpuRecord()
        self.paths: dict[str, str] = {}

    def step(self, kind: str, what: Any, history: Any) -> None:
        if kind == "heard":
            self.record.handle_status(StatusReceived(None, what, history, self.now))  # type: ignore[arg-type]
        elif kind == "lost":
            error = PeerError("disconnected", "It went.", "Wait.")
            self.record.handle_loss(DaemonLost(None, error, what, self.now))  # type: ignore[arg-type]
        elif kind == "renamed":
            self.paths = dict(what)
        else:
            self.record = GpuRecord()
        self.publish()

    def publish(self) -> None:
        gpu = self.record.gpu(paths=self.paths, history_since=0.0, may_set=True)
        gpus = {} if gpu is None else {gpu.uuid: (gpu, self.record.received_at)}
        self.feed.publish(gpus, SERVER)

    def state(self, *, may_set: bool = True) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(msgspec.json.encode(self.feed.state(may_set=may_set)))
        return state


def timeless(value: Any) -> Any:
    """Remove what only tells the time, and round times to the stream's tolerance."""
    if isinstance(value, dict):
        return {
            key: timeless(item)
            for key, item in value.items()
            if key not in diff.RELATIVE and key != "now"
        }
    return [timeless(item) for item in value] if isinstance(value, list) else value


def messages_of(reader: state_feed.Subscription) -> list[dict[str, Any]]:
    """Return all messages that are ready, without waiting."""
    found = []
    while reader.is_ready:
        with pytest.raises(StopIteration) as ended:
            reader.next().send(None)
        found.append(json.loads(ended.value.value))
    return found


@settings(UNTIMED, max_examples=150)
@given(st.lists(steps, max_size=12), st.lists(st.sampled_from([0.0, 0.2, 3.0])), st.booleans())
def test_a_snapshot_and_its_deltas_are_the_state(
    story: list[Any], pauses: list[float], may_set: bool
) -> None:
    world = World()
    reader = world.feed.subscribe(may_set=may_set)
    state: dict[str, Any] = {}
    for index, step in enumerate(story):
        world.now += pauses[index % len(pauses)] if pauses else 0.0
        world.step(*step)
        for message in messages_of(reader):
            msgspec.convert(message, Snapshot | Delta | Heartbeat)
            state = (
                {key: value for key, value in message.items() if key != "type"}
                if message["type"] == "snapshot"
                else applied(state, message)
            )
        assert timeless(state) == timeless(world.state(may_set=may_set))
        msgspec.convert(state, State)


@settings(UNTIMED, max_examples=80)
@given(st.lists(steps, min_size=1, max_size=10), st.data())
def test_a_reader_that_comes_back_lacks_nothing(story: list[Any], data: st.DataObject) -> None:
    world = World()
    left = data.draw(st.integers(0, len(story)), "leaves after")
    for step in story[:left]:
        world.step(*step)
    state = world.state()
    for step in story[left:]:
        world.step(*step)
    reader = world.feed.subscribe(may_set=True, epoch=state["epoch"], seq=state["seq"])
    for message in messages_of(reader):
        assert message["type"] == "delta"
        state = applied(state, message)
    assert timeless(state) == timeless(world.state())


@settings(UNTIMED, max_examples=80)
@given(statuses(), st.sampled_from(PATHS))
def test_time_alone_is_no_news(status: w.GpuStatus, paths: dict[str, str]) -> None:
    """Send the same content a minute later, with everything that a minute changes."""
    world = World()
    world.paths = paths
    world.step("heard", status, None)
    seq, passed = world.feed.seq, 60.0
    world.now += passed
    later = replace(
        status,
        uptime_s=status.uptime_s + passed,
        queue=[_later(entry, passed) for entry in status.queue],
        swaps=[replace(swap, ago_s=swap.ago_s + passed) for swap in status.swaps],
        sessions=[
            replace(
                one,
                held_s=one.held_s + passed,
                waited_s=one.waited_s + passed,
                time_left_s=None if one.time_left_s is None else one.time_left_s - passed,
            )
            for one in status.sessions
        ],
    )
    world.step("heard", later, None)
    assert world.feed.seq == seq


def _later(entry: w.QueueEntry, passed: float) -> w.QueueEntry:
    expected_s = entry.expected_wait_s
    return replace(
        entry,
        waited_s=entry.waited_s + passed,
        expected_wait_s=None if expected_s is None else expected_s - passed,
    )


# --- single things ------------------------------------------------------------------------------


def status(**fields: Any) -> w.GpuStatus:
    one = w.SessionStatus(
        id="s1",
        pid=1,
        owner="me",
        name="s1",
        state=SessionState.RUNNING,
        resident_bytes=1,
        paged_out_bytes=0,
        suspensions=0,
        held_s=1.0,
        waited_s=0.0,
        mine=True,
        kernel_id="k1",
        time_left_s=30.0,
    )
    basis = w.GpuStatus(
        uuid="GPU-1",
        name="A GPU",
        index=0,
        emulated=True,
        memory=w.MemoryStatus(total_bytes=9, free_bytes=9, paged_out_bytes=0, host_budget_bytes=9),
        scheduler=w.SchedulerStatus(tq_s=5.0, anti_thrash=AntiThrash.ON, serialised=False),
        holders=["s1"],
        queue=[],
        sessions=[one],
        daemon_pid=10,
        uptime_s=100.0,
        may_set=True,
    )
    return replace(basis, **fields)


def history(*entries: tuple[int, float, float | None]) -> w.HistoryReport:
    return w.HistoryReport(
        last=9,
        entries=[
            w.HistoryEntry(
                id=id_,
                serial=id_,
                session="s1",
                kind=HistoryKind.HELD,
                began_ago_s=began_s,
                ended_ago_s=ended_s,
            )
            for id_, began_s, ended_s in entries
        ],
        sessions={"s1": w.HistorySession(name="s1", mine=True, kernel_id="k1")},
    )


def test_a_turns_end_that_drifts_is_said_once_it_moved() -> None:
    world = World()
    world.step("heard", status(), None)
    seq = world.feed.seq
    # 0.1 s later each time: the third differs by more than 0.3 s from what was sent
    for _ in range(3):
        world.now += 0.1
        world.step("heard", status(), None)
        assert world.feed.seq == seq
    world.now += 0.1
    world.step("heard", status(), None)
    assert world.feed.seq == seq + 1
    assert world.state()["gpus"][0]["sessions"][0]["turn_ends_at"] == pytest.approx(
        world.now + 30.0
    )


def test_a_snapshot_tells_the_time_of_now() -> None:
    world = World()
    world.step("heard", status(), None)
    world.now += 12.0
    (gpu,) = world.state()["gpus"]
    assert gpu["uptime_s"] == 112.0
    assert gpu["sessions"][0]["held_s"] == 13.0
    assert gpu["sessions"][0]["time_left_s"] == 18.0


def test_a_killed_daemons_history_ends_where_it_was_last_seen() -> None:
    world = World()
    world.step("heard", status(), history((1, 20.0, None), (2, 9.0, 8.0)))
    world.now += 2.0
    world.step("heard", status(uptime_s=102.0), None)
    last_seen = world.now
    world.step("lost", False, None)
    world.now += 30.0
    world.step("heard", status(daemon_pid=11, uptime_s=1.0), history((1, 0.5, None)))
    old, other, new = world.state()["gpus"][0]["history"]
    assert old["ended_at"] == last_seen
    assert other["ended_at"] == last_seen - 10.0
    assert new["ended_at"] is None
    assert len({old["id"], other["id"], new["id"]}) == 3


def test_a_new_connection_to_the_same_daemon_repeats_nothing() -> None:
    world = World()
    world.step("heard", status(), history((1, 20.0, None), (2, 9.0, 8.0)))
    seq = world.feed.seq
    world.now += 4.0
    (session,) = status().sessions
    later = status(uptime_s=104.01, sessions=[replace(session, time_left_s=26.0)])
    world.step("heard", later, history((1, 24.02, None), (2, 13.1, 11.9)))
    assert world.feed.seq == seq


def test_a_slow_reader_loses_its_deltas_and_gets_a_snapshot() -> None:
    world = World()
    reader = world.feed.subscribe(may_set=True)
    assert [m["type"] for m in messages_of(reader)] == ["snapshot"]
    for tq_s in range(state_feed.BUFFER_MAX + 5):
        scheduler = w.SchedulerStatus(tq_s=float(tq_s), anti_thrash=AntiThrash.ON, serialised=False)
        world.step("heard", status(scheduler=scheduler), None)
    (only,) = messages_of(reader)
    assert only["type"] == "snapshot"
    assert only["seq"] == world.feed.seq
    assert only["gpus"][0]["scheduler"]["tq_s"] == state_feed.BUFFER_MAX + 4


@pytest.mark.parametrize(
    ("epoch", "seq"), [("other", 0), (None, -1), (None, 10_000), (None, 0)], ids=str
)
def test_who_cannot_be_helped_by_deltas_gets_a_snapshot(epoch: str | None, seq: int) -> None:
    world = World()
    for tq_s in range(1, state_feed.RING_MAX + 10):
        scheduler = w.SchedulerStatus(tq_s=float(tq_s), anti_thrash=AntiThrash.ON, serialised=False)
        world.step("heard", status(scheduler=scheduler), None)
    reader = world.feed.subscribe(may_set=True, epoch=epoch or world.feed.epoch, seq=seq)
    assert [m["type"] for m in messages_of(reader)] == ["snapshot"]


def test_who_may_not_set_is_never_told_otherwise() -> None:
    world = World()
    readers = [world.feed.subscribe(may_set=allowed) for allowed in (True, False)]
    for reader in readers:
        messages_of(reader)
    world.step("heard", status(), None)
    world.step("heard", status(may_set=False), None)
    world.step("heard", status(may_set=True), None)
    said = [
        [m["gpus"]["GPU-1"]["set"]["may_set"] for m in messages_of(reader)] for reader in readers
    ]
    assert said == [[True, False, True], [False, False, False]]
    assert not world.state(may_set=False)["gpus"][0]["may_set"]
    assert not world.state(may_set=False)["server"]["may_set"]


def test_a_quiet_stream_says_that_it_lives() -> None:
    world = World()
    reader = world.feed.subscribe(may_set=True)
    messages_of(reader)
    heartbeat = json.loads(asyncio.run(reader.next(0.01)))
    assert heartbeat == {"type": "heartbeat", "seq": 0, "now": world.now}


def test_a_heartbeat_never_says_more_than_the_reader_has() -> None:
    """This also holds if the server is busy when a heartbeat is due and something else happens."""
    world = World()
    reader = world.feed.subscribe(may_set=True)
    messages_of(reader)

    async def read() -> bytes:
        loop = asyncio.get_running_loop()
        reading = asyncio.create_task(reader.next(0.01))
        await asyncio.sleep(0)
        time.sleep(0.02)  # busy
        loop.call_soon(loop.call_soon, world.step, "heard", status(), None)
        return await reading

    message = json.loads(asyncio.run(read()))
    assert message["type"] == "delta" or message["seq"] == 0
