"""The socket in the kubelet's directory, and the registration.

The kubelet calls back while it answers a registration, so the socket is served first. A kubelet
that starts deletes all sockets in its directory and makes its own again. Then the plugin does the
same and registers again.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from grpc import aio

from kiwi_core.errors import CallerError
from kiwi_kubernetes import api, others
from kiwi_kubernetes.service import OPTIONS

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger()

LOOK_EVERY_S: Final = 0.5
"""Time between two checks of the sockets: each reads the state of two files."""

LOOK_FOR_OTHERS_EVERY_S: Final = 30.0
"""Time between two searches for other plugins, which means a connection to each."""

REGISTER_WITHIN_S: Final = 10.0
"""The kubelet allows itself this long to call back."""

LEAVE_WITHIN_S: Final = 1.0
"""Time for calls under way to end; most take milliseconds, and the stream of places never ends."""

PATH_MAX_BYTES: Final = 107
"""Longest path of a Unix socket (unix(7)): 108 bytes, with a zero at the end."""

# Go's servers refuse other names, and older gRPC takes the path of a Unix socket for the name.
_CHANNEL: Final = [("grpc.default_authority", "localhost")]

Sign = tuple[int, int, int]
"""Device, inode and time of a socket. An inode's number may be used again at once."""


class Kubelet:
    """Serves ``handler`` in ``directory`` and keeps ``resource`` registered at its kubelet."""

    def __init__(
        self, directory: Path, resource: str, handler: grpc.GenericRpcHandler[Any, Any]
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._handler = handler
        self._path = directory / f"kiwi-{resource.replace('/', '_')}.sock"
        self._told = ""
        """The last logged error of a registration that does not succeed."""
        self._others: list[str] = []
        """The sockets of other plugins at the last search."""
        self._look_again_s = 0.0
        if len(os.fsencode(self._path)) > PATH_MAX_BYTES:
            raise CallerError(
                "bad-setting",
                f"{self._path} is too long for a socket: {PATH_MAX_BYTES} bytes at most.",
                "Give a shorter --kubelet-dir.",
            )

    async def run(self) -> None:
        """Serve until cancelled. Raises ``CallerError`` if another process serves the resource, or
        if the directory cannot be written."""
        while True:
            if self._directory.is_dir():
                await self._serve()
            else:
                self._tell_absence()
                await asyncio.sleep(LOOK_EVERY_S)

    async def _serve(self) -> None:
        """Serve until the socket is gone."""
        _clear(self._path, self._resource)
        server = aio.server(handlers=[self._handler])
        try:
            self._bind(server)
            await server.start()
            await self._stay_registered(_sign(self._path))
        finally:
            await server.stop(LEAVE_WITHIN_S)  # gRPC removes the socket, too

    def _bind(self, server: aio.Server) -> None:
        try:
            server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise CallerError(
                "cannot-serve",
                f"No socket can be made at {self._path}.",
                "Let this user write the directory, or mount the kubelet's directory for writing.",
            ) from error

    async def _stay_registered(self, own: Sign | None) -> None:
        registered: Sign | None = None
        while (found := _sign(self._path)) == own:
            kubelet = _sign(self._directory / api.KUBELET_SOCKET)
            if kubelet is None:
                self._tell_absence()
            elif kubelet != registered and await self._register():
                registered = kubelet
            self._look_for_others()
            await asyncio.sleep(LOOK_EVERY_S)
        if found is not None:
            raise _runs_already(self._path, self._resource)
        log.info("the kubelet has cleared its directory", directory=str(self._directory))

    async def _register(self) -> bool:
        request = api.RegisterRequest(
            version=api.VERSION,
            endpoint=self._path.name,
            resource_name=self._resource,
            options=OPTIONS,
        )
        address = f"unix:{self._directory / api.KUBELET_SOCKET}"
        async with aio.insecure_channel(address, options=_CHANNEL) as channel:
            register = channel.unary_unary(
                f"/{api.REGISTRATION}/Register", api.encode, api.decoder(api.Empty)
            )
            try:
                await register(request, timeout=REGISTER_WITHIN_S)
            except aio.AioRpcError as error:
                self._tell_refusal(error)
                return False
        self._told = ""
        log.info("registered at the kubelet", resource=self._resource, socket=str(self._path))
        return True

    def _look_for_others(self) -> None:
        if time.monotonic() < self._look_again_s:
            return
        self._look_again_s = time.monotonic() + LOOK_FOR_OTHERS_EVERY_S
        found = others.of_nvidia(self._directory)
        if found and found != self._others:
            log.warning(
                "another device plugin hands out GPUs of this node; remove it: its pods use them "
                "without Kiwi, and their memory cannot be moved",
                sockets=found,
            )
        self._others = found

    def _tell_absence(self) -> None:
        if self._is_news("waiting for the kubelet"):
            log.info("waiting for the kubelet", directory=str(self._directory))

    def _tell_refusal(self, error: aio.AioRpcError) -> None:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            self._tell_absence()
        elif self._is_news(why := error.details() or str(error.code())):
            log.error("the kubelet refuses the registration", resource=self._resource, why=why)

    def _is_news(self, text: str) -> bool:
        """Return whether ``text`` differs from the last one: the registration is tried twice a
        second.
        """
        before, self._told = self._told, text
        return text != before


def _sign(path: Path) -> Sign | None:
    """Return what distinguishes this socket from another one at the same path; ``None`` if there is
    none.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None


def _clear(path: Path, resource: str) -> None:
    """Remove a socket that no process serves. Raises ``CallerError`` if a process does."""
    if others.served(path):
        raise _runs_already(path, resource)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CallerError(
            "cannot-serve",
            f"{path} is in the way, and cannot be removed: {error.strerror}.",
            "Remove it.",
        ) from error


def _runs_already(path: Path, resource: str) -> CallerError:
    return CallerError(
        "already-running",
        f"Another device plugin offers {resource} on this node: it serves {path}.",
        "One is enough. End the other one, or give this one another --resource.",
    )
