"""The typed calls for custom storage, on the emulated driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_processes import Worker

from kiwi_core import emulator
from kiwi_core.units import MIB

CALLER = (
    "from kiwi_core.errors import CallerError, GpuError\n"
    "from kiwi_core.gpu import custom_storage, driver as gd, memory\n"
    "def code(call, *args):\n"
    "    try: call(*args)\n"
    "    except (CallerError, GpuError) as error: return error.code\n"
)
Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs on a machine with a driver of the version asked for first."""
    state = tmp_path / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x64MiB"))
    workers: list[Worker] = []

    def start(setup: str, version: int = 13040) -> Worker:
        if not workers:
            emulator.set_driver_version(state, version)
        workers.append(Worker(emulator.environment(state, emulator.build())))
        workers[-1].do(setup)
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def test_out_and_in(start: Start) -> None:
    caller, target = start(CALLER + "init()"), start("init(); p = alloc(4 * MIB)")
    expected = target.get("fill(p, 3, 4 * MIB)")
    assert caller.get("custom_storage.why_not()") == ""
    caller.do(
        f"pid = {target.pid}; gd.lock(pid, 1000); out = custom_storage.begin_checkpoint(pid)\n"
        "piece, = out.memory; host = memory.host_allocate(piece.size_bytes)\n"
        "memory.copy_out(host, piece.address, piece.size_bytes, piece.stream)"
    )
    assert caller.get("[piece.device, piece.size_bytes]") == [0, 4 * MIB]
    assert caller.get("gd.checkpoint_state(pid).name") == "CHECKPOINTING"
    caller.do("out.complete()")
    assert caller.get("gd.checkpoint_state(pid).name") == "CHECKPOINTED"
    assert caller.get("code(out.complete)") == "already-complete"
    caller.do(
        "back = custom_storage.begin_restore(pid); piece, = back.memory\n"
        "memory.copy_in(host, piece.address, piece.size_bytes, piece.stream)\n"
        "back.complete(); gd.unlock(pid)"
    )
    assert target.get("digest(p, 4 * MIB)") == expected


def test_errors_leave_the_target_as_it_was(start: Start) -> None:
    caller, target = start(CALLER + "gd.init()"), start("init()")
    begin = f"code(custom_storage.begin_checkpoint, {target.pid})"
    caller.do(f"gd.lock({target.pid}, 1000)")
    assert caller.get(begin) == "no-own-context"
    assert caller.get(f"gd.checkpoint_state({target.pid}).name") == "LOCKED"
    caller.do(f"init(); gd.unlock({target.pid})")
    assert caller.get(begin) == "illegal-state"
    assert caller.get("code(custom_storage.begin_checkpoint, os.getpid())") == "unsupported"
    target.kill()
    assert caller.get(begin) == "no-such-process"


def test_an_older_driver_is_told_apart_before_anything_is_tried(start: Start) -> None:
    caller, target = start(CALLER + "init()", version=13000), start("init()")
    assert "13.0" in caller.get("custom_storage.why_not()")
    caller.do(f"gd.lock({target.pid}, 1000)")
    assert caller.get(f"code(custom_storage.begin_checkpoint, {target.pid})") == "unsupported"
    assert caller.get(f"gd.checkpoint_state({target.pid}).name") == "LOCKED"
    caller.do(f"gd.unlock({target.pid})")
