"""Tests that a CUDA graph that was captured before a page-out works afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checks import unharmed
from notebooks import Notebook, assert_books_agree

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.usefixtures("pager")]

CAPTURE = """
stream = check(cuda.cuStreamCreate(1))
global_mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
check(cuda.cuStreamBeginCapture(stream, global_mode))
check(cuda.cuMemcpyDtoDAsync(memory.scratch, memory.address + 3 * PIECE, PIECE, stream))
check(cuda.cuMemcpyDtoDAsync(memory.scratch + 512, memory.address + 4 * PIECE, 512, stream))
executable = check(cuda.cuGraphInstantiate(check(cuda.cuStreamEndCapture(stream)), 0))

def replayed():
    check(cuda.cuMemsetD8(memory.scratch, 0, PIECE))
    check(cuda.cuGraphLaunch(executable, stream))
    check(cuda.cuStreamSynchronize(stream))
    found, three, four = bytearray(PIECE), bytearray(PIECE), bytearray(PIECE)
    for data, at in ((found, memory.scratch), (three, memory.address + 3 * PIECE),
                     (four, memory.address + 4 * PIECE)):
        check(cuda.cuMemcpyDtoH(data, at, PIECE))
    return found == three[:512] + four[:512] + three[1024:]
"""


def test_a_graph_replays_after_another_notebook_had_the_gpu(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x128MiB", "--tq", "600")
    a = make_notebook(daemon, "A", mib=72)
    a.check(CAPTURE)
    assert a.check("replayed()").result == "True"
    b = make_notebook(daemon, "B", mib=72)
    for _ in range(2):
        a.wait_state("paged-out")
        assert a.check("memory.write(3); replayed()").result == "True"
        b.wait_state("paged-out")
        b.assert_intact()
    a.assert_intact()
    assert_books_agree(daemon)
    daemon.stop()
    unharmed(daemon)
