"""Settings of Hypothesis for tests that may stand still for seconds in the middle of an example."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No example has a time limit. By default an example may take 0.2 s, and the first ten a second.
In CI Hypothesis has no such limits either."""
