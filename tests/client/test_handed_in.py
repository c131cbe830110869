"""Tests of the socket directory in a container with its own user namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kiwi_core.client.handed_in import trusted_uids
from tests.client.scripted_daemon import ScriptedDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

ALICE = 54321
NOBODY = 65534
"""The overflow uid."""

INSIDE = """
import ctypes, json, os, subprocess, sys
from pathlib import Path
from kiwi_core.client import Client, discover
from kiwi_core.client.directory import why_no_sockets
from kiwi_core.errors import KiwiError
from kiwi_core.wire.messages import Role

source, place, mount, namespace = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_USERS, DUMPABLE = 0x20000, 0x10000000, 4

def run(*words):
    subprocess.run(words, check=True)

assert libc.unshare(NEW_MOUNTS) == 0
run("mount", "--make-rprivate", "/")
if mount == "above":
    run("mount", "--bind", os.path.dirname(source), os.path.dirname(place))
    run("mount", "-o", "remount,bind,ro", os.path.dirname(place))
else:
    run("mount", "--bind", source, place)
    if mount == "ro":
        run("mount", "-o", "remount,bind,ro", place)
os.setgroups([]); os.setgid(54321); os.setuid(54321)
if namespace == "user":
    assert libc.unshare(NEW_USERS) == 0
    assert libc.prctl(DUMPABLE, 1, 0, 0, 0) == 0
    Path("/proc/self/uid_map").write_text("54321 54321 1")
found = discover(Path(place))
try:
    Client(Path(place) / "GPU-a.sock", role=Role.OBSERVER, reconnect=False).connect()
    said = "welcome"
except KiwiError as error:
    said = error.code
print(json.dumps({
    "uid": os.getuid(), "owner": os.stat(place).st_uid, "found": len(found), "said": said,
    "why": why_no_sockets(Path(place)),
}))
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount something")


@pytest.fixture
def source() -> Iterator[Path]:
    """Return the directory of a daemon that root runs outside."""
    top = Path(tempfile.mkdtemp(prefix="kw-", dir="/tmp"))
    top.chmod(0o755)
    directory = top / "outside" / "s"
    directory.mkdir(parents=True)
    daemon = ScriptedDaemon(directory / "GPU-a.sock")
    daemon.start()
    os.chmod(directory / "GPU-a.sock", 0o666)
    yield directory
    daemon.stop()
    shutil.rmtree(top)


def seen(source: Path, mount: str, namespace: str) -> Any:
    place = source.parent.parent / "inside" / "s"
    place.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, str(source), str(place), mount, namespace],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_directory_that_was_mounted_read_only_is_trusted(source: Path) -> None:
    inside = seen(source, "ro", "user")
    assert (inside["uid"], inside["owner"]) == (ALICE, NOBODY)
    assert (inside["found"], inside["said"], inside["why"]) == (1, "welcome", "")


@pytest.mark.parametrize("mount", ["rw", "above"])
def test_a_directory_of_another_mount_is_not_trusted(source: Path, mount: str) -> None:
    inside = seen(source, mount, "user")
    assert (inside["owner"], inside["found"], inside["said"]) == (NOBODY, 0, "not-trusted")
    assert "belongs to another user" in inside["why"]


def test_a_process_that_sees_all_users_trusts_no_mount(source: Path) -> None:
    """On the machine itself, the overflow uid is a user like others."""
    os.chown(source / "GPU-a.sock", NOBODY, NOBODY)
    os.chown(source, NOBODY, NOBODY)
    inside = seen(source, "ro", "none")
    assert (inside["owner"], inside["found"]) == (NOBODY, 0)


def test_no_mount_of_this_machine_is_trusted(source: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY)
    try:
        assert trusted_uids(descriptor) == {0}
    finally:
        os.close(descriptor)
