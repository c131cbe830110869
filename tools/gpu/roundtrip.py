"""A part of run_all.py: one page-out and page-in by the driver's checkpoint, for each library.

Every byte is hashed before and after. Rows: ``driver``, ``torch``, ``cupy``, ``jax``.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from callers import HERE, Caller, see_off, within
from stage import GIB, MIB

if TYPE_CHECKING:
    from callers import Answer
    from stage import Program, Stage

LIBRARIES = ("driver", "torch", "cupy", "jax")
EMULATED_BYTES, REAL_BYTES = 32 * MIB, GIB
READY_S = 60.0
"""Limit for the import of a large library, the contents and the hash, of four parallel programs."""
MOVE_S = 30.0
"""Limit of one direction: the driver's slowest reported rate is 1.1 GB/s."""
LATE_S = 3.0
"""Time beyond the pager's own limit, which does not bound a call that hangs."""
HASH_S = 30.0
TARGET = "every byte and address as before"


class BrokenOffError(RuntimeError):
    """This library's round trip ended early; the text says where and why."""


def run(stage: Stage) -> None:
    """Start the programs in parallel, because imports take longest; move one after the other."""
    size = EMULATED_BYTES if stage.emulated else REAL_BYTES
    programs: dict[str, Program] = {}
    with Caller(stage) as caller:
        try:
            for library in LIBRARIES:
                if _can_run(stage, library):
                    programs[library] = _start(stage, library, size)
            caller.start()
            for library, program in programs.items():
                _record(stage, caller, library, program)
        finally:
            for program in programs.values():
                program.end()


def _can_run(stage: Stage, library: str) -> bool:
    why = ""
    if library != "driver" and stage.emulated:
        why = "needs the CUDA runtime"
    elif library != "driver" and importlib.util.find_spec(library) is None:
        why = "is not installed"
    if why:
        stage.row(library, f"left out: {library} {why}", target=TARGET)
    return not why


def _start(stage: Stage, library: str, size: int) -> Program:
    env = stage.env | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, str(HERE / "roundtrip_job.py"), library, f"--bytes={size}"]
    program: Program = stage.spawn(command, env)
    return program


def _record(stage: Stage, caller: Caller, library: str, program: Program) -> None:
    try:
        found = _moved(stage, caller, program)
    except (TimeoutError, RuntimeError) as error:
        words = f"failed: {error or type(error).__name__}"
        stage.row(library, words, target=TARGET, passed=False)
    else:
        same = found["digest_same"] and found["addresses_same"]
        value = "identical" if same else "different"
        stage.row(library, value, target=TARGET, passed=same, **found)
    finally:
        see_off(caller, program)


def _moved(stage: Stage, caller: Caller, program: Program) -> dict[str, Any]:
    before = _said(stage, program, "the program did not come up", READY_S)
    out = _one_way(stage, caller, "page_out", program.pid)
    back = _one_way(stage, caller, "page_in", program.pid)
    program.say()
    after = _said(stage, program, "the program did not go on afterwards", HASH_S)
    return {
        "digest_same": before["digest"] == after["digest"],
        "addresses_same": before["addresses"] == after["addresses"],
        "bytes_hashed": after["bytes"],
        **_rate("out", out),
        **_rate("in", back),
    }


def _said(stage: Stage, program: Program, what: str, within_s: float) -> dict[str, Any]:
    try:
        return program.line(within(stage, within_s))
    except TimeoutError:
        raise BrokenOffError(f"{what} in {within_s:.0f} s") from None
    except RuntimeError as error:
        raise BrokenOffError(f"{what}: {error}") from error


def _one_way(stage: Stage, caller: Caller, call: str, pid: int) -> Answer:
    answer = caller.ask(call, MOVE_S + LATE_S, pid=pid, uuid=stage.uuid, within_s=MOVE_S)
    if not answer.ok:
        raise BrokenOffError(f"{call}: {answer}")
    return answer


def _rate(way: str, answer: Answer) -> dict[str, Any]:
    size, seconds = answer.value["bytes"], answer.value["seconds"]
    gb_s = round(size / seconds / 1e9, 3) if seconds else None
    return {f"{way}_s": round(seconds, 4), f"{way}_gb_s": gb_s, f"{way}_bytes": size}
