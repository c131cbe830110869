"""Tests of signals, forks and freezing, each in a real process."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from stopped import is_stopped

from kiwi_core.wire.messages import Acquire, EndBurst, Granted, Ping, Withdraw
from tests.client.processes import line, program, tell
from tests.client.scripted_daemon import ScriptedDaemon, eventually

if TYPE_CHECKING:
    from tests.client.scripted_daemon import Peer

INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)
client = Client(path)
client.connect()
say("connected")
try:
    client.acquire()
except KeyboardInterrupt:
    say("interrupted")
client.ping()
say("alive", client.connected)
sys.stdin.readline()
say("granted", client.acquire().burst)
client.close()
say("threads", threading.active_count())
"""


def test_an_interrupt_frees_the_place_in_the_queue(daemon: ScriptedDaemon) -> None:
    daemon.grants = False
    with program(INTERRUPTED, daemon.path) as process:
        assert line(process) == "connected"
        daemon.await_received(Acquire)
        process.send_signal(signal.SIGINT)
        assert line(process) == "interrupted"
        assert line(process) == "alive True"
        assert daemon.received(Withdraw) == [Withdraw(burst=1)]
        daemon.grants = True
        tell(process, "go on")
        assert line(process) == "granted 2"
        assert line(process) == "threads 1"
    assert process.returncode == 0
    assert len(daemon.peers) == 1


def test_an_interrupt_without_a_daemon(daemon: ScriptedDaemon) -> None:
    daemon.grants = False
    with program(INTERRUPTED, daemon.path) as process:
        assert line(process) == "connected"
        daemon.await_received(Acquire)
        daemon.stop()
        process.send_signal(signal.SIGINT)
        assert line(process) == "interrupted"
        process.kill()


STORM = """
def interrupt(_, frame):
    # In the client's code only: one in this program's own handlers would prove nothing.
    while frame is not None and "kiwi_core" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
client = Client(path)
client.connect()
tries = interrupts = asked = 0
failures = []
def ask():
    global asked
    try:
        while tries < 400:
            client.ping(60)
            client.status(60)
            asked += 1
    except KiwiError as error:
        failures.append(error)
beside = threading.Thread(target=ask)
beside.start()
def struck(action):
    global interrupts
    try:
        action()
    except KeyboardInterrupt:
        interrupts += 1
        return True
    return False
def burst():
    client.acquire()
    client.end_burst()
    client.ping(60)
say("ready")
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0011)
while tries < 400:
    tries += 1
    try:
        struck(burst)
    except CallerError as error:  # struck in the middle of end_burst, or twice in acquire
        assert error.code == "in-burst", error
        while struck(client.end_burst):
            pass
signal.setitimer(signal.ITIMER_REAL, 0)
client.end_burst()
client.status()
beside.join()
assert not failures, failures
client.acquire()
client.end_burst()
client.ping()
say("interrupts", interrupts > 0, "asked", asked > 0)
client.close()
"""


def test_a_storm_of_interrupts_leaves_the_client_healthy(daemon: ScriptedDaemon) -> None:
    """Interrupts come everywhere while another thread asks questions. The connection survives, and
    the fixture checks that no message was out of order."""
    with program(STORM, daemon.path) as process:
        assert line(process) == "ready"
        assert line(process) == "interrupts True asked True"
    assert process.returncode == 0
    assert len(daemon.peers) == 1
    *_, acquire, end, ping = daemon.peer.received
    assert isinstance(acquire, Acquire)
    assert end == EndBurst(burst=acquire.burst)
    assert ping == Ping()


FORKED = """
client = Client(path)
client.connect()
client.acquire()
child = os.fork()
if child == 0:
    try:
        client.acquire()
    except CallerError as error:
        say("child", error.code, client.connected)
    client.end_burst()
    if sys.stdin.readline().strip() == "reopen":
        client.connect()
        say("child", client.acquire().burst, client.pid == os.getpid())
    os._exit(0)
say("parent", client.connected, client.pid == os.getpid())
os.waitpid(child, 0)
client.ping()
client.end_burst()
client.ping()
client.close()
say("parent ended")
"""


def test_a_forked_child_says_nothing(daemon: ScriptedDaemon) -> None:
    with program(FORKED, daemon.path) as process:
        said = {line(process), line(process)}
        assert said == {"child not-connected False", "parent True True"}
        tell(process, "leave")
        assert line(process) == "parent ended"
    assert process.returncode == 0
    assert len(daemon.peers) == 1
    assert daemon.received(EndBurst) == [EndBurst(burst=1)]


def test_a_forked_child_may_open_its_own(daemon: ScriptedDaemon) -> None:
    with program(FORKED, daemon.path) as process:
        line(process), line(process)
        tell(process, "reopen")
        assert line(process) == "child 2 True"
        assert line(process) == "parent ended"
    assert process.returncode == 0
    assert len(daemon.peers) == 2


LONELY = """
client = Client(path)
client.connect()
client.acquire()
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
say("forked")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_daemon_sees_a_parents_death_while_its_child_lives(daemon: ScriptedDaemon) -> None:
    with program(LONELY, daemon.path) as process:
        assert line(process) == "forked"
        eventually(lambda: daemon.peer.ended)
        assert process.wait() == -signal.SIGKILL
        process.stdin.close()  # type: ignore[union-attr]
        process.stdin = None


BUSY_FORKS = """
client = Client(path)
client.connect()
stop = False
def talk():
    while not stop:
        client.ping(60)
        client.status(60)
threads = [threading.Thread(target=talk) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        try:
            client.status()
        except CallerError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
stop = True
for thread in threads:
    thread.join()
client.close()
say("fine")
"""


def test_forking_while_others_talk(daemon: ScriptedDaemon) -> None:
    with program(BUSY_FORKS, daemon.path) as process:
        assert line(process) == "fine"
    assert process.returncode == 0
    assert len(daemon.peers) == 1


FROZEN = """
client = Client(path, daemon_grace_s=6.0, connect_timeout_s=6.0)
client.connect()
threading.Thread(target=lambda: say("pong", client.ping(8.0)), daemon=True).start()
say("granted", client.acquire(timeout_s=8.0).burst)
client.ping()
client.end_burst()
client.close()
"""


def test_a_frozen_process_misses_nothing(daemon: ScriptedDaemon) -> None:
    """It is frozen for longer than any of its limits, while the answers are in its socket."""
    daemon.grants = False
    held: list[tuple[Peer, Ping]] = []

    def script(peer: Peer, message: object) -> None:
        if isinstance(message, Ping) and not held:
            held.append((peer, message))
        else:
            daemon.obey(peer, message)  # type: ignore[arg-type]

    daemon.script = script
    with program(FROZEN, daemon.path) as process:
        daemon.await_received(Acquire)
        eventually(lambda: held)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid))
        frozen_until_s = time.monotonic() + 9.0  # the only fixed wait, which the test is about
        eventually(lambda: time.monotonic() > frozen_until_s)
        daemon.obey(*held[0])
        daemon.peer.say(Granted(burst=1, quantum_s=1.0))
        process.send_signal(signal.SIGCONT)
        assert {line(process), line(process)} == {"pong None", "granted 1"}
    assert process.returncode == 0
    assert len(daemon.peers) == 1
    assert daemon.received(Withdraw) == []


def test_a_child_program_does_not_inherit_the_connection(daemon: ScriptedDaemon) -> None:
    source = """
import subprocess
client = Client(path)
client.connect()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
client.close()
say("closed")
sys.stdin.readline()
child.communicate(b"x")
"""
    with program(source, daemon.path) as process:
        assert line(process) == "closed"
        eventually(lambda: daemon.peer.ended)
        tell(process, "leave")
    assert process.returncode == 0


def test_a_killed_client_is_gone_at_once(daemon: ScriptedDaemon) -> None:
    source = "client = Client(path); client.connect(); say('in'); client.acquire(); time.sleep(600)"
    with program(source, daemon.path) as process:
        assert line(process) == "in"
        daemon.await_received(Acquire)
        process.kill()
        eventually(lambda: daemon.peer.ended)


@pytest.mark.parametrize("way", ["end", "sys.exit(3)"])
def test_an_open_client_does_not_keep_a_program_alive(daemon: ScriptedDaemon, way: str) -> None:
    source = "client = Client(path); client.connect(); client.acquire()\n"
    with program(source + ("" if way == "end" else way), daemon.path) as process:
        process.communicate(timeout=60)
    assert process.returncode == (0 if way == "end" else 3)
    assert isinstance(process, subprocess.Popen)
