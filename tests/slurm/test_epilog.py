"""Test of the epilog that ends what a job has left on the GPUs, with a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from daemon import running_daemon, wait_until
from session_program import SessionProgram

EPILOG = Path(__file__).parents[2] / "packaging/slurm/kiwi_epilog"


def test_the_epilog_ends_what_its_job_left_also_what_is_paged_out() -> None:
    with running_daemon("1x256MiB") as daemon:
        programs = {}
        for job in ("41", "42"):
            os.environ["SLURM_JOB_ID"] = job
            try:
                programs[job] = SessionProgram(daemon, 32, name=job)
            finally:
                del os.environ["SLURM_JOB_ID"]
        left, other = programs["41"], programs["42"]
        try:
            daemon.wait_state(left.pid, "paged-out")  # the other's needs are unknown
            env = os.environ | daemon.env | {"SLURM_JOB_ID": "41"}
            subprocess.run([sys.executable, str(EPILOG)], env=env, check=True)
            wait_until(lambda: daemon.session(left.pid) is None, "the program of the job is gone")
            assert daemon.session(other.pid) is not None, "another job's is left alone"
        finally:
            left.close()
            other.close()
