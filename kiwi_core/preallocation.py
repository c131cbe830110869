"""Have frameworks take GPU memory as they need it.

JAX takes three quarters of the free memory at its first use, and TensorFlow nearly all of it. On a
shared GPU nobody else fits beside that, and each move carries all of it. Both have a setting, which
programs under Kiwi get unless their user has chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.config import is_set

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

ENV_PREALLOCATE: Final = "KIWI_PREALLOCATE"
"""``1``: leave the frameworks as they are. Set to ``0`` where Kiwi has changed a setting."""

_AS_NEEDED: Final = (
    (
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "false",
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"),
    ),
    ("TF_FORCE_GPU_ALLOW_GROWTH", "true", ("TF_GPU_ALLOCATOR",)),
)
"""A framework's variable, its value, and variables by which a user has chosen, too. Sources: JAX,
"GPU memory allocation"; TensorFlow, "Limiting GPU memory growth"."""

TEXT: Final = (
    "JAX and TensorFlow take GPU memory as they need it, not in advance"
    f" ({ENV_PREALLOCATE}=1 before the start leaves them as they are)"
)


def switch_off(env: MutableMapping[str, str]) -> None:
    """Change the environment of a program that is about to start, or has not begun yet."""
    if is_set(env, ENV_PREALLOCATE):
        return
    for name, value, choices in _AS_NEEDED:
        if name not in env and not any(choice in env for choice in choices):
            env[name] = value
            env[ENV_PREALLOCATE] = "0"


def is_off(env: Mapping[str, str]) -> bool:
    """Return whether Kiwi has changed a setting of this environment."""
    return env.get(ENV_PREALLOCATE) == "0"
