"""Policies: which session is next, which is paged out, how long a turn is, which run side by side.

There is one file per policy; this module imports each. ``docs/policies.md`` says how to add one.
"""

from __future__ import annotations

import kiwi_core.sched.policy.interactive
import kiwi_core.sched.policy.round_robin  # noqa: F401 - they register themselves
from kiwi_core.sched.policy.registry import DEFAULT, check_name, make, names

__all__ = ["DEFAULT", "check_name", "make", "names"]
