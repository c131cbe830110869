"""An emulated GPU whose memory custom storage moves: the pager in a process of its own, and
keepers beside the programs."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from cuda_processes import wait_until
from pager_process import PagerProcess
from worlds import EmulatedWorld, RealWorld, RunningSession

from kiwi_core import emulator, preload
from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.keeper.record import Place, Record, places

_STORED = """
import pathlib
from kiwi_core.pager.keepers import Keepers
from kiwi_core.pager.stored import StoredPager

keepers = Keepers(pathlib.Path({directory!r}), {uuid!r}, {library!r})
pager = StoredPager(
    {uuid!r},
    dataclasses.replace(DEFAULTS, **{config!r}),
    keepers=keepers,
    wanted={wanted!r},
    budget_bytes=lambda kept: {budget_bytes!r},
    crowded=lambda: {ahead!r},
    least_bytes={least_bytes!r},
    keeper_within_s={keeper_within_s!r},
    other_roots=lambda: roots,
    remember=lambda target, sizes: remembered.update(sizes),
    host_available_bytes=lambda pids: {host_bytes!r},
)
"""


class StoredPagerProcess(PagerProcess):
    def __init__(
        self,
        environment: dict[str, str],
        gpu_uuid: str,
        directory: Path,
        *,
        wanted: bool = True,
        ahead: bool = False,
        budget_bytes: int = 1 << 50,
        library: str = "",
        host_bytes: int = 1 << 50,
        least_bytes: int = 0,
        keeper_within_s: float = 60.0,
        **config: object,
    ) -> None:
        super().__init__(environment, gpu_uuid, **config)
        self.worker.do(
            _STORED.format(
                directory=str(directory), uuid=gpu_uuid, library=library, config=config,
                wanted=wanted, budget_bytes=budget_bytes, host_bytes=host_bytes, ahead=ahead,
                least_bytes=least_bytes, keeper_within_s=keeper_within_s,
            )
        )  # fmt: skip

    def got_ready(self, ref: ProcessRef, size_bytes: int) -> bool:
        """A keeper, and its RAM."""
        code = f"pager._provisions.now(ProcessRef({ref.pid}, {ref.start_ticks}), {size_bytes}, 60)"
        return bool(self.worker.get(code))

    def keeper(self, ref: ProcessRef, within_s: float = 0.0) -> dict[str, Any]:
        """What it says of itself."""
        code = f"keepers.ready(ProcessRef({ref.pid}, {ref.start_ticks}), {within_s})"
        return dict(self.worker.get(f"__import__('msgspec').structs.asdict({code})"))


class KeeperPlace:
    """Where keepers have their files, and which of them live."""

    directory: Path

    def leftover_keepers(self) -> list[int]:
        return [pid for ref, pid in self.keepers() if not processes.alive(ref)]

    def keepers(self) -> list[tuple[ProcessRef, int]]:
        """Living keepers: whose, and their pids."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"kiwi_core.pager.keeper" not in words:
                continue
            options = json.loads(words[words.index(b"kiwi_core.pager.keeper") + 1])
            pid = int(path.parent.name)
            if options["directory"] == str(self.directory) and processes.stat_of(pid):
                ref = ProcessRef(options["pid"], options["start_ticks"])
                found.append((ref, pid))
        return found

    def keeper_pid(self, session: RunningSession) -> int:
        return next(pid for ref, pid in self.keepers() if ref == session.root)

    def keeper_ref(self, session: RunningSession) -> ProcessRef:
        ref = processes.ref_of(self.keeper_pid(session))
        assert ref is not None
        return ref

    def kill_keeper(self, session: RunningSession) -> None:
        pid = self.keeper_pid(session)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: processes.stat_of(pid) is None, "the keeper is dead")

    def record(self, session: RunningSession) -> Record | None:
        return Place(self.directory, session.root).read()

    def connect(self, session: RunningSession) -> socket.socket:
        return Place(self.directory, session.root).connect()


class StoredWorld(KeeperPlace, EmulatedWorld):
    residue_bytes = 0

    def __init__(self, state: Path, gpus: str = "1x64MiB", *, hashing: bool = False) -> None:
        self.directory = state.parent / "keepers"
        self.library = str(preload.library()) if hashing else ""
        super().__init__(state, gpus)

    def new_pager(self, **more: Any) -> StoredPagerProcess:  # type: ignore[override]
        emulator.set_driver_version(self.path, 13040)
        more.setdefault("library", self.library)
        pager = StoredPagerProcess(self.environment, self.gpu_uuid, self.directory, **more)
        self._closing.append(pager.close)
        return pager

    def start(self, size_bytes: int, **more: Any) -> RunningSession:
        """With its keeper there already, as in a daemon that has looked at it."""
        session = super().start(size_bytes, **more)
        if size_bytes:
            self.pager.got_ready(session.root, size_bytes + self.context_bytes)
        return session

    def start_without_keeper(self, size_bytes: int, **more: Any) -> RunningSession:
        return super().start(size_bytes, **more)

    def free_bytes(self) -> int:
        """Once the keepers of programs that have ended have ended, too."""
        wait_until(lambda: not self.leftover_keepers(), "keepers end with their programs")
        return super().free_bytes()

    def close(self) -> None:
        super().close()
        wait_until(lambda: not self.keepers(), "all keepers have ended")
        if self.directory.exists():
            with_dead = [place for place in places(self.directory) if place.read() is not None]
            for place in with_dead:  # of keepers that a test has killed
                place.leave()


class RealStoredWorld(KeeperPlace, RealWorld):
    """On a real GPU: it has run nowhere yet."""

    def __init__(self, gpu_uuid: str, directory: Path) -> None:
        self.directory = directory
        super().__init__(gpu_uuid)

    def new_pager(self, **more: Any) -> StoredPagerProcess:  # type: ignore[override]
        library = str(preload.library())
        pager = StoredPagerProcess({}, self.gpu_uuid, self.directory, library=library, **more)
        self._closing.append(pager.close)
        return pager

    def start(self, size_bytes: int, **more: Any) -> RunningSession:
        session = super().start(size_bytes, **more)
        if size_bytes:
            self.pager.got_ready(session.root, size_bytes)
        return session
