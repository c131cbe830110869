"""Tests of what another user of the machine may see and do. They need root."""

from __future__ import annotations

import grp
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import PATIENCE_S, wait_until
from somebody import ALICE, BOB, Somebody
from talker import HELLO, Talker

import kiwi_emulator as emulator
from kiwi_core.compiled import default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def somebody() -> Iterator[Callable[..., Somebody]]:
    made: list[Somebody] = []

    def make(path: Path, uid: int, gid: int | None = None) -> Somebody:
        made.append(Somebody(path, uid, gid))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture
def shared(start: Callable[..., Daemon]) -> Daemon:
    """Start a root daemon that everybody can reach."""
    group = grp.getgrgid(0).gr_name
    daemon = start("1x64MiB", "--admin-group", group)
    daemon.directory.chmod(0o755)
    return daemon


def test_names_of_others_are_hidden_and_their_story_is_refused(
    shared: Daemon, somebody: Callable[..., Somebody]
) -> None:
    (path,) = shared.sockets()
    alice, bob = somebody(path, ALICE), somebody(path, BOB)
    mine = alice.hello(role="session", name="secret.ipynb", kernel_id="secret-kernel")["session"]
    other = bob.hello(role="session", name="bobs.ipynb")["session"]
    assert mine != other
    sessions = {s["id"]: s for s in bob.ask("get-status")["gpu"]["sessions"]}
    hidden = sessions[mine]
    assert (hidden["name"], hidden["owner"]) == ("another user", "another user")
    assert (hidden["pid"], hidden["kernel_id"], hidden["mine"]) == (0, "", False)
    assert "secret" not in json.dumps(sessions)
    assert (sessions[other]["name"], sessions[other]["pid"]) == ("bobs.ipynb", bob.pid)
    for session in (mine, "k0000000000"):
        refused = bob.ask("get-story", session=session)
        assert (refused["type"], refused["code"]) == ("error", "no-such-session"), session
    assert alice.ask("get-story", session=mine)["type"] == "story"
    with Talker(path) as root:
        root.hello()
        names = {s["name"] for s in root.ask("get-status")["gpu"]["sessions"]}
    assert names == {"secret.ipynb", "bobs.ipynb"}


def test_the_history_of_others_has_no_names_and_their_memory_stays_where_it_is(
    shared: Daemon, somebody: Callable[..., Somebody]
) -> None:
    (path,) = shared.sockets()
    alice, bob = somebody(path, ALICE), somebody(path, BOB)
    mine = alice.hello(role="session", name="secret.ipynb", kernel_id="secret-kernel")["session"]
    assert alice.ask("acquire", burst=1)["type"] == "granted"
    assert alice.ask("withdraw", burst=1)["type"] == "withdrawn"
    assert alice.ask("get-history")["sessions"][mine]["name"] == "secret.ipynb"
    bob.hello()
    nobody = {"name": "another user", "mine": False, "kernel_id": ""}
    assert bob.ask("get-history")["sessions"] == {mine: nobody}
    for kind in ("release", "bring-back"):
        refused = bob.ask(kind, session=mine)
        assert (refused["code"], refused["fatal"]) == ("no-such-session", False), kind
    assert not bob.ask("get-status")["gpu"]["may_set"]
    alice.kill()
    shared.wait_for(lambda status: not status.sessions, "it has ended")
    told = bob.ask("get-history")
    assert told["sessions"] == {mine: nobody}
    assert "secret" not in json.dumps(told)
    with Talker(path) as root:
        root.hello()
        assert root.ask("get-history")["sessions"][mine]["name"] == "secret.ipynb"
        assert root.ask("get-status")["gpu"]["may_set"]


def test_the_holder_is_another_user_to_one_who_waits(
    shared: Daemon, somebody: Callable[..., Somebody]
) -> None:
    (path,) = shared.sockets()
    alice, bob = somebody(path, ALICE), somebody(path, BOB)
    alice.hello(role="session", name="secret.ipynb")
    assert alice.ask("acquire", burst=1)["type"] == "granted"
    bob.hello(role="session", name="bobs.ipynb")
    word = bob.ask("acquire", burst=1)
    while word["type"] == "waiting" and not word["holder"]:
        word = bob.answer()
    if word["type"] == "waiting":
        assert word["holder"] == "another user"
    assert "secret" not in json.dumps(word)


def test_settings_need_the_owner_or_the_group(
    shared: Daemon, somebody: Callable[..., Somebody]
) -> None:
    (path,) = shared.sockets()
    stranger, admin = somebody(path, ALICE), somebody(path, BOB, 0)
    stranger.hello()
    refused = stranger.ask("set", tq_s=5)
    assert (refused["code"], refused["fatal"]) == ("not-allowed", False)
    assert shared.status().scheduler.tq_s == 30
    admin.hello()
    assert admin.ask("set", tq_s=5)["type"] == "ok"
    assert shared.status().scheduler.tq_s == 5
    assert stranger.ask("get-status")["gpu"]["scheduler"]["tq_s"] == 5


def test_a_connection_does_not_outlive_its_user(shared: Daemon) -> None:
    """One user opens the connection; when it says hello, its process belongs to another user, as if
    the pid had been reused."""
    (path,) = shared.sockets()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setegid(ALICE)
            os.seteuid(ALICE)
            talker = Talker(path)
            os.seteuid(0)
            os.setegid(0)
            answer = talker.hello(role="session")
            status = 0 if answer.get("code") == "not-yours" else 2
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert not shared.status().sessions


def test_one_user_cannot_take_all_connections(
    shared: Daemon, somebody: Callable[..., Somebody]
) -> None:
    (path,) = shared.sockets()
    most = 2048
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            import resource

            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            os.setgid(ALICE)
            os.setuid(ALICE)
            crowd = []
            for _ in range(most):
                crowd.append(Talker(path))
                crowd[-1].raw(json.dumps(HELLO).encode() + b"\n")
            assert crowd[-1].hear()["type"] == "welcome"  # type: ignore[index]
            last = Talker(path).last_words()
            assert last is not None
            status = 0 if last["code"] == "too-many-connections" and last["fatal"] else 2
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert somebody(path, BOB).hello()["type"] == "welcome"


@pytest.fixture
def private() -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Start a daemon that Alice runs for herself, in a directory that it makes."""
    home = Path(tempfile.mkdtemp(prefix="kw-"))
    os.chown(home, ALICE, ALICE)
    home.chmod(0o755)
    emulator.build()
    shutil.copytree(default_cache_dir(), home / "cache" / "kiwi")  # to compile takes long
    for path in (home / "cache").rglob("*"):
        os.chown(path, ALICE, ALICE)
    os.chown(home / "cache", ALICE, ALICE)
    place = home / "s"
    with (home / "log").open("wb") as log:
        # She may read this Python and this checkout, and nothing else.
        process = subprocess.Popen(
            ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups",
             "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
             sys.executable, "-m", "kiwi_core.cli", "daemon", "--emulate", "1x64MiB",
             "--socket-dir", str(place)],
            stdin=subprocess.DEVNULL, cwd=home,
            stdout=log, stderr=log,
            env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
        )  # fmt: skip
    try:
        wait_until(
            lambda: process.poll() is not None or list(place.glob("*.sock")),
            "a private daemon",
        )
        assert process.poll() is None, (home / "log").read_text()
        yield place, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        shutil.rmtree(home)


def test_a_private_daemon_is_out_of_reach_of_others(
    private: tuple[Path, subprocess.Popen[bytes]], somebody: Callable[..., Somebody]
) -> None:
    place, process = private
    (path,) = place.glob("*.sock")
    assert place.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert "refused" in somebody(path, BOB).answer()
    alice = somebody(path, ALICE)
    assert alice.hello(role="session")["type"] == "welcome"
    assert alice.ask("set", tq_s=3)["type"] == "ok"
    # The socket's own mode protects it even if the directory is opened by mistake.
    place.chmod(0o755)
    assert "refused" in somebody(path, BOB).answer()
    with Talker(path) as root:
        assert root.hello()["type"] == "welcome"
    assert process.poll() is None
