"""Policies: who is next, who goes out, for how long, who may run beside whom.

One file each; a new one is imported here. ``docs/policies.md`` says how.
"""

from __future__ import annotations

import kiwi_core.sched.policy.interactive
import kiwi_core.sched.policy.round_robin  # noqa: F401 - they register themselves
from kiwi_core.sched.policy.registry import DEFAULT, check_name, make, names

__all__ = ["DEFAULT", "check_name", "make", "names"]
