"""A small program that is a session of a real daemon: it holds memory and works in bursts.

Its memory is filled with a pattern; each burst works in a loop that checks what it reads.
``cuda_processes.Worker`` controls it over pipes, so it also answers while the driver holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuda_processes import Worker

import kiwi_emulator as emulator
from kiwi_core import preload

if TYPE_CHECKING:
    from daemon import Daemon

MIB = 1 << 20

_CONNECT = """
from pathlib import Path
from kiwi_core.client import Client

notices, waits = [], []
client = Client(
    Path({socket!r}), name={name!r}, ungated=lambda: {ungated!r}, daemon_grace_s=120.0,
    on_notice=lambda t: notices.append([t.notice.value, t.text]),
)
client.connect()
context, p, size, contents = None, 0, 0, ""

def begin(timeout_s=60.0):
    client.acquire(timeout_s=timeout_s, on_waiting=lambda w: waits.append([
        w.position, w.holder, w.blocked.value if w.blocked else "", w.detail]))

def take(new_size, seed):
    global context, p, size, contents
    begin()
    init()
    context = ck(driver.cuCtxGetCurrent())
    p, size = alloc(new_size), new_size
    contents = fill(p, seed, size)
    client.end_burst()

def intact():
    begin()
    try:
        return digest(p, size) == contents
    finally:
        client.end_burst()

class Burst:
    '''Works until stopped; ``rounds`` counts.'''

    def __init__(self):
        self.granted, self.stopped = False, False
        self.rounds, self.error = 0, ""
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            begin()
            self.granted = True
            ck(driver.cuCtxSetCurrent(context))
            while not self.stopped:
                self.step()
                self.rounds += 1
                time.sleep(0.01)
        except BaseException as error:
            self.error = repr(error)
        finally:
            client.end_burst()

    def step(self):
        part = read(p, 4096)
        ck(driver.cuMemcpyHtoD(p, part, 4096))
        if read(p, 4096) != part:
            raise AssertionError("wrong bytes")

burst = None

def start_burst():
    global burst
    burst = Burst()

def stop_burst():
    burst.stopped = True
    burst.thread.join(60)
    if burst.thread.is_alive():
        raise AssertionError("the burst does not end")
    if burst.error:
        raise AssertionError(burst.error)
    return burst.rounds
"""


class SessionProgram:
    """A session on GPU 0 that takes ``size_mib`` in a first burst, which ends before this returns;
    0: nothing yet. ``guarded``: it has Kiwi's gate, which leaves its memory to the driver's
    checkpoint. ``ungated``: why its process has no gate, as it says itself. ``prefix``: the command
    that starts it, whose pid is then ``pid``."""

    def __init__(
        self,
        daemon: Daemon,
        size_mib: int = 0,
        *,
        name: str = "",
        seed: int = 1,
        guarded: bool = True,
        environment: dict[str, str] | None = None,
        ungated: str = "",
        prefix: tuple[str, ...] = (),
    ) -> None:
        socket = daemon.directory / f"{daemon.status().uuid}.sock"
        libraries = emulator.build()
        env = daemon.env | emulator.environment(daemon.state_path, libraries)
        if guarded:
            env |= preload.environment(preload.library(), before=env)
            env |= {"KIWI_PRELOAD_OWN": "0"}
        self.worker = Worker(env | (environment or {}), *prefix)
        self.name = name or f"program {seed}"
        self.worker.do(_CONNECT.format(socket=str(socket), name=self.name, ungated=ungated))
        if size_mib:
            self.take(size_mib, seed)

    @property
    def pid(self) -> int:
        return self.worker.pid

    def take(self, size_mib: int, seed: int) -> None:
        self.worker.do(f"take({size_mib * MIB}, {seed})")

    def begin_take(self, size_mib: int, seed: int) -> None:
        """Begin to take memory without waiting for it; ``worker.answer()`` waits."""
        self.worker.send(f"take({size_mib * MIB}, {seed})", "exec")

    def intact(self) -> bool:
        """Read all memory, in a burst of its own, and return whether it is right."""
        return bool(self.worker.get("intact()"))

    def start_burst(self) -> None:
        self.worker.do("start_burst()")

    def burst(self) -> tuple[bool, int]:
        """Return whether the burst was granted, and its rounds so far; raise its error."""
        granted, rounds, error = self.worker.get("(burst.granted, burst.rounds, burst.error)")
        assert not error, error
        return bool(granted), int(rounds)

    def granted(self) -> bool:
        return self.burst()[0]

    def rounds(self) -> int:
        return self.burst()[1]

    def stop_burst(self) -> int:
        return int(self.worker.get("stop_burst()"))

    def notices(self) -> list[list[str]]:
        """Return ``[notice, text]`` of all notices of the daemon."""
        notices: list[list[str]] = self.worker.get("notices")
        return notices

    def waits(self) -> list[Any]:
        """Return ``[position, holder, blocked, detail]`` of all messages while the session
        waited."""
        waits: list[Any] = self.worker.get("waits")
        return waits

    def kill(self) -> None:
        self.worker.kill()

    def close(self) -> None:
        self.worker.close()
