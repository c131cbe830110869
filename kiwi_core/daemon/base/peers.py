"""The process at the other end of a socket, as the kernel reports it, and what its user may do."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from kiwi_core.errors import PeerError
from kiwi_core.gpu import containers, processes

if TYPE_CHECKING:
    from kiwi_core.gpu.processes import ProcessRef

_UCRED = struct.Struct("3i")


class Owner(NamedTuple):
    """The owner of a session: a user of the machine, or of one pod or container (``container``)."""

    uid: int
    container: str = ""


@dataclass(frozen=True)
class Peer:
    """``SO_PEERCRED``: the process that connected, as it was when it connected (unix(7)).

    ``pid`` is 0 if the peer is in a PID namespace that this process cannot see. ``container`` is
    the result of ``containers.container_of`` for the process.
    """

    pid: int
    uid: int
    gid: int
    container: str = ""

    @property
    def owner(self) -> str:
        return user_name(self.uid)

    @property
    def identity(self) -> Owner:
        return Owner(self.uid, self.container)


def peer_of(sock: socket.socket) -> Peer:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(pid, uid, gid, containers.container_of(pid))


def process_of(peer: Peer) -> ProcessRef:
    """Return the peer's process. Raises ``PeerError``: "unknown-process" or "not-yours"."""
    ref = processes.ref_of(peer.pid)
    if ref is None:
        raise PeerError(
            "unknown-process",
            "The daemon cannot see your process (another PID namespace, perhaps).",
            "Run the daemon and the notebooks in the same PID namespace.",
        )
    if not processes.runs_as(ref.pid, peer.uid):
        # The credentials are those of the process that connected, perhaps long ago: the pid may
        # belong to a process of another user now.
        raise PeerError(
            "not-yours",
            f"Process {ref.pid} does not belong to the user who opened this connection.",
            "Connect again.",
        )
    return ref


NAMES_FOR_S: Final = 30
"""How long answers of the user database are cached. A query reads files, or asks another machine
over the network, and peers can cause as many as they like."""

NAMES_MAX: Final = 4096


def user_name(uid: int) -> str:
    return _user_name(uid, _now())


def _now() -> int:
    return int(time.monotonic()) // NAMES_FOR_S


@lru_cache(NAMES_MAX)
def _user_name(uid: int, _now: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@dataclass(frozen=True)
class Rights:
    """The rights of users at one daemon.

    A user sees and acts on their own processes. The daemon's owner, root and the members of
    ``admin_group`` are its admins: they change settings, act on everybody's processes, and see
    everybody's usage by name (docs/security.md), but no names of programs in the status. This holds
    for a uid only on the machine itself and in the daemon's own ``container``: in another container
    anybody can have any uid, root's included.
    """

    daemon_uid: int
    admin_group: str | None = None
    container: str = ""

    def may_see(self, peer: Peer, owner: Owner) -> bool:
        """Return whether ``peer`` may see what belongs to ``owner`` in the status, with its name.
        Only root sees other users' names; admins see numbers.
        """
        return _is(peer, owner) or (peer.uid == 0 and self.knows_uid_of(peer))

    def may_act(self, peer: Peer, owner: Owner) -> bool:
        """Return whether ``peer`` may have the memory of ``owner`` moved. Admins may, without
        seeing its name."""
        return _is(peer, owner) or self.is_admin(peer)

    def may_see_usage(self, peer: Peer) -> bool:
        """Return whether ``peer`` may see everybody's usage, with the names of users and notebooks:
        whoever sets the quantum must be able to see for whom it is right."""
        return self.is_admin(peer)

    def knows_uid_of(self, peer: Peer) -> bool:
        """Return whether the peer's uid names a user of this machine."""
        return peer.container in ("", self.container)

    def is_admin(self, peer: Peer) -> bool:
        """Return whether ``peer`` may change settings, and undo what an admin has done."""
        if not self.knows_uid_of(peer):
            return False
        if peer.uid in (self.daemon_uid, 0):
            return True
        group = self.admin_group
        return group is not None and _is_member(peer.uid, peer.gid, group, _now())

    @staticmethod
    def of_this_process(admin_group: str | None) -> Rights:
        return Rights(os.getuid(), admin_group, containers.container_of("self"))


def _is(peer: Peer, owner: Owner) -> bool:
    return peer.identity == owner and peer.container != containers.HIDDEN


@lru_cache(NAMES_MAX)
def _is_member(uid: int, gid: int, group: str, _now: int) -> bool:
    try:
        entry = grp.getgrnam(group)
        return gid == entry.gr_gid or pwd.getpwuid(uid).pw_name in entry.gr_mem
    except KeyError:
        return False
