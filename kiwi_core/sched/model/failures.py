"""What went wrong with the operations on a session, and what is not tried again for now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiwi_core.config import Config
    from kiwi_core.states import Notice


@dataclass(eq=False)
class Failures:
    """The part of ``Session`` about failures. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    backoff_ns: int = 0
    """The last back-off after a refusal; 0 after a success."""
    backoff_until_ns: int = 0
    """No operation is tried on the session before this time."""
    draining: bool = False
    """Its last refusal was that work in the GPU must end first: it is tried again soon."""
    unmovable: bool = False
    """The driver cannot move its memory, or must not: during this burst its program is not
    suspended for a page-out again."""
    fixed: bool = False
    """Its memory could not be moved since its process was stopped. It is not tried again before
    the process goes on."""
    extra_room_bytes: int = 0
    """Room wanted beyond its need because a restore was refused for room; 0 after a success."""
    problem: Notice | None = None
    """What is wrong with this session as a target of operations."""
    problem_detail: str = ""

    def back_off(
        self, config: Config, now_ns: int, *, longest: bool, draining: bool = False
    ) -> None:
        """Try nothing on the session for a while, twice as long after each refusal, but not while
        its work in the GPU ends."""
        most_ns = config.refusal_backoff_max_ns
        last_ns = 0 if draining else self.backoff_ns
        doubled_ns = min(last_ns * 2 or config.refusal_backoff_ns, most_ns)
        self.draining = draining
        self.backoff_ns = most_ns if longest else doubled_ns
        self.backoff_until_ns = now_ns + self.backoff_ns

    def try_not_before(self, at_ns: int) -> None:
        """Set the end of the present back-off."""
        self.backoff_until_ns = at_ns

    def cannot_move(self) -> None:
        """Record that the driver cannot page its memory out; the next burst tries it again."""
        self.unmovable = True

    def may_move_again(self) -> None:
        self.unmovable = False

    def cannot_move_while_stopped(self) -> None:
        self.fixed = True

    def forget_refusals_while_stopped(self) -> None:
        """Drop the refusals that were due to its process being stopped."""
        if self.fixed:
            self.fixed = False
            self.backoff_ns = self.backoff_until_ns = 0

    def lacked_room(self, more_bytes: int) -> None:
        """Ask for more room next time: the scheduler was wrong about what is free."""
        self.extra_room_bytes += more_bytes

    def has_problem(self, notice: Notice, detail: str) -> None:
        self.problem = notice
        self.problem_detail = detail

    def problem_is_over(self) -> None:
        self.problem = None
        self.problem_detail = ""

    def operation_succeeded(self) -> None:
        self.backoff_ns = self.backoff_until_ns = self.extra_room_bytes = 0
        self.unmovable = self.draining = False
        if self.problem is not None:
            self.problem_is_over()
