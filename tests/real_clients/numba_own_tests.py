"""Run tests that numba-cuda ships, and print how each ended as one line of JSON.

    numba_own_tests.py MODULE…      modules of numba.cuda.tests.cudadrv

``{"passed": [id…], "skipped": [id…], "failed": {id: "the exception, as one line"}}``
"""

from __future__ import annotations

import json
import sys
import unittest
import warnings
from typing import Any


class Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.passed.append(test.id())

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.failed[test.id()] = " ".join(f"{err[0].__name__}: {err[1]}".split())

    addFailure = addError  # noqa: N815

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.addError(subtest, err)


def main() -> None:
    names = [f"numba.cuda.tests.cudadrv.{module}" for module in sys.argv[1:]]
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    outcomes = Outcomes()
    with warnings.catch_warnings():
        suite.run(outcomes)
    skipped = [test.id() for test, _ in outcomes.skipped]
    found = {"passed": outcomes.passed, "skipped": skipped, "failed": outcomes.failed}
    print(json.dumps(found), flush=True)


main()
