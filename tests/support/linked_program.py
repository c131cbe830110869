"""Processes with the scripted library of ``linked_library.py``, controlled by a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda_processes import Worker

from kiwi_core.gpu import processes
from kiwi_core.pager.api import Target
from kiwi_core.units import SessionId

if TYPE_CHECKING:
    from pathlib import Path

    from kiwi_core.gpu.processes import ProcessRef

_LINK = """
from linked_library import Library
init()
library = Library({path!r}, unowned={unowned!r})
if {size}:
    library.take_pieces({size}, {seed})
"""

QUICK = ("1x64MiB", "--idle-after", "0.3")
"""A daemon's options for tests that begin when a program that has taken memory is idle."""


class LinkedProgram:
    """A program whose library owns ``size_bytes`` of its memory, but not ``unowned_bytes``."""

    def __init__(
        self,
        environment: dict[str, str],
        path: Path,
        size_bytes: int = 0,
        *,
        seed: int = 1,
        unowned_bytes: int = 0,
    ) -> None:
        self.worker = Worker(environment)
        ref = processes.ref_of(self.worker.pid)
        assert ref is not None
        self.root: ProcessRef = ref
        unowned = {"managed": unowned_bytes} if unowned_bytes else {}
        self.worker.do(_LINK.format(path=str(path), size=size_bytes, seed=seed, unowned=unowned))
        if unowned_bytes:
            self.worker.do(f"u = alloc({unowned_bytes}); fill(u, 1, {unowned_bytes})")

    @property
    def pid(self) -> int:
        return self.worker.pid

    @property
    def target(self) -> Target:
        return Target(SessionId(f"s{self.pid}"), self.root)

    def digest(self) -> str:
        return str(self.worker.get("library.digest()"))

    def touch(self) -> None:
        self.worker.send("library.digest()")

    def touched(self, within_s: float = 0.0) -> bool:
        return self.worker.answered(within_s)

    def finish_touch(self) -> None:
        self.worker.answer()

    def script(self, action: str, *faults: str) -> None:
        self.worker.do(f"library.faults[{action!r}] = {list(faults)!r}")

    def get(self, code: str) -> Any:
        return self.worker.get(code)

    def do(self, code: str) -> None:
        self.worker.do(code)

    def kill(self) -> None:
        self.worker.kill()

    def close(self) -> None:
        self.worker.close()


_GATED = """
from linked_library import Library
init()
library = Library({path!r}, owns=False)
p = alloc({size})
fill(p, {seed}, {size})
def digest_gated():
    with library:
        return f"{{p}} {{digest(p, {size})}}"
"""


class GatedProgram(LinkedProgram):
    """A program whose library is only a gate: the driver moves its memory."""

    def __init__(
        self, environment: dict[str, str], path: Path, size_bytes: int, *, seed: int = 1
    ) -> None:
        self.worker = Worker(environment)
        ref = processes.ref_of(self.worker.pid)
        assert ref is not None
        self.root = ref
        self.worker.do(_GATED.format(path=str(path), size=size_bytes, seed=seed))

    def digest(self) -> str:
        return str(self.worker.get("digest_gated()"))

    def touch(self) -> None:
        self.worker.send("digest_gated()")
