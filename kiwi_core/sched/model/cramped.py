"""Whether a session cannot be paged out for lack of RAM of its own."""

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

    def is_cramped(self, now_ns: int) -> None:
        self.cramped_ns = now_ns

    def is_cramped_no_more(self) -> None:
        self.cramped_ns = -1
