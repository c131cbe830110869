"""Tests of who may release, suspend and resume whose session, and of the limit of sessions."""

from __future__ import annotations

import grp
import subprocess
from typing import TYPE_CHECKING

import pytest
from patience import wait_until
from unprivileged import (
    ALICE,
    BOB,
    KIWI,
    PATIENCE_S,
    RootDaemon,
    as_user,
    crowd,
    needs_other_users,
    root_daemon,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SESSIONS_PER_USER = 2
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def group() -> grp.struct_group:
    """Return a group that every system has and no user is in by accident."""
    return next(one for one in grp.getgrall() if one.gr_gid not in (0, ALICE, BOB))


@pytest.fixture(scope="module")
def daemon(group: grp.struct_group) -> Iterator[RootDaemon]:
    needs_other_users()
    arguments = ("--admin-group", group.gr_name, "--sessions-per-user", str(SESSIONS_PER_USER))
    with root_daemon(*arguments) as one:
        yield one
        assert one.process.poll() is None, one.log()


def release(
    daemon: RootDaemon, session: str, uid: int, gid: int | None = None
) -> subprocess.CompletedProcess[str]:
    return kiwi(daemon, "release", session, uid, gid)


def kiwi(
    daemon: RootDaemon, what: str, session: str, uid: int, gid: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*as_user(uid), str(KIWI), what, session]
    if gid is not None:
        command = [f"--regid={gid}" if word.startswith("--regid") else word for word in command]
    return subprocess.run(
        command, env=daemon.env, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/"
    )


def test_who_may_release_whose_session(daemon: RootDaemon, group: grp.struct_group) -> None:
    with crowd(daemon, "session", 1, uid=BOB):
        (session,) = wait_until(lambda: [one["id"] for one in daemon.status()["sessions"]], "it")
        stranger = release(daemon, session, ALICE)
        assert stranger.returncode == 1
        assert "You have no session" in stranger.stderr
        assert "release" not in daemon.log()
        for uid, gid in ((BOB, None), (ALICE, group.gr_gid)):
            done = release(daemon, session, uid, gid)
            assert (done.returncode, done.stderr) == (0, ""), gid
            assert f"{session}: its memory is out" in done.stdout
            assert f"by={uid}" in daemon.log()
    wait_until(lambda: not daemon.status()["sessions"], "all sessions gone")


def test_who_may_suspend_and_resume_whose_session(
    daemon: RootDaemon, group: grp.struct_group
) -> None:
    """A user cannot resume what an admin suspended; an admin can resume what a user suspended."""
    with crowd(daemon, "session", 1, uid=BOB):
        (session,) = wait_until(lambda: [one["id"] for one in daemon.status()["sessions"]], "it")

        def suspended_by() -> str:
            (one,) = daemon.status()["sessions"]
            assert bool(one["kept_out"]) == (one["problem"] == "kept-out")
            return str(one["kept_out"])

        for what in ("suspend", "resume"):
            stranger = kiwi(daemon, what, session, ALICE)
            assert stranger.returncode == 1
            assert "You have no session" in stranger.stderr
        assert suspended_by() == ""
        steps = [
            ("suspend", BOB, None, "its user"), ("resume", BOB, None, ""),
            ("suspend", BOB, None, "its user"), ("suspend", ALICE, group.gr_gid, "an admin"),
            ("suspend", BOB, None, "an admin"),
        ]  # fmt: skip
        for what, uid, gid, by in steps:
            done = kiwi(daemon, what, session, uid, gid)
            assert (done.returncode, done.stderr) == (0, ""), (what, uid)
            assert suspended_by() == by
        refused = kiwi(daemon, "resume", session, BOB)
        assert refused.returncode == 1
        assert "only an admin can let it go on" in refused.stderr
        assert suspended_by() == "an admin"
        assert kiwi(daemon, "resume", session, 0).returncode == 0
        assert suspended_by() == ""
        assert kiwi(daemon, "resume", session, BOB).returncode == 0
    wait_until(lambda: not daemon.status()["sessions"], "all sessions gone")


def test_a_session_that_nobody_has(daemon: RootDaemon) -> None:
    done = release(daemon, "k0123456789", ALICE)
    assert done.returncode == 1
    assert "No GPU has a session 'k0123456789'" in done.stderr


def test_a_user_has_as_many_sessions_as_the_admin_allows(daemon: RootDaemon) -> None:
    with crowd(daemon, "session", SESSIONS_PER_USER + 2, uid=BOB) as said:
        assert said == {"welcome": SESSIONS_PER_USER, "too-many-sessions": 2}
        with crowd(daemon, "session", 1, uid=ALICE) as other:
            assert other == {"welcome": 1}
        with crowd(daemon, "session", SESSIONS_PER_USER + 1, uid=0) as root:
            assert root == {"welcome": SESSIONS_PER_USER + 1}
    wait_until(lambda: not daemon.status()["sessions"], "all sessions gone")
