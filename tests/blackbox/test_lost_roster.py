"""Tests of a daemon that is killed while notebooks are out, and whose roster is lost."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import gpu_cells
import pytest
from kernels import running_kernel
from kiwi_box import OURS, running_box, wait_until

if TYPE_CHECKING:
    from kernels import Kernel
    from kiwi_box import KiwiBox

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

MIB_EACH = 150
"""Two of these do not fit."""


def notebook(stack: ExitStack, box: KiwiBox, name: str, pager: str) -> Kernel:
    """Start a kernel that has filled its share of the GPU."""
    env = {"KIWI_SOCKET_DIR": str(box.directory), "JPY_SESSION_NAME": f"/home/{name}.ipynb"}
    if pager == "inprocess":
        env |= {one: box.program_env[one] for one in OURS if one in box.program_env}
    env["KIWI_PAGER"] = pager
    kernel: Kernel = stack.enter_context(running_kernel(env))
    kernel.check(gpu_cells.PRELUDE)
    kernel.check(gpu_cells.take(MIB_EACH, sum(name.encode())), timeout_s=120.0)
    return kernel


def lose_what_was_written_down(box: KiwiBox) -> None:
    rosters = list((box.directory / "state").glob("*.roster"))
    assert rosters
    for path in rosters:
        path.unlink()


@pytest.mark.parametrize("pager", ["checkpoint", "inprocess"])
def test_a_notebook_that_is_out_gets_on(pager: str) -> None:
    with ExitStack() as stack:
        box = stack.enter_context(running_box("1x256MiB", "--tq", "5"))
        first = notebook(stack, box, "first", pager)
        second = notebook(stack, box, "second", pager)
        box.wait_session("first.ipynb", lambda s: s["state"] == "paged-out", "the first is out")
        box.kill_daemon()
        lose_what_was_written_down(box)
        box.start()
        wait_until(lambda: len((box.status_or_none() or {}).get("sessions", [])) == 2, "both back")
        for kernel in (first, second, first):
            cell = kernel.run(gpu_cells.INTACT, timeout_s=90.0)
            assert cell.text.endswith("INTACT\n"), f"{cell.outputs()}\n{box.log()}"


@pytest.mark.parametrize("pager", ["checkpoint", "inprocess"])
def test_a_cell_that_was_suspended_gets_on(pager: str) -> None:
    with ExitStack() as stack:
        box = stack.enter_context(running_box("1x256MiB", "--tq", "0.5"))
        kernels = [notebook(stack, box, name, pager) for name in ("first", "second")]
        stop = box.directory / "stop"
        cells = [kernel.send(gpu_cells.work(until=stop)) for kernel in kernels]
        box.wait_session("first.ipynb", lambda s: s["suspensions"], "the first was suspended")
        box.wait_session("second.ipynb", lambda s: s["suspensions"], "the second was suspended")
        box.kill_daemon()
        lose_what_was_written_down(box)
        box.start()
        stop.touch()
        for kernel, cell in zip(kernels, cells, strict=True):
            assert kernel.finish(cell, 120.0).status == "ok", f"{cell.traceback}\n{box.log()}"
            assert kernel.run(gpu_cells.INTACT, timeout_s=90.0).text.endswith("INTACT\n")
