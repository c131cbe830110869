"""Tests of what surfaces say about a need that the memory of a notebook no longer explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kiwi_core.sched.model.needs import PEAKS_KEPT
from kiwi_core.wire.words import counted_text
from kiwi_jupyter.kernel.magics import KEPT_BY_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = pytest.mark.e2e

FAILS = """
def fail():
    held = memory
    raise ValueError("no")

fail()
"""


def test_why_says_what_a_notebook_counts_with_and_what_may_keep_its_memory(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x256MiB")
    a = make_notebook(daemon, "A", mib=120)
    assert a.run(FAILS).error == "ValueError"
    why = a.check("%kiwi why").text
    assert KEPT_BY_ERROR in why
    assert "counted" not in why, "it counts with what it holds"
    a.check("sys.last_traceback = sys.last_value = sys.last_exc = None")
    assert KEPT_BY_ERROR not in a.check("%kiwi why").text
    assert a.run("memory.no_such_method()").error == "AttributeError"
    assert KEPT_BY_ERROR not in a.check("%kiwi why").text, "no function failed"

    a.check("check(cuda.cuMemFree(memory.address))")
    a.wait_state("idle")
    daemon.wait_for(lambda _: counted_text(a.session), "the memory is gone, its peak counts")
    counted = counted_text(a.session)
    assert f"This notebook is {counted}." in a.check("%kiwi why").text
    assert f"Need{' ' * 11}{counted}" in a.check("print(get_ipython().run_line_magic("
        "'kiwi', 'status'))").text  # fmt: skip
    for _ in range(PEAKS_KEPT):
        a.check("%%kiwi gpu\ncheck(cuda.cuMemAlloc(1 << 20))")
        a.wait_state("idle")
    assert counted_text(a.session) == ""
    assert "counted" not in a.check("%kiwi why").text
