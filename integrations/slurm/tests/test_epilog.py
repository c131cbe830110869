"""Test of the epilog that ends what a job has left on the GPUs, with a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from daemon import Daemon, running_daemon, wait_until
from session_program import SessionProgram

EPILOG = Path(__file__).parents[3] / "integrations/slurm/kiwi_epilog"
TAKES = """
import os, sys
from cuda.bindings import driver as cuda
cuda.cuInit(0)
cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])[1])
print(os.getpid(), cuda.cuMemAlloc(32 << 20)[0].name, flush=True)
sys.stdin.read()
"""


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
            run_epilog(daemon, "41")
            wait_until(lambda: daemon.session(left.pid) is None, "the program of the job is gone")
            assert daemon.session(other.pid) is not None, "another job's is left alone"
        finally:
            left.close()
            other.close()


def test_the_program_under_kiwi_run_is_ended_with_it() -> None:
    with running_daemon("1x256MiB") as daemon:
        env = os.environ | daemon.env | {"SLURM_JOB_ID": "41"}
        command = [sys.executable, "-m", "kiwi_core.cli", "run", "--require", "--"]
        with subprocess.Popen(
            [*command, sys.executable, "-c", TAKES], env=env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        ) as run:  # fmt: skip
            assert run.stdout is not None
            pid, answer = run.stdout.readline().split()
            assert answer == "CUDA_SUCCESS"
            assert int(pid) != run.pid
            daemon.wait_state(run.pid, "running")
            run_epilog(daemon, "41")
            wait_until(lambda: not psutil.pid_exists(int(pid)), "the program itself is gone")


def run_epilog(daemon: Daemon, job: str) -> None:
    env = os.environ | daemon.env | {"SLURM_JOB_ID": job}
    subprocess.run([sys.executable, str(EPILOG)], env=env, check=True)
