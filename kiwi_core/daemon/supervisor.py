"""``kiwi daemon``: run one daemon process per GPU; restart one that crashes, with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from kiwi_core import config, interpreter
from kiwi_core.client.directory import STOPPED_NAME
from kiwi_core.daemon import inherited
from kiwi_core.daemon.base.directories import prepare_directory, sockets_mode
from kiwi_core.daemon.emulation import hold_state, prepare
from kiwi_core.daemon.options import ENV_OPTIONS, ChildOptions
from kiwi_core.daemon.supervised import EXIT_CANNOT, EXIT_UNUSED, READY, UNUSED, USED
from kiwi_core.errors import CallerError
from kiwi_core.gpu import choice, nvml
from kiwi_core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.daemon.options import DaemonOptions
    from kiwi_core.gpu.nvml import GpuInfo

CALM_S = 60.0
"""A daemon that ran longer than this before it crashed is restarted with the shortest wait."""


def main(options: DaemonOptions) -> int:
    """Run in the foreground until SIGTERM or SIGINT. Return the exit status."""
    inherited.shed()
    if options.admin_group is not None:
        # A misspelt name would silently make nobody an administrator.
        try:
            grp.getgrnam(options.admin_group)
        except KeyError:
            raise CallerError(
                "no-such-group",
                f"This machine has no group {options.admin_group!r}.",
                "getent group lists the groups, and id those of a user.",
            ) from None
    # Absolute, because daemons run in another directory and programs get these paths.
    sockets = Path(options.socket_dir or config.socket_dir()).absolute()
    state = Path(options.state_dir or config.state_dir(sockets)).absolute()
    os.umask(0o077)  # inherited by the daemons; files for other users get an explicit mode
    prepare_directory(sockets, sockets_mode())
    (sockets / STOPPED_NAME).unlink(missing_ok=True)
    prepare_directory(state)
    emulation = None
    if options.emulate is not None:
        emulation = prepare(options.emulate, sockets, options.emulate_copy_bytes_per_s)
        _print("*** EMULATED GPU: control logic only, no real GPU is used, speeds mean nothing ***")
    gpus = _chosen(options.gpus)
    if options.metrics is not None:
        _serve_metrics(*options.metrics, gpus, sockets)
    child = ChildOptions(
        asked=options,
        gpu_uuid="",
        sockets=str(sockets),
        state=str(state),
        emulation=emulation,
        emulated_state=hold_state(emulation) if emulation is not None else "",
    )
    group = _Group()
    for gpu in gpus:
        group.children.append(_Child(gpu, structs.replace(child, gpu_uuid=gpu.uuid), group))
    return asyncio.run(_supervise(group.children))


def _serve_metrics(host: str, port: int, gpus: Sequence[GpuInfo], sockets: Path) -> None:
    """Serve metrics until this process ends, also while daemons restart. Raise ``CallerError``."""
    from kiwi_core.metrics.listener import MetricsListener  # rarely wanted
    from kiwi_core.metrics.reading import GpuPlace

    places = [GpuPlace(gpu.uuid, gpu.index, sockets / f"{gpu.uuid}.sock") for gpu in gpus]
    listener = MetricsListener(host, port, places)
    listener.start()
    _print(f"metrics at {listener.url}")
    if listener.for_others:
        _print(
            "other machines can read the metrics: there are no names in them, but also no password"
        )


def _chosen(wanted: Sequence[str]) -> list[GpuInfo]:
    """Return the GPUs that are ``wanted``, or all that can be served; print why each other cannot.
    Raise ``GpuError`` if there are GPUs and none can be read."""
    gpus, unreadable = nvml.survey()
    for index, error in unreadable.items():
        if not gpus:
            raise error
        _print(f"GPU {index} is not served: {error}")
    if not gpus:
        raise CallerError(
            "no-gpu",
            "There is no NVIDIA GPU on this machine.",
            "Try Kiwi on an emulated one: kiwi daemon --emulate 1x512MiB",
        )
    if not wanted:
        return list(gpus)
    return [choice.one(gpus, word) for word in dict.fromkeys(wanted)]


class _Group:
    """The daemons of all GPUs. They end together when nobody needs any of them: a program starts no
    daemon while one answers, so a daemon that ended alone would be missing."""

    def __init__(self) -> None:
        self.children: list[_Child] = []
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """End all children if all are unused. Called when a child has sent a line or ended."""
        if all(child.unused for child in self.children):
            for child in self.children:
                child.end_if_unused()
        self._changed.set()

    async def has_ended(self) -> bool:
        """Wait until all have ended (return true) or one of them is needed (return false)."""
        while all(child.unused for child in self.children):
            if all(child.ended for child in self.children):
                return True
            self._changed.clear()
            await self._changed.wait()
        return False


class _Child:
    """The daemon of one GPU, restarted until it is stopped, or until nobody needs any daemon of the
    ``group``.
    """

    def __init__(self, gpu: GpuInfo, options: ChildOptions, group: _Group) -> None:
        self._gpu = gpu
        self._options = options
        self._group = group
        self.unused = False
        """Whether nobody needs this daemon, by its last line; true once it is not restarted."""
        self.ended = False
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def keep_running(self) -> int:
        status = await self._keep_running()
        self._is(unused=True, ended=True)
        return status

    async def _keep_running(self) -> int:
        crashes = 0
        while True:
            began = asyncio.get_running_loop().time()
            status = await self._run_once()
            if self._stopping.is_set():
                # SIGTERM came before its handler was set: it had nothing to bring back yet.
                return 0 if status in (-signal.SIGTERM, EXIT_UNUSED) else status
            if status in (0, EXIT_CANNOT):
                return status
            if status == EXIT_UNUSED:
                self._is(unused=True, ended=True)
                if await self._group.has_ended() or self._stopping.is_set():
                    return 0
                self._options = structs.replace(self._options, restarted=True)
                continue  # somebody needs another GPU's daemon by now
            if asyncio.get_running_loop().time() - began > CALM_S:
                crashes = 0
            waits = config.DEFAULTS.restart_backoff_s
            wait_s = waits[min(crashes, len(waits) - 1)]
            crashes += 1
            how = f"signal {-status}" if status < 0 else f"status {status}"
            _print(f"the daemon of GPU {self._gpu.index} ended ({how}); again in {wait_s} s")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return 0
            # Settings that were changed live are in the roster and outlive the crash.
            self._options = structs.replace(self._options, restarted=True)

    def stop(self) -> None:
        self._stopping.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def end_if_unused(self) -> None:
        if self._process is not None and self._process.stdin is not None and not self.ended:
            self._process.stdin.write(b"\n")

    def _is(self, *, unused: bool, ended: bool = False) -> None:
        self.unused, self.ended = unused, ended
        self._group.changed()

    async def _run_once(self) -> int:
        self._is(unused=False)
        # Not an argument: it would fill the list of processes.
        environment = os.environ | {ENV_OPTIONS: msgspec.json.encode(self._options).decode()}
        if self._options.emulation is not None:
            environment.update(self._options.emulation.env)
        self._process = await asyncio.create_subprocess_exec(
            *interpreter.module("kiwi_core.daemon", self._gpu.uuid),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
            cwd=interpreter.DIRECTORY,
        )  # fmt: skip
        if self._stopping.is_set():
            self.stop()  # stop() was called while this one was being started
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            word = line.decode().strip()
            if word == READY:
                emulated = "EMULATED, " if self._options.emulation is not None else ""
                path = Path(self._options.sockets) / f"{self._gpu.uuid}.sock"
                gpu, size = self._gpu, format_bytes(self._gpu.total_bytes)
                _print(f"ready: GPU {gpu.index} ({emulated}{gpu.name}, {size}) at {path}")
            elif word in (UNUSED, USED):
                self._is(unused=word == UNUSED)
        return await self._process.wait()


async def _supervise(children: list[_Child]) -> int:
    loop = asyncio.get_running_loop()

    def stop_all() -> None:
        for child in children:
            child.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_all)
    statuses = await asyncio.gather(*(child.keep_running() for child in children))
    return max((1 if status else 0 for status in statuses), default=0)


def _print(text: str) -> None:
    sys.stdout.write(f"kiwi daemon: {text}\n")
    sys.stdout.flush()
