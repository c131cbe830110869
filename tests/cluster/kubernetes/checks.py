"""Kiwi's chart and examples for Kubernetes: against real tools and schemas, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import chart_checks
import example_checks
import rights_checks
from verdict import Verdict, say

CHECKS = (
    chart_checks.check_schemas,
    chart_checks.check_refusals,
    chart_checks.check_rights,
    chart_checks.check_options,
    example_checks.check_pods,
    example_checks.check_spawned,
    example_checks.check_cdi,
    rights_checks.check_daemon,
)


def main() -> int:
    verdict = Verdict()
    for check in CHECKS:
        say(check.__name__)
        try:
            check(verdict)
        except Exception as error:  # noqa: BLE001 (the other checks still say what they find)
            verdict.judge(check.__name__, False, f"{type(error).__name__}: {error}")
    return verdict.close()


if __name__ == "__main__":
    sys.exit(main())
