"""The policies by name. Each registers itself where it is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from kiwi_core.sched.model.policy import Policy

DEFAULT: Final = "interactive"

POLICIES: Final[dict[str, type[Policy]]] = {}

_P = TypeVar("_P", bound="type[Policy]")


def register(policy: _P) -> _P:
    """Register ``policy``; a class decorator."""
    POLICIES[policy.name] = policy
    return policy


def names() -> tuple[str, ...]:
    """Return the names of all policies, the default first."""
    return (DEFAULT, *sorted(POLICIES.keys() - {DEFAULT}))


def check_name(name: str) -> None:
    """Raise ``CallerError("unknown-policy")``, which lists all names, if ``name`` is unknown."""
    if name not in POLICIES:
        raise CallerError(
            "unknown-policy",
            f"There is no policy {name!r}.",
            f"Choose one of: {', '.join(names())}.",
        )


def make(name: str) -> Policy:
    """Return a new policy for one scheduler. Raise ``CallerError("unknown-policy")``."""
    check_name(name)
    return POLICIES[name]()
