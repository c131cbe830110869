"""Install what the laboratory needs, list it, and remove it again (except Debian packages)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from nodes import until
from verdict import say

REPOSITORY = Path(__file__).parents[2]
USERS = ("kiwi-ada", "kiwi-bob")
HUB_USER = "kiwi-hub"
ADMINS = "kiwi-admins"
DEBIAN = {
    "slurm-wlm": "slurmctld", "munge": "munged", "sudo": "sudo", "iproute2": "ip", "gcc": "cc",
    "libc6-dev": "", "python3-venv": "", "npm": "npm",
}  # fmt: skip
"""Packages, and the program by which each is known if another package may bring it."""
PYTHON = (
    "jupyterlab>=4.2,<5", "jupyterhub>=5,<6", "jupyterhub-idle-culler", "batchspawner",
    "sudospawner", "aiohttp",
)  # fmt: skip
PROXY = "configurable-http-proxy@5"
MOUNT_POINTS = (Path("/opt/kiwi"), Path("/var/cache/kiwi"), Path("/var/lib/kiwi"))
SUDOERS = Path("/etc/sudoers.d/kiwi-cluster")


def missing() -> str:
    """Return why the laboratory cannot run here; "" if it can."""
    if os.geteuid() != 0:
        return "it needs root: namespaces, control groups and users of its own"
    if not shutil.which("apt-get"):
        return "it needs Debian or Ubuntu: it installs Slurm with apt-get"
    if not Path("/sys/fs/cgroup/devices").is_dir():
        return "it needs version 1 of the device control group (/sys/fs/cgroup/devices)"
    return ""


def work_directory() -> Path:
    """Make the directory that every node sees."""
    work = Path(tempfile.mkdtemp(prefix="kiwi-cluster-"))
    work.chmod(0o755)
    for name in ("etc", "cache", "opt"):
        (work / name).mkdir(mode=0o755)
    return work


def install(work: Path) -> None:
    _debian()
    _users()
    _python(work / "opt")


def _debian() -> None:
    have = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *DEBIAN],
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    path = os.environ["PATH"] + ":/usr/sbin"
    wanted = [
        name
        for name, program in DEBIAN.items()
        if f"{name} installed" not in have and not (program and shutil.which(program, path=path))
    ]
    if not wanted:
        return
    say(f"installs Debian packages, which stay: {' '.join(wanted)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=env, check=True)
    subprocess.run(
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted],
        env=env, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _users() -> None:
    say(f"makes users, until its end: {' '.join((*USERS, HUB_USER))}")
    subprocess.run(["groupadd", "--force", ADMINS], check=True)
    for user in (*USERS, HUB_USER):
        subprocess.run(["userdel", "--remove", user], capture_output=True)
        subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", user], check=True)
        Path(f"/home/{user}").chmod(0o700)
    SUDOERS.write_text(
        "Cmnd_Alias KIWI_CLUSTER = /opt/kiwi/bin/sudospawner, /usr/bin/sbatch, /usr/bin/squeue,"
        " /usr/bin/scancel\n"
        f"Defaults:{HUB_USER} !requiretty\n"
        f"{HUB_USER} ALL=({','.join(USERS)}) NOPASSWD:SETENV: KIWI_CLUSTER\n"
    )
    SUDOERS.chmod(0o440)


def _python(place: Path) -> None:
    """Build the environment in ``place``, which the nodes see as /opt/kiwi."""
    say(f"installs Kiwi, {', '.join(PYTHON)} and {PROXY} into a directory of its own")
    # Debian's Python: users cannot enter root's home, where another one may be.
    bound = Path("/opt/kiwi")
    bound.mkdir(exist_ok=True)
    build = (
        'mount --make-rprivate / && mount --bind "$1" /opt/kiwi && shift'
        " && /usr/bin/python3 -m venv /opt/kiwi"
        ' && /opt/kiwi/bin/pip install -q --disable-pip-version-check "$@"'
        f" && npm install --silent --prefix /opt/kiwi/proxy {PROXY}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", build, "sh", place, REPOSITORY, *PYTHON],
        env={**os.environ, "KIWI_SKIP_LABEXTENSION": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nThe packages cannot be installed.")


def remove(work: Path) -> None:
    """Remove all but the Debian packages."""
    for user in (*USERS, HUB_USER):
        subprocess.run(["userdel", "--remove", user], capture_output=True)
    subprocess.run(["groupdel", ADMINS], capture_output=True)
    SUDOERS.unlink(missing_ok=True)
    until(_without_groups, "Slurm's control groups are empty")
    for place in MOUNT_POINTS:
        with suppress(OSError):  # it belongs to somebody else, and is not empty
            place.rmdir()
    shutil.rmtree(work)


def _without_groups() -> bool:
    """Remove the control groups that Slurm has made. Raises ``OSError`` while a process of a node
    is still ending."""
    for top in Path("/sys/fs/cgroup").glob("*/slurm_kn*"):
        for group in sorted((top, *top.rglob("*")), reverse=True):
            if group.is_dir():
                group.rmdir()
    return True
