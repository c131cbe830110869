"""Let the machine prove itself for Kiwi's library, once, while nobody needs the GPU.

The proof is a process of its own (``bench.proof``): it may crash or hang. It ends at once when
somebody wants the GPU, and begins anew at the next idle moment.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import interpreter
from kiwi_core.config import AUTO
from kiwi_core.gpu import processes, proofs
from kiwi_core.states import GateOnly

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.gpu.nvml import GpuInfo
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.gpu.proofs import Proof

log = structlog.get_logger(__name__)

IDLE_S: Final = 2.0
"""So long nobody has needed the GPU before the first proof begins."""

PAUSE_MAX_S: Final = 600.0
"""Longest such time: it doubles each time that somebody needs the GPU in mid-proof, so that a GPU
in use is not proven again and again in vain."""

TROUBLE_MAX_S: Final = 3600.0
"""The same after proofs that showed nothing for another reason."""

LOOK_S: Final = 0.1
"""A program that wants the GPU waits this much longer at most for what a proof holds of it."""

KNOWN_LOOK_S: Final = 5.0
"""Interval of looks for a proof that somebody else has made (``kiwi doctor --prove``)."""

ENDS_WITHIN_S: Final = 400.0
"""A proof ends itself after two minutes, and a compiler before it takes a few."""


@dataclass(eq=False, repr=False)
class SelfProof:
    """``idle``: whether nobody needs the GPU. ``pager`` is the daemon's setting, ``coherent``: on
    this machine no library may own."""

    _gpu: GpuInfo
    _idle: Callable[[], bool]
    _pager: str = AUTO
    _coherent: bool = False
    proof: Proof | None = None
    ref: ProcessRef | None = None
    """The process that proves, while it does."""
    trouble: str = ""
    """Why the last proof showed nothing; "": there was none, or the GPU was needed."""
    _pause_s: float = IDLE_S
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        if self._gpu.mig:
            self.trouble = "the GPU is divided (MIG)"
        self._load()

    def objection(self) -> GateOnly | None:
        """Return why the library of a program that asks for nothing does not own; ``None``: it
        does."""
        if self._pager != AUTO:
            return GateOnly.NOT_ASKED
        if self._coherent:
            return GateOnly.COHERENT
        if self.proof is None:
            return GateOnly.UNPROVEN
        return None if self.proof.passed else GateOnly.PROOF_FAILED

    async def run(self) -> None:
        """Prove the machine when it is idle, unless that is known; and learn of other proofs, until
        cancelled."""
        while True:
            if self._is_wanted():
                await self._await_idle()
                if self._is_wanted():
                    await self._prove()
            else:
                await asyncio.sleep(KNOWN_LOOK_S)
            self._load()

    def _is_wanted(self) -> bool:
        return self.objection() is GateOnly.UNPROVEN and not self._gpu.mig

    def _load(self) -> None:
        found = proofs.load(*proofs.kind_of(self._gpu))
        if found is not None and found != self.proof:
            log.info("proof", passed=found.passed, failed=found.failed, at=found.unix_s)
            self.proof = found

    async def _await_idle(self) -> None:
        since_s = looked_s = self._loop.time()
        while self._is_wanted() and self._loop.time() - since_s < self._pause_s:
            await asyncio.sleep(LOOK_S)
            if not self._idle():
                since_s = self._loop.time()
            if self._loop.time() - looked_s > KNOWN_LOOK_S:  # somebody else may have proven it
                looked_s = self._loop.time()
                self._load()

    async def _prove(self) -> None:
        log.info("proving", gpu=self._gpu.name)
        try:
            process = await asyncio.create_subprocess_exec(
                *interpreter.module("kiwi_core.bench.proof", self._gpu.uuid),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE, start_new_session=True, cwd=interpreter.DIRECTORY,
            )  # fmt: skip
        except OSError as error:
            self._failed_to_prove(str(error))
            return
        self.ref = processes.ref_of(process.pid)
        said = self._loop.create_task(process.communicate())
        try:
            stopped = await self._watch(process, said)
        finally:
            self.ref = None
            said.cancel()
        if stopped:
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        elif process.returncode:
            words = said.result()[1] if said.done() and not said.cancelled() else b""
            lines = words.decode(errors="replace").strip().splitlines()
            self._failed_to_prove(lines[-1] if lines else f"it ended with {process.returncode}")

    def _failed_to_prove(self, why: str) -> None:
        self.trouble = why[:200]
        self._pause_s = min(8 * self._pause_s, TROUBLE_MAX_S)
        log.warning("nothing was proven", why=self.trouble, again_in_s=self._pause_s)

    async def _watch(
        self, process: asyncio.subprocess.Process, said: asyncio.Task[tuple[bytes, bytes]]
    ) -> bool:
        """Wait for the end of a proof; stop it when somebody needs the GPU, and return whether that
        was so. The process ends its own program first; this one is killed only if it hangs."""
        assert process.stdin is not None
        ends_s, stopped = self._loop.time() + ENDS_WITHIN_S, False
        try:
            while not said.done():
                if not stopped and not self._idle():
                    log.info("the proof stops: the GPU is needed")
                    stopped = True
                    process.stdin.close()
                if self._loop.time() > ends_s:
                    process.kill()
                await asyncio.wait({said}, timeout=LOOK_S)
        finally:
            process.stdin.close()
        return stopped
