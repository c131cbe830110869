"""Tests of the epilog: it ends what a job has left, also where its memory is out of the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import Daemon, running_daemon, wait_until
from session_program import SessionProgram

from kiwi_core.gpu import processes

if TYPE_CHECKING:
    from collections.abc import Iterator

EPILOG = Path(__file__).parents[2] / "packaging/slurm/kiwi_epilog"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon("1x128MiB", "--tq", "0.3") as made:
        yield made


def test_a_paged_out_program_of_the_job_ends_and_others_stay(daemon: Daemon) -> None:
    left = SessionProgram(daemon, 60, name="left", environment={"SLURM_JOB_ID": "77"})
    other = SessionProgram(daemon, 60, name="other", environment={"SLURM_JOB_ID": "78"})
    free = SessionProgram(daemon, 8, name="of no job")
    try:
        left.worker.do("client.release()")
        daemon.wait_state(left.pid, "paged-out")
        assert left.pid not in [one.pid for one in daemon.books().processes if one.device_bytes]
        said = subprocess.run(
            ["sh", str(EPILOG)], capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, **daemon.env, "KIWI_PYTHON": sys.executable, "SLURM_JOB_ID": "77"},
        )  # fmt: skip
        assert f"process {left.pid} is left of job 77" in said.stdout
        wait_until(lambda: processes.stat_of(left.pid) is None, "it has ended")
        assert other.intact()
        assert free.intact()
    finally:
        for one in (left, other, free):
            one.close()


def test_a_node_without_a_daemon_has_nothing_to_end(tmp_path: Path) -> None:
    subprocess.run(
        ["sh", str(EPILOG)], check=True, timeout=60,
        env={**os.environ, "KIWI_PYTHON": sys.executable, "SLURM_JOB_ID": "77",
             "KIWI_SOCKET_DIR": str(tmp_path)},
    )  # fmt: skip
