"""Whether a session cannot be paged out for lack of RAM of its own, and whether it is ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Cramped:
    """The part of ``Session`` about too little RAM. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    cramped_ns: int = -1
    """When a page-out was last refused because its own job or container has too little RAM; -1: not
    in this burst or since it, or a later page-out has shown the opposite. It is not -1 exactly
    while the session is in ``State.cramped``.
    """
    ends_ns: int | None = None
    """When it is ended (``rules.ending``) unless things change; ``None``: not at all."""
    ended: bool = False
    """``EndSession`` was ordered; from then on it begins no burst. One that it has begun goes on
    until it has gone."""
    spared: bool = False
    """The daemon may not end its program."""
    shortage: str = ""
    """Why it cannot be paged out, and how much RAM would do, in words for its user. Set while
    ``cramped_ns`` is not -1."""

    def is_cramped(self, now_ns: int, shortage: str) -> None:
        self.cramped_ns = now_ns
        self.shortage = shortage

    def is_cramped_no_more(self) -> None:
        self.cramped_ns = -1
        self.shortage = ""
        self.ends_ns = None

    def end_at(self, at_ns: int | None) -> None:
        """Set when it is ended unless things change; ``None``: not at all."""
        self.ends_ns = at_ns

    def end_ordered(self) -> None:
        self.ended = True

    def cannot_be_ended(self) -> None:
        self.ended = False
        self.spared = True
