"""Let the machine prove itself for Kiwi's library, once, while nobody needs the GPU.

The proof is a process of its own (``bench.proof``): it may crash or hang. It ends at once when
somebody wants the GPU, and begins anew at the next idle moment.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
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
"""So long nobody has needed the GPU before a proof begins."""

LOOK_S: Final = 0.1
"""A program that wants the GPU waits this much longer at most for what a proof holds of it."""

KNOWN_LOOK_S: Final = 5.0
"""Interval of looks for a proof that somebody else has made (``kiwi doctor --prove``)."""

ENDS_WITHIN_S: Final = 90.0
"""More than a proof gives itself."""

TRIES_MAX: Final = 3
"""Proofs that end without a result, one way or the other, before no more are begun."""


@dataclass(eq=False, repr=False)
class SelfProof:
    """``idle``: whether nobody needs the GPU. ``pager`` is the daemon's setting."""

    _gpu: GpuInfo
    _idle: Callable[[], bool]
    _pager: str = AUTO
    proof: Proof | None = None
    ref: ProcessRef | None = None
    """The process that proves, while it does."""
    _tries: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self._load()

    def objection(self) -> GateOnly | None:
        """Return why the library of a program that asks for nothing does not own; ``None``: it
        does."""
        if self._pager != AUTO:
            return GateOnly.NOT_ASKED
        if self.proof is None:
            return GateOnly.UNPROVEN
        return None if self.proof.passed else GateOnly.PROOF_FAILED

    async def run(self) -> None:
        """Prove the machine when it is idle, unless that is known; and learn of other proofs, until
        cancelled."""
        while True:
            while self._pager == AUTO and self.proof is None and self._tries < TRIES_MAX:
                await self._await_idle()
                if self.proof is None:
                    await self._prove()
            await asyncio.sleep(KNOWN_LOOK_S)
            self._load()

    def _load(self) -> None:
        found = proofs.load(*proofs.kind_of(self._gpu))
        if found is not None and found != self.proof:
            log.info("proof", passed=found.passed, failed=found.failed, at=found.unix_s)
            self.proof = found

    async def _await_idle(self) -> None:
        since_s = looked_s = self._loop.time()
        while self.proof is None and self._loop.time() - since_s < IDLE_S:
            await asyncio.sleep(LOOK_S)
            if not self._idle():
                since_s = self._loop.time()
            if self._loop.time() - looked_s > KNOWN_LOOK_S:  # somebody else may have proven it
                looked_s = self._loop.time()
                self._load()
        self._load()

    async def _prove(self) -> None:
        log.info("proving", gpu=self._gpu.name)
        try:
            process = await asyncio.create_subprocess_exec(
                *interpreter.module("kiwi_core.bench.proof", self._gpu.uuid),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True, cwd=interpreter.DIRECTORY,
            )  # fmt: skip
        except OSError as error:
            log.warning("no proof", why=str(error))
            self._tries += 1
            return
        self.ref = processes.ref_of(process.pid)
        try:
            await self._watch(process)
        finally:
            self.ref = None
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        self._load()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of a proof; stop it when somebody needs the GPU."""
        assert process.stdin is not None
        ends_s = self._loop.time() + ENDS_WITHIN_S
        ended = self._loop.create_task(process.wait())
        try:
            while not ended.done():
                if not self._idle():
                    log.info("the proof stops: the GPU is needed")
                    process.stdin.close()  # it ends its own program first
                    await asyncio.wait({ended}, timeout=1.0)
                    return
                if self._loop.time() > ends_s:
                    self._tries = TRIES_MAX
                    log.warning("the proof hangs")
                    return
                await asyncio.wait({ended}, timeout=LOOK_S)
        finally:
            ended.cancel()
        self._tries += 1
        log.info("the proof is over", status=process.returncode)
