"""Tests of what a program may do with threads, signals, children and memory of its own while the
library has some in the same process. docs/preload.md has the table."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pager_daemon import PATIENCE_S

import kiwi_emulator as emulator
from kiwi_core import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Stage

HERE = Path(__file__).parent
MIB = 1 << 20
GATE_ONLY = {"KIWI_PRELOAD_OWN": "0"}


class Guest:
    """The program ``guests.c``."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.hears() == "begun"

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


def build(name: str, output: Path, *flags: str) -> Path:
    source = str(HERE / name)
    command = [*compiled.find_compiler(), "-O1", *flags, "-o", str(output), source, "-ldl"]
    subprocess.run([*command, "-pthread"], check=True, timeout=PATIENCE_S)
    return output


@pytest.fixture
def start(stage: Stage, tmp_path: Path) -> Iterator[Callable[..., Guest]]:
    program = build("guests.c", tmp_path / "guests")
    started: list[Guest] = []

    def begin(**more: str) -> Guest:
        started.append(Guest(program, stage.environment(**more)))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("gate", ["armed", "shut"])
def test_a_wait_that_a_signal_handler_leaves_counts_no_more(
    stage: Stage, start: Callable[..., Guest], gate: str
) -> None:
    """Else the program, which is idle, would ask for the lease again after each of its turns."""
    guest, peer = start(), stage.daemon.peer()
    if gate == "armed":
        peer.gate(open=False)
    else:
        assert peer.do("hold")["outcome"] == "moved"
    guest.tell("leave")
    peer.await_received("want-lease")
    guest.process.send_signal(signal.SIGUSR1)
    assert guest.hears() == "left"
    if gate == "armed":
        peer.gate(open=True)
        peer.gate(open=False)
    else:
        peer.do("free")
    assert peer.do("hold")["outcome"] == "moved"
    assert peer.do("page-out")["outcome"] == "moved"
    assert len(peer.of("want-lease")) == 1
    guest.tell("fill")
    peer.await_received("want-lease", 2)
    peer.say("gate", open=True)
    assert peer.do("page-in")["outcome"] == "moved"
    assert guest.hears() == "filled 0"


def test_a_wait_for_room_that_a_signal_handler_leaves(
    stage: Stage, start: Callable[..., Guest]
) -> None:
    """Nothing is left of it: no request, no thread in the count, nobody who holds the context."""
    stage.daemon.grants_room = None
    guest, peer = start(), stage.daemon.peer()
    for asked in (1, 2):
        guest.tell("leave-alloc")
        peer.await_received("want-room", asked)
        guest.process.send_signal(signal.SIGUSR1)
        assert guest.hears() == "left"
    peer.say("room", request=peer.of("want-room")[0]["request"], granted=True, detail="")
    assert peer.do("hold")["outcome"] == "moved"
    guest.tell("fill")
    peer.await_received("want-lease")
    peer.begin("free")
    assert guest.hears() == "filled 0"
    guest.tell("release")
    assert guest.hears() == "released 0"
    assert len(peer.of("want-room")) == 2


@pytest.mark.parametrize("how", ["_fork", "clone"])
@pytest.mark.parametrize("gate", ["open", "armed", "out"])
@pytest.mark.parametrize("more", [{}, GATE_ONLY], ids=["owning", "gate-only"])
def test_a_child_that_was_made_without_the_handlers_of_fork(
    stage: Stage, start: Callable[..., Guest], how: str, gate: str, more: dict[str, str]
) -> None:
    """It ends at once, and its calls answer as those of any other child."""
    guest, peer = start(**more), stage.daemon.peer()
    if gate == "armed":
        peer.gate(open=False)
    if gate == "out":
        assert peer.do("page-out")["outcome"] == "moved"
    plain = start(KIWI_DISABLE="1")
    for word in (how, f"{how}-calls"):
        plain.tell(word)
        guest.tell(word)
        assert guest.hears() == plain.hears()
    assert peer.of("want-lease") == []
    peer.say("gate", open=True)
    assert peer.do("page-in")["outcome"] == "moved"
    guest.tell("fill")
    assert guest.hears() == "filled 0", "the parent is as it was"


@pytest.mark.parametrize("more", [{}, GATE_ONLY], ids=["owning", "gate-only"])
def test_a_context_that_a_constructor_made(
    stage: Stage, tmp_path: Path, more: dict[str, str]
) -> None:
    cuda, linked = str(emulator.build().libcuda), ("-Wl,--no-as-needed",)
    early = build("early.c", tmp_path / "libearly.so", "-shared", "-fPIC", *linked, cuda)
    flags = ("-DPROGRAM", *linked, str(early), cuda, f"-Wl,-rpath,{tmp_path}")
    guest = Guest(build("early.c", tmp_path / "early", *flags), stage.environment(**more))
    with guest.process:
        peer = stage.daemon.peer()
        peer.gate(open=False)
        guest.tell("")
        peer.await_received("want-lease")
        peer.gate(open=True)
        assert guest.hears() == "filled 0"
        guest.process.kill()


def test_a_page_out_needs_no_new_thread(stage: Stage, tmp_path: Path) -> None:
    none = build("no_threads.c", tmp_path / "libnothreads.so", "-shared", "-fPIC")
    program = stage.program("init(); p = alloc(4 * MIB); d = fill(p, 1, 4 * MIB)", before=str(none))
    peer = stage.daemon.peer()
    program.do("import ctypes; ctypes.CDLL(None).no_more_threads()")
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 4 * MIB) == d")


def test_what_is_paged_out_is_in_no_core_file(stage: Stage) -> None:
    program = stage.program("init(); p = alloc(40 * MIB); d = fill(p, 1, 40 * MIB)")
    assert stage.daemon.peer().do("page-out")["outcome"] == "moved"
    dumped_bytes = 0
    size_bytes = 0
    for line in Path(f"/proc/{program.pid}/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "Rss:":
            size_bytes = int(words[1]) << 10
        if words[0] == "VmFlags:" and "dd" not in words and size_bytes >= 20 * MIB:
            dumped_bytes += size_bytes
    assert dumped_bytes == 0
    assert stage.daemon.peer().do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 40 * MIB) == d")
