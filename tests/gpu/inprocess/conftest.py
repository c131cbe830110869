"""Fixture: one crowded GPU for all tests of this folder."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crowded_gpu import CrowdedGpu, GpuDaemon, Outsider
from pagers import IN_PROCESS

from kiwi_core.gpu import nvml
from kiwi_core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOM_BYTES = 8 * GIB
"""Room for two programs, each with a context, a framework's memory and 55 % of this as ballast."""

TQ_S = "0.5"


@contextmanager
def crowd(*daemon_args: str) -> Iterator[CrowdedGpu]:
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="kw-"))
        uuid = nvml.gpus()[0].uuid
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
        outsider = Outsider(env, ROOM_BYTES)
        stack.callback(outsider.close)
        daemon = GpuDaemon(Path(path), uuid, ("--tq", TQ_S, *daemon_args), pager=IN_PROCESS)
        stack.callback(daemon.stop)
        daemon.start()
        yield CrowdedGpu(daemon, ROOM_BYTES, env)


@pytest.fixture(scope="module")
def crowded() -> Iterator[CrowdedGpu]:
    with crowd() as gpu:
        yield gpu
