"""Tests of whose session it is if all users are uid 1000: the control group names the container."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import wait_until
from session_program import SessionProgram
from somebody import ALICE, Somebody

from kiwi_core.daemon.base.peers import Owner, Peer, Rights
from kiwi_core.daemon.roster.registry import SessionRecord, session_id
from kiwi_core.gpu.containers import HIDDEN, ContainerKind, Group, container_of, group_of
from kiwi_core.pager.api import ProcessRef
from kiwi_core.states import Notice, SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

    from kiwi_core.wire.messages import SessionStatus

ID = "0123456789abcdef" * 4
OTHER = "f" * 64
POD = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
POD_ = POD.replace("-", "_")
STATIC = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("path", "kind", "id_"),
    [
        (f"/docker/{ID}", ContainerKind.CONTAINER, ID),
        (f"/system.slice/docker-{ID}.scope", ContainerKind.CONTAINER, ID),
        (f"/docker/{ID}/user.slice/session-1.scope", ContainerKind.CONTAINER, ID),
        (f"/machine.slice/libpod-{ID}.scope/container", ContainerKind.CONTAINER, ID),
        (f"/libpod_parent/libpod-{ID}", ContainerKind.CONTAINER, ID),
        (f"/system.slice/nerdctl-{ID}.scope", ContainerKind.CONTAINER, ID),
        (f"/default/{ID}", ContainerKind.CONTAINER, ID),
        (f"/kubepods/burstable/pod{POD}/{ID}", ContainerKind.POD, POD),
        (f"/kubepods/pod{POD}/crio-{ID}", ContainerKind.POD, POD),
        (f"/kubepods/besteffort/pod{STATIC}/{ID}", ContainerKind.POD, STATIC),
        (
            f"/kubepods.slice/kubepods-burst.slice/kubepods-pod{POD_}.slice/cri-containerd-{ID}.scope",
            ContainerKind.POD,
            POD,
        ),
        (f"/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ID}.scope/container",
         ContainerKind.POD, POD),
        (f"/system.slice/containerd.service/kubepods-pod{POD_}.slice:cri-containerd:{ID}",
         ContainerKind.CONTAINER, ID),
        # The view of a daemon in a pod on another pod.
        (f"/../../kubepods-besteffort-pod{POD_}.slice/cri-containerd-{ID}.scope",
         ContainerKind.POD, POD),
        ("/slurm/uid_1000/job_12/step_0/task_0", ContainerKind.JOB, "12"),
        ("/system.slice/slurmstepd.scope/job_7/step_batch/user/task_0", ContainerKind.JOB, "7"),
        (f"/system.slice/slurmstepd.scope/job_7/libpod-{ID}.scope", ContainerKind.JOB, "7"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["0::", "12:memory:", "1:name=systemd:"])
def test_a_control_group_names_its_pod_container_or_job(
    before: str, path: str, kind: ContainerKind, id_: str
) -> None:
    assert group_of(f"{before}{path}\n") == Group(kind, id_)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/init.scope",
        "/system.slice/kiwi.service",
        "/user.slice/user-1000.slice/session-3.scope",
        # Users choose these names.
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
        f"/user.slice/user-1000.slice/user@1000.service/kubepods-pod{POD_}.slice",
        "/user.slice/user-1000.slice/user@1000.service/job_12",
        f"/system.slice/docker-{ID[:12]}.scope",
        "/system.slice/podman.service",
        "/my-job_12",
    ],
)
def test_other_control_groups_name_none(path: str) -> None:
    assert group_of(f"0::{path}\n") is None


def test_the_first_hierarchy_that_names_one_counts() -> None:
    assert group_of(f"3:cpu:/\n2:memory:/docker/{ID}\n0::/\n") == Group(ContainerKind.CONTAINER, ID)
    assert group_of("") is None
    assert group_of("no line of a cgroup file") is None


def test_what_a_container_makes_below_its_own_group_changes_nothing() -> None:
    assert group_of(f"0::/docker/{ID}/docker/{OTHER}/kubepods/pod{POD}\n") == Group(
        ContainerKind.CONTAINER, ID
    )


def test_a_process_that_cannot_be_seen_is_in_a_container_of_its_own() -> None:
    assert container_of(0) == HIDDEN
    hidden = Peer(0, 1000, 1000, HIDDEN)
    rights = Rights(daemon_uid=0)
    assert not rights.may_see(hidden, Owner(1000))
    assert not rights.may_see(hidden, hidden.identity)
    assert not rights.may_act(hidden, hidden.identity)


def test_root_of_a_container_is_not_root_of_the_machine() -> None:
    rights = Rights(daemon_uid=0, admin_group=None, container="daemons")
    for container, allowed in (("", True), ("daemons", True), (ID, False), (HIDDEN, False)):
        root = Peer(5, 0, 0, container)
        assert rights.is_admin(root) is allowed, container
        assert rights.may_see(root, Owner(1000, OTHER)) is allowed
        assert rights.may_act(root, Owner(1000, OTHER)) is allowed


def test_the_same_uid_in_another_container_is_somebody_else() -> None:
    rights = Rights(daemon_uid=0)
    here, there, outside = (Peer(5, 1000, 1000, name) for name in (ID, OTHER, ""))
    assert rights.may_see(here, Owner(1000, ID))
    assert rights.may_act(here, Owner(1000, ID))
    for peer in (there, outside):
        assert not rights.may_see(peer, Owner(1000, ID))
        assert not rights.may_act(peer, Owner(1000, ID))
    assert not rights.may_see(here, Owner(1000))


def test_turns_go_round_containers_too() -> None:
    ref = ProcessRef(1, 1)
    owners = {
        SessionRecord(session_id(ref), ref, 1000, container=name).owner for name in ("", ID, OTHER)
    }
    assert len(owners) == 3


def group_to_make_others_in() -> Path | None:
    """Return the mounted control group of this process, if it may make others in it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        group = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
        if controllers in ("pids", "") and os.access(group / "cgroup.procs", os.W_OK):
            return group
    return None


@contextmanager
def container(path: Path, id_: str) -> Iterator[Somebody]:
    """Connect Alice from a control group with the name that an engine gives to a container."""
    above = group_to_make_others_in()
    assert above is not None
    group = above / f"libpod-{id_}"
    group.mkdir()
    try:
        somebody = Somebody(path, ALICE, group=group)
        try:
            yield somebody
        finally:
            somebody.kill()
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "its processes have ended")
        group.rmdir()


@pytest.mark.skipif(
    os.geteuid() != 0 or group_to_make_others_in() is None,
    reason="needs root, and a control group to make others in",
)
def test_containers_of_one_uid_see_and_alter_nothing_of_each_other(
    start: Callable[..., Daemon],
) -> None:
    daemon = start("1x64MiB")
    daemon.directory.chmod(0o755)
    (path,) = daemon.sockets()
    with container(path, ID) as one, container(path, OTHER) as other:
        session = one.hello(role="session", name="secret.ipynb")["session"]
        other.hello()
        (seen,) = other.ask("get-status")["gpu"]["sessions"]
        assert (seen["name"], seen["owner"], seen["mine"], seen["pid"]) == (
            "another user", "another user", False, 0,
        )  # fmt: skip
        for asked in ("release", "suspend", "resume", "get-story"):
            assert other.ask(asked, session=session)["code"] == "no-such-session", asked
        (own,) = one.ask("get-status")["gpu"]["sessions"]
        assert (own["name"], own["mine"], own["pid"]) == ("secret.ipynb", True, one.pid)
        assert one.ask("get-story", session=session)["type"] == "story"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a PID namespace")
def test_one_without_a_gate_in_its_own_pid_namespace_is_not_taken_for_suspended(
    start: Callable[..., Daemon], stack: ExitStack
) -> None:
    """As outside containers, its turn lasts until it ends its burst."""
    daemon = start("1x256MiB", "--tq", "0.3", "--swap-floor", "0")

    def program(name: str, **more: Any) -> SessionProgram:
        one = SessionProgram(daemon, 20, name=name, **more)
        stack.callback(one.close)
        return one

    other = program("other")
    inside = program("inside", guarded=False, ungated="No library here.", prefix=OWN_PIDS)

    def seen() -> SessionStatus:
        return next(one for one in daemon.status().sessions if one.name == "inside")

    inside.start_burst()
    wait_until(inside.granted, "it has the GPU")
    wait_until(lambda: not seen().guarded, "it is unguarded")
    other.start_burst()
    wait_until(lambda: Notice.BLOCKED_UNGUARDED.value in {word[2] for word in other.waits()},
               "who waits is told why")  # fmt: skip
    assert seen().state is SessionState.RUNNING
    inside.stop_burst()
    wait_until(other.granted, "its turn comes")
    other.stop_burst()
