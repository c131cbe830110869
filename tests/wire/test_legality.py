"""Tests of which messages are legal when, and that an illegal message changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kiwi_core.errors import PeerError
from kiwi_core.wire.legality import ANSWERS, TABLE, ConnectionState, Conversation, Move
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    BringBack,
    ClientMessage,
    EndBurst,
    GetHistory,
    GetStatus,
    GetStory,
    Goodbye,
    Hello,
    Ping,
    Release,
    Role,
    Set,
    Withdraw,
)
from kiwi_core.wire.pager import (
    PagerDone,
    PagerOutcome,
    PagerState,
    WantLease,
    WantRoom,
)

LINK_SAYS = (
    PagerState(state="resident"),
    PagerDone(op=1, outcome=PagerOutcome.MOVED),
    WantLease(),
    WantRoom(request=1, bytes=1),
)
LINK_KINDS = tuple(type(message) for message in LINK_SAYS)

KINDS: tuple[type, ...] = ClientMessage.__args__  # type: ignore[attr-defined]


def hello(role: Role = Role.SESSION, **fields: object) -> Hello:
    return Hello(protocol=PROTOCOL, role=role, client="test", **fields)  # type: ignore[arg-type]


def after(*messages: ClientMessage) -> Conversation:
    talk = Conversation()
    for message in messages:
        talk.accept(message)
    return talk


def facts(talk: Conversation) -> dict[str, object]:
    return dict(vars(talk))


def assert_illegal(talk: Conversation, message: ClientMessage, code: str = "out-of-order") -> None:
    before = facts(talk)
    with pytest.raises(PeerError) as caught:
        talk.accept(message)
    assert caught.value.code == code
    assert facts(talk) == before


def test_a_whole_conversation_is_legal() -> None:
    talk = after(
        hello(), Ping(), Acquire(burst=1), GetStatus(), EndBurst(burst=1, lingering=True),
        EndBurst(burst=1), Acquire(burst=2), Withdraw(burst=2), Acquire(burst=7),
        EndBurst(burst=7), Release(), Goodbye(), EndBurst(burst=7), Ping(),
    )  # fmt: skip
    assert talk.state is ConnectionState.LEAVING


@pytest.mark.parametrize("message", [Ping(), Acquire(burst=1), GetStatus(), Goodbye()])
def test_hello_comes_first(message: ClientMessage) -> None:
    assert_illegal(Conversation(), message)


def test_hello_comes_once() -> None:
    assert_illegal(after(hello()), hello())


@pytest.mark.parametrize("version", [0, 2, -1])
def test_another_version_is_told(version: int) -> None:
    other = Hello(protocol=version, role=Role.SESSION, client="x")
    assert_illegal(Conversation(), other, "protocol-version")


@pytest.mark.parametrize(
    "message",
    [Acquire(burst=1), Withdraw(burst=1), EndBurst(burst=1), Goodbye()],
)
def test_an_observer_never_holds_the_gpu(message: ClientMessage) -> None:
    talk = after(
        hello(Role.OBSERVER), GetStatus(watch=True), Set(tq_s=1.0), GetStory(session="s"),
        GetHistory(), Release(session="s"), BringBack(session="s"),
    )  # fmt: skip
    assert_illegal(talk, message)


def test_a_library_only_speaks_of_its_memory() -> None:
    talk = after(hello(Role.PAGER), *LINK_SAYS, Ping())
    for message in (Acquire(burst=1), EndBurst(burst=1), Goodbye(), GetStatus(), Set(tq_s=1.0)):
        assert_illegal(talk, message)


@pytest.mark.parametrize("message", LINK_SAYS, ids=lambda message: type(message).__name__)
def test_nobody_else_speaks_as_a_library(message: ClientMessage) -> None:
    for talk in (Conversation(), after(hello()), after(hello(Role.OBSERVER))):
        assert_illegal(talk, message)


def test_one_who_leaves_asks_for_nothing_more() -> None:
    moves = (Acquire(burst=1), Release(), BringBack(), Goodbye(), Set(tq_s=1.0), hello())
    for message in moves:
        assert_illegal(after(hello(), Goodbye()), message)


def test_burst_numbers_go_up() -> None:
    talk = after(hello(burst=3), Acquire(burst=5), EndBurst(burst=5))
    for burst in (1, 4, 5):
        assert_illegal(talk, Acquire(burst=burst))
    talk.accept(Acquire(burst=6))


def test_a_burst_ends_before_the_next() -> None:
    assert_illegal(after(hello(), Acquire(burst=1)), Acquire(burst=2))


@pytest.mark.parametrize("burst", [1, 3])
def test_only_the_last_burst_is_ended(burst: int) -> None:
    talk = after(hello(burst=1), Acquire(burst=2))
    assert_illegal(talk, EndBurst(burst=burst))
    assert_illegal(talk, Withdraw(burst=burst))


def test_a_wait_is_resumed_on_a_new_connection() -> None:
    talk = after(hello(burst=4), Acquire(burst=4))
    assert_illegal(talk, Acquire(burst=4))
    talk.accept(Withdraw(burst=4))


def test_a_burst_is_resumed_on_a_new_connection() -> None:
    talk = after(hello(burst=4, in_burst=True))
    assert_illegal(talk, Acquire(burst=5))
    talk.accept(EndBurst(burst=4))
    talk.accept(Acquire(burst=5))


def test_a_burst_that_runs_has_a_number() -> None:
    assert_illegal(Conversation(), hello(burst=0, in_burst=True))


def test_the_table_speaks_of_every_message_and_every_state() -> None:
    assert set(TABLE) == set(ConnectionState)
    moves = {move for row in TABLE.values() for move in row}
    assert moves == {kind for kind in KINDS if kind is not Hello} | set(Role)


def test_every_question_has_an_answer() -> None:
    without = {kind for kind in KINDS if kind not in ANSWERS}
    link = {PagerState, PagerDone, WantLease, WantRoom}
    assert without == {Acquire, Withdraw, EndBurst} | link


def describe() -> str:
    """Return the table as a Mermaid state diagram, as ``docs/protocol.md`` holds it."""
    lines = ["stateDiagram-v2", f"    [*] --> {ConnectionState.NEW.value}"]
    for state, moves in TABLE.items():
        for target in ConnectionState:
            labels = [_label(move) for move, following in moves.items() if following is target]
            if labels:
                lines.append(f"    {state.value} --> {target.value}: {', '.join(labels)}")
        lines.append(f"    {state.value} --> closed: end of stream, fatal error")
    return "\n".join([*lines, "    closed --> [*]", ""])


def _label(move: Move) -> str:
    if isinstance(move, Role):
        return f"hello ({move.value})"
    return str(move.__struct_config__.tag)


def test_the_documentation_shows_the_table() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "protocol.md").read_text()
    diagram = f"```mermaid\n{describe()}```"
    assert diagram in text, f"put this into docs/protocol.md:\n{diagram}"


MESSAGES = st.one_of(
    st.builds(
        lambda protocol, role, burst, in_burst: Hello(
            protocol=protocol, role=role, client="x", burst=burst, in_burst=in_burst
        ),
        st.sampled_from((PROTOCOL, PROTOCOL, PROTOCOL, 9)),
        st.sampled_from((Role.SESSION, Role.SESSION, Role.OBSERVER, Role.PAGER)),
        st.integers(0, 3),
        st.booleans(),
    ),
    st.builds(lambda b: Acquire(burst=b), st.integers(1, 12)),
    st.builds(lambda b: Withdraw(burst=b), st.integers(1, 12)),
    st.builds(lambda b, on: EndBurst(burst=b, lingering=on), st.integers(1, 12), st.booleans()),
    st.sampled_from(
        (
            Release(),
            BringBack(),
            Goodbye(),
            GetStatus(),
            Set(tq_s=1.0),
            GetStory(session="s"),
            GetHistory(since=3),
            Ping(),
        )
    ),
    st.sampled_from(LINK_SAYS),
)


class AnyTalk(RuleBasedStateMachine):
    """Compare random conversations with an independent record of which messages were legal."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Conversation()
        self.said: list[ClientMessage] = []

    @rule(message=MESSAGES)
    def say_anything(self, message: ClientMessage) -> None:
        before = facts(self.talk)
        if self.may_say(message):
            self.talk.accept(message)
            self.said.append(message)
            return
        with pytest.raises(PeerError) as caught:
            self.talk.accept(message)
        assert caught.value.code in ("out-of-order", "protocol-version")
        assert facts(self.talk) == before

    @precondition(lambda self: self.said)
    @rule(step=st.integers(1, 3))
    def ask_for_the_next_burst(self, step: int) -> None:
        self.say_anything(Acquire(burst=self.last_burst() + step))

    @precondition(lambda self: self.last_burst() > 0)
    @rule(kind=st.sampled_from((EndBurst, Withdraw)))
    def end_the_last_burst(self, kind: type[EndBurst | Withdraw]) -> None:
        self.say_anything(kind(burst=self.last_burst()))

    def may_say(self, message: ClientMessage) -> bool:
        """Apply the rules of docs/protocol.md to the history, without a table."""
        if not self.said or isinstance(message, Hello):
            return (
                not self.said
                and isinstance(message, Hello)
                and message.protocol == PROTOCOL
                and (message.burst > 0 or not message.in_burst)
            )
        first = self.said[0]
        assert isinstance(first, Hello)
        if first.role is Role.PAGER or isinstance(message, LINK_KINDS):
            return first.role is Role.PAGER and isinstance(message, (Ping, *LINK_KINDS))
        if isinstance(message, (Ping, GetStatus, GetStory, GetHistory)):
            return True
        if first.role is Role.OBSERVER:
            return isinstance(message, (Set, Release, BringBack))
        if isinstance(message, EndBurst):
            return message.burst == self.last_burst()
        if any(isinstance(m, Goodbye) for m in self.said):
            return False
        if isinstance(message, Withdraw):
            return message.burst == self.last_burst()
        if isinstance(message, Acquire):
            return self.may_acquire(first, message.burst)
        return True

    def may_acquire(self, first: Hello, burst: int) -> bool:
        asked = [m.burst for m in self.said if isinstance(m, Acquire)]
        if asked:
            return burst > asked[-1] and not self.burst_open()
        if burst == first.burst:
            return True
        return burst > first.burst and not self.burst_open()

    def burst_open(self) -> bool:
        for message in reversed(self.said):
            if isinstance(message, (EndBurst, Withdraw)):
                return False
            if isinstance(message, Acquire):
                return True
            if isinstance(message, Hello):
                return message.in_burst
        return False

    def last_burst(self) -> int:
        bursts = [m.burst for m in self.said if isinstance(m, (Hello, Acquire))]
        return bursts[-1] if bursts else 0

    @invariant()
    def the_account_agrees(self) -> None:
        assert self.talk.burst == self.last_burst()
        assert self.talk.in_burst == self.burst_open()
        assert (self.talk.state is ConnectionState.NEW) == (not self.said)


TestAnyTalk = AnyTalk.TestCase
