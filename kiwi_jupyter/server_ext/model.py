"""The structs of REST and the stream. ``docs/rest.md`` describes them in prose.

The statuses are the protocol's own (``kiwi_core.wire.messages``) with what only this server knows
added: notebook paths, absolute times, whether the daemon is there. Times ending in ``_at`` or
``_since`` are Unix seconds on this server's clock; ``_s`` are seconds, ``_bytes`` bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from kiwi_core.states import AntiThrash, HistoryKind, Priority
from kiwi_core.wire.messages import (
    GpuStatus,
    PolicyName,
    QueueEntry,
    SessionStatus,
    StoryLine,
    UsageRow,
)

UnixTime = Annotated[float, Meta(description="Unix seconds on the server's clock.")]


class Problem(Struct, frozen=True, kw_only=True):
    """What is wrong, and what to do about it. Also the body of every error."""

    code: str
    message: str
    remedy: str = ""


class Session(SessionStatus, frozen=True, kw_only=True):
    """A session. ``path`` is the notebook's path on this server, for this user's sessions only."""

    path: str | None = None
    turn_ends_at: UnixTime | None = None
    keeps_until: UnixTime | None = None
    """By when its memory goes out for the first in line unless its next cell comes before; ``None``
    where ``keeps_s`` is."""


class Waiter(QueueEntry, frozen=True, kw_only=True):
    waiting_since: UnixTime
    expected_at: UnixTime | None = None
    """Expected end of the wait; ``None``: unknown."""
    expected_low_at: UnixTime | None = None
    expected_high_at: UnixTime | None = None
    """The wait likely ends between these two; ``None``: not known."""


class History(Struct, frozen=True, kw_only=True):
    """A bar of the timeline. ``id`` is never used again, not even by a restarted daemon."""

    id: str
    session: str
    name: str
    kind: HistoryKind
    began_at: UnixTime
    ended_at: UnixTime | None
    bytes_moved: int = 0
    ok: bool = True
    hinted: bool = False
    path: str | None = None


class Gpu(GpuStatus, frozen=True, kw_only=True):
    """A GPU. ``reachable``: its daemon answers; otherwise the rest is the last known state."""

    queue: list[Waiter]  # type: ignore[assignment]  # only ever read
    sessions: list[Session]  # type: ignore[assignment]
    history: list[History]
    reachable: bool = True
    problem: Problem | None = None


class BareKernel(Struct, frozen=True, kw_only=True):
    """A kernel whose environment has no Kiwi. ``takes_part``: its calls pass Kiwi's gate, and take
    turns. ``text`` says what that means for its user, and what to do."""

    takes_part: bool
    text: str


class Server(Struct, frozen=True, kw_only=True):
    """``problem`` says why there are no GPUs to show. ``bare_kernels``: by Jupyter's kernel id."""

    version: str
    may_set: bool
    history_s: float
    problem: Problem | None = None
    bare_kernels: dict[str, BareKernel] = {}


class State(Struct, frozen=True, kw_only=True):
    """The whole state. ``epoch`` names this run of the server, ``seq`` the last change."""

    epoch: str
    seq: int
    now: UnixTime
    server: Server
    gpus: list[Gpu]


class Snapshot(State, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """First message of a stream, and again for a reader that was too slow."""


class Delta(Struct, frozen=True, kw_only=True, tag_field="type", tag="delta", omit_defaults=True):
    """The changes from ``seq - 1`` to ``seq``."""

    seq: int
    now: UnixTime
    server: Server | None = None
    gpus: dict[str, GpuDelta] | None = None
    gpus_gone: list[str] | None = None


class GpuDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The change of a GPU. ``set``: whole values of fields of the GPU; ``sessions``: changed
    fields, all fields of a new one; ``history``: entries that are new or replace the one with their
    id.
    """

    set: dict[str, Any] | None = None
    sessions: dict[str, dict[str, Any]] | None = None
    gone: list[str] | None = None
    history: list[History] | None = None


class Heartbeat(Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """Sent when there was nothing else to send for a while."""

    seq: int
    now: UnixTime


Message = Snapshot | Delta | Heartbeat


# --- requests and their answers -----------------------------------------------------------------


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``PATCH`` on a GPU: at least one of the fields."""

    tq_s: Annotated[float, Meta(description="Time quantum, in seconds.")] | UnsetType = UNSET
    anti_thrash: AntiThrash | UnsetType = UNSET
    policy: PolicyName | UnsetType = UNSET


class SettingsInForce(Struct, frozen=True, kw_only=True):
    tq_s: float
    anti_thrash: AntiThrash
    policy: str


class SessionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``PATCH`` on a session, and its answer."""

    priority: Priority


class BroughtBack(Struct, frozen=True, kw_only=True):
    """``why``: in plain words, why it has not begun."""

    begun: bool
    why: str


class Story(Struct, frozen=True, kw_only=True):
    lines: list[StoryLine]


class GpuUsage(Struct, frozen=True, kw_only=True):
    """The usage of a GPU. ``rows``: the longest holder comes first. ``began_at``: since when it was
    counted; ``null``: nothing was. ``problem``: why the usage of this GPU is not known.
    """

    uuid: str
    index: int
    name: str
    began_at: UnixTime | None = None
    complete: bool = True
    rows: list[UsageRow] = []
    problem: Problem | None = None


class Usage(Struct, frozen=True, kw_only=True):
    gpus: list[GpuUsage]
