"""Two real notebooks whose memory custom storage moves; the daemon is killed with its supervisor
while one of them is out. The rest is in ``tests/pager/stored`` and ``tests/daemon``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cuda_processes import wait_until

from kiwi_core.gpu.processes import ref_of
from kiwi_core.pager.keeper.record import Place

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = pytest.mark.e2e


def is_kept(daemon: Daemon, notebook: Notebook) -> bool:
    (directory,) = (daemon.directory / "state").glob("GPU-*.keepers")
    ref = ref_of(notebook.pid)
    record = Place(directory, ref).read() if ref is not None else None
    return record is not None and record.way == "out"


def test_two_notebooks_and_a_daemon_that_is_killed(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x128MiB", "--storage", "custom", "--tq", "0.3")
    a, b = (make_notebook(daemon, name, mib=60) for name in ("A", "B"))

    def kept() -> bool:
        """The first times its keeper may not be there yet."""
        for notebook in (a, b):
            notebook.assert_intact()
        return is_kept(daemon, a)

    wait_until(kept, "A goes out by its keeper")
    daemon.kill_all()
    assert is_kept(daemon, a)
    daemon.start()
    for notebook in (a, b, a, b):
        notebook.assert_intact()
    assert daemon.terminate() == 0
    out = [notebook for notebook in (a, b) if notebook.is_out()]
    assert len(out) == 1, "there is no room for both"
    assert is_kept(daemon, out[0]), "by somebody who does not end with the daemon"
    daemon.start()
    for notebook in (a, b):
        notebook.assert_intact()
