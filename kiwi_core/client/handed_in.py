"""Whether the socket directory was handed into this container.

In a user namespace of its own, as of a pod with ``hostUsers: false``, a container cannot tell root
of the machine from any other user outside: files and peers of all of them show the overflow uid.
There the mount is the proof, in place of the uid. Only the user who starts the container, or its
root, can mount something in it, and nothing inside can put a socket on a read-only mount.

``native/src/link/place.c`` has the same rules.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_ALL_USERS: Final = ["0", "0", "4294967295"]
"""The map of the initial user namespace, in which no uid is hidden."""

_MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


def trusted_uids(directory: int) -> frozenset[int]:
    """Return the users that may put daemons into ``directory``, an open descriptor: root and the
    current user, who control this process anyway, and whoever is behind the overflow uid if the
    directory was handed in.
    """
    own = frozenset((0, os.getuid()))
    try:
        if not _is_handed_in(directory):
            return own
        return own | {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except OSError:  # no /proc: nothing proves the mount
        return own


def _is_handed_in(directory: int) -> bool:
    """Return whether ``directory`` is itself the top of a read-only mount, in a user namespace."""
    proc = Path("/proc/self")
    if (proc / "uid_map").read_text().split() == _ALL_USERS:
        return False
    found = _MOUNT_ID.search((proc / f"fdinfo/{directory}").read_text())
    path = os.readlink(proc / f"fd/{directory}")
    mounts = (proc / "mountinfo").read_text(errors="replace").splitlines()
    # Fields, as proc(5) has them: id, parent, device, root, mount point, options … A path with a
    # blank is escaped there, and never the same.
    return found is not None and any(
        fields[0] == found[1] and fields[4] == path and "ro" in fields[5].split(",")
        for fields in (line.split(" ") for line in mounts)
    )
