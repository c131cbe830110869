"""Tests of a place in the GPU that is kept for a user who may be back soon, and of what is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kiwi_emulator as emulator
from kiwi_core.cli.status_text import gpu_lines
from kiwi_core.cli.terminal import Style

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

SLOW_BYTES_PER_S = 60 << 20
"""Moving both programs out and in takes ten seconds: a test can look meanwhile."""


def test_a_place_is_kept_told_and_used(
    start: Callable[..., Daemon], program: Callable[..., SessionProgram]
) -> None:
    daemon = start("1x256MiB", "--tq", "2")
    train, ann = program(daemon, 150, name="train.py"), program(daemon, 0, name="ann.ipynb")
    emulator.set_copy_bandwidth(daemon.state_path, SLOW_BYTES_PER_S)
    train.start_burst()
    ann.take(150, 2)  # the training makes way; then this burst is over
    status = daemon.wait_for(
        lambda s: s if any(one.keeps_s is not None for one in s.sessions) else None,
        "her place is kept",
    )
    kept = next(one for one in status.sessions if one.keeps_s is not None)
    assert (kept.pid, kept.state.value) == (ann.pid, "idle")
    assert status.queue[0].session == daemon.session(train.pid).id
    said = f"ann.ipynb ({kept.owner}) keeps the GPU for up to "
    assert any(said in line for line in gpu_lines(status, Style(False)))
    ann.start_burst()  # her next cell comes in time
    daemon.wait_for(lambda s: kept.id in s.holders, "she has the GPU again")
    ann.stop_burst()
    before = daemon.session(ann.pid)
    assert before.paged_out_bytes == 0
    # She does not come back: the training goes on, with all of its bytes.
    daemon.wait_state(train.pid, "running")
    assert train.stop_burst() > 0  # it has checked what it read
