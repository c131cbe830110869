"""Tests that another user cannot run code as me by posing as my daemon.

Mallory runs a real daemon, opens its socket to everybody, and puts it where Alice's programs look.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from installed import (
    ALICE,
    KIWI,
    MALLORY,
    PATIENCE_S,
    as_user,
    environment,
    eventually,
    kiwi,
    needs_users,
    short,
    started,
    status,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["short"]

COMPILED_S = 300.0

pytestmark = [needs_users, pytest.mark.timeout(2 * COMPILED_S)]

SHOW = ["/usr/bin/env", "-0"]
"""A program that prints its environment."""


def shown(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.split("\0") if line)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with the libraries that a ``kiwi run`` loads here. They are copied, because
    to compile them takes half a minute of processor time."""
    directory = tmp_path_factory.mktemp("cache")
    with tempfile.TemporaryDirectory(prefix="kw-", dir="/tmp") as sockets:
        env = environment(KIWI_SOCKET_DIR=sockets)
        command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", sockets]
        with started(command, tmp_path_factory.mktemp("log") / "daemon", env):
            eventually(lambda: status(Path(sockets)), "a daemon", COMPILED_S)
            done = kiwi("run", "--require", "--", *SHOW, env=env, timeout_s=COMPILED_S)
    loads = shown(done.stdout)
    places = f"{Path(loads['LD_PRELOAD']).parent}:{loads['LD_LIBRARY_PATH']}".split(":")
    for place in {Path(one) for one in places if "/kiwi/" in one}:
        shutil.copytree(place, directory / "kiwi" / place.name)
    assert list(directory.glob("kiwi/emulator-*"))
    assert list(directory.glob("kiwi/preload-*"))
    return directory


def directory_of(uid: int, path: Path, mode: int = 0o755) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, uid, uid)
    return path


def home(path: Path, cache: Path) -> dict[str, str]:
    """Give the owner of ``path`` a filled cache, and return the environment that makes it their
    home."""
    if not (path / "cache").exists():
        shutil.copytree(cache, path / "cache")
        owner = path.stat().st_uid
        for name in (path / "cache", *(path / "cache").rglob("*")):
            os.chown(name, owner, owner)
    return {"HOME": str(path), "XDG_CACHE_HOME": str(path / "cache")}


@contextmanager
def daemon(uid: int, home_directory: Path, sockets: Path, cache: Path) -> Iterator[Path]:
    """Run a daemon of user ``uid``, and yield its socket."""
    log = home_directory / "log"
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", str(sockets)]
    before = as_user(uid) if uid else []
    with started([*before, *command], log, environment(**home(home_directory, cache))) as process:
        eventually(
            lambda: process.poll() is not None or b"ready" in log.read_bytes(), "it is ready"
        )
        found = list(sockets.glob("GPU-*.sock"))
        assert len(found) == 1, log.read_text()
        yield found[0]


@pytest.fixture
def mallorys(short: Path, cache: Path) -> Iterator[Path]:
    """Run Mallory's daemon, and yield its socket, which everybody may use."""
    short.chmod(0o755)
    place = directory_of(MALLORY, short / "mallory")
    with daemon(MALLORY, place, place / "s", cache) as path:
        path.parent.chmod(0o755)
        path.chmod(0o666)
        yield path


@pytest.fixture
def alice(short: Path, cache: Path) -> dict[str, str]:
    """Return Alice's environment."""
    short.chmod(0o755)
    return environment(**home(directory_of(ALICE, short / "alice"), cache))


def link_in_the_temporary_directory(short: Path, socket: Path) -> dict[str, str]:
    """Mallory makes ``kiwi-<uid>`` in a shared temporary directory before Alice does."""
    open_to_all = directory_of(0, short / "open", 0o1777)
    os.link(socket, open_to_all / socket.name)
    shared = directory_of(0, short / "tmp", 0o1777)
    (shared / f"kiwi-{ALICE}").symlink_to(open_to_all)
    os.chown(shared / f"kiwi-{ALICE}", MALLORY, MALLORY, follow_symlinks=False)
    return {"TMPDIR": str(shared)}


def open_directory(short: Path, socket: Path) -> dict[str, str]:
    """As with ``KIWI_SOCKET_DIR=/tmp``."""
    shared = directory_of(0, short / "tmp", 0o1777)
    os.link(socket, shared / socket.name)
    return {"KIWI_SOCKET_DIR": str(shared)}


def directory_of_mallory(short: Path, socket: Path) -> dict[str, str]:
    """Mallory makes the temporary directory's ``kiwi-<uid>`` first."""
    shared = directory_of(0, short / "tmp", 0o1777)
    theirs = directory_of(MALLORY, shared / f"kiwi-{ALICE}")
    os.link(socket, theirs / socket.name)
    return {"TMPDIR": str(shared)}


def directory_of_root(short: Path, socket: Path) -> dict[str, str]:
    """A socket in a directory of root's is still Mallory's."""
    roots = directory_of(0, short / "run")
    os.link(socket, roots / socket.name)
    return {"KIWI_SOCKET_DIR": str(roots)}


def socket_that_looks_like_roots(short: Path, socket: Path) -> dict[str, str]:
    """Everything visible of the file is root's, but Mallory listens."""
    env = directory_of_root(short, socket)
    os.chown(socket, 0, 0)
    return env


TRAPS = [
    link_in_the_temporary_directory, open_directory, directory_of_mallory, directory_of_root,
    socket_that_looks_like_roots,
]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
def test_a_program_gets_nothing_of_a_strangers(
    trap: Callable[[Path, Path], dict[str, str]],
    short: Path,
    mallorys: Path,
    alice: dict[str, str],
) -> None:
    env = alice | trap(short, mallorys)
    before = as_user(ALICE)
    done = kiwi("run", "--", *SHOW, env=env, before=before)
    assert "/mallory/" not in done.stdout, "the program would load Mallory's libraries"
    assert "KIWI_EMULATOR_STATE" not in shown(done.stdout)
    assert "without Kiwi" in done.stderr
    done = kiwi("run", "--require", "--", "/bin/true", env=env, before=before)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    done = kiwi("status", "--json", env=env, before=before)
    assert "Emulated" not in done.stdout, "and shows nothing of it"


CELL = """\
%%kiwi gpu
import json, os
with open(os.environ["OUT"], "w") as out:
    json.dump(dict(os.environ), out)
"""


def run_notebook(env: dict[str, str], short: Path) -> str:
    """Run ``CELL`` in a notebook of Alice's; return the kernel's environment as JSON."""
    cell = {"cell_type": "code", "metadata": {}, "source": CELL, "outputs": []}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "cells": [{**cell, "execution_count": None, "id": "a"}], "nbformat": 4,
        "nbformat_minor": 5, "metadata": {"kernelspec": kernel},
    }  # fmt: skip
    file = short / "alice" / "notebook.ipynb"
    file.write_text(json.dumps(notebook))
    out = short / "alice" / "out"
    subprocess.run(
        [*as_user(ALICE), str(KIWI.with_name("jupyter")), "execute", str(file)],
        env={**env, "OUT": str(out)}, cwd=short / "alice", timeout=PATIENCE_S, check=True,
        capture_output=True,
    )  # fmt: skip
    said = out.read_text()
    out.unlink()
    return said


@pytest.mark.parametrize(
    "trap", [link_in_the_temporary_directory, socket_that_looks_like_roots],
    ids=lambda trap: trap.__name__,
)  # fmt: skip
def test_a_notebook_loads_nothing_of_a_strangers(
    trap: Callable[[Path, Path], dict[str, str]],
    short: Path,
    mallorys: Path,
    alice: dict[str, str],
) -> None:
    said = run_notebook(alice | trap(short, mallorys), short)
    assert "/mallory/" not in said
    assert "KIWI_EMULATOR_STATE" not in json.loads(said)


@pytest.mark.parametrize("whose", [ALICE, 0])
def test_her_own_daemon_and_roots_are_used(
    whose: int, short: Path, mallorys: Path, alice: dict[str, str], cache: Path
) -> None:
    """Mallory's daemon beside them does no harm."""
    keeper = directory_of(whose, short / "keeper")
    sockets = directory_of(whose, short / "s", 0o755)
    with daemon(whose, keeper, sockets, cache) as socket:
        os.link(mallorys, sockets / "GPU-0-mallorys.sock")
        env = alice | {"KIWI_SOCKET_DIR": str(sockets)}
        done = kiwi("run", "--require", "--", *SHOW, env=env, before=as_user(ALICE))
        assert done.returncode == 0, done.stderr
        assert shown(done.stdout)["KIWI_EMULATOR_STATE"] == str(sockets / "emulated-gpus")
        assert socket.name.removesuffix(".sock") in done.stdout
        said = json.loads(run_notebook(env, short))
        assert said["KIWI_EMULATOR_STATE"] == str(sockets / "emulated-gpus")


@pytest.mark.parametrize(
    ("how", "why"),
    [("hers first", "kiwi: it belongs to another user"),
     ("open to all", "kiwi: others can write to it"),
     ("a link to hers", "kiwi: it is a link")],
)  # fmt: skip
def test_a_library_in_a_shared_cache_is_not_loaded(
    how: str, why: str, short: Path, alice: dict[str, str], cache: Path
) -> None:
    """With ``XDG_CACHE_HOME=/tmp``, Mallory has filled ``kiwi`` there, from where Alice's daemon
    loads its emulated driver."""
    shared = directory_of(0, short / "tmp", 0o1777)
    if how == "a link to hers":
        (shared / "kiwi").symlink_to(directory_of(MALLORY, short / "hers"))
    elif how == "hers first":
        directory_of(MALLORY, shared / "kiwi")
    else:
        directory_of(0, shared / "kiwi", 0o1777)
    (found,) = cache.glob("kiwi/emulator-*")
    shutil.copytree(found, shared / "kiwi" / found.name)
    for name in (shared / "kiwi" / found.name, *(shared / "kiwi" / found.name).iterdir()):
        os.chown(name, MALLORY, MALLORY)
    done = kiwi(
        "daemon", "--emulate", "1x64MiB", "--socket-dir", str(short / "alice" / "s"),
        env=alice | {"XDG_CACHE_HOME": str(shared)}, before=as_user(ALICE),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert why in done.stderr
    assert "XDG_CACHE_HOME" in done.stderr


def test_a_daemon_does_not_start_where_others_could_be_first(
    short: Path, alice: dict[str, str]
) -> None:
    for mode, owner in ((0o1777, 0), (0o777, ALICE), (0o775, ALICE), (0o755, MALLORY)):
        place = directory_of(owner, short / f"{mode:o}-{owner}", mode)
        done = kiwi(
            "daemon", "--emulate", "1x64MiB", "--socket-dir", str(place), env=alice,
            before=as_user(ALICE),
        )  # fmt: skip
        assert done.returncode == 1, (mode, owner)
        assert str(place) in done.stderr
        assert "Traceback" not in done.stderr
