"""The laboratory: JupyterHub, Slurm and Kiwi on emulated machines, from scratch to a verdict.

``make cluster`` runs it. It needs root, on Debian or Ubuntu. Folders beside this file that have a
``check.sh`` are checks of their own. They run while the cluster is checked, because both mostly
wait; their lines come afterwards.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hub_checks
import slurm_checks
from install import HUB_USER, REPOSITORY, USERS, install, missing, remove, work_directory
from nodes import Node, connect, start_kiwi
from verdict import Verdict, say

HERE = Path(__file__).parent

Script = tuple[str, "subprocess.Popen[bytes]"]
"""The name of a folder that has checks of its own, and the process that runs them."""


def main() -> int:
    if why := missing():
        print(f"make cluster does not run here: {why}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began_s = time.monotonic()
    verdict, nodes, scripts = Verdict(), list[Node](), list[Script]()
    work = work_directory()
    try:
        install(work)
        _start(work, nodes)
        say(f"the cluster is up after {time.monotonic() - began_s:.0f} s")
        scripts += [_begin(script, work) for script in sorted(HERE.glob("*/check.sh"))]
        for check in checks(work, nodes):
            _one(verdict, check)
        say(f"the cluster is checked after {time.monotonic() - began_s:.0f} s")
        for name, script in scripts:
            _await(verdict, name, script, work)
    finally:
        if os.environ.get("KEEP"):
            input(f"The cluster stays up until you press Enter. Its files: {work}\n")
        for _, script in scripts:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGTERM)
                script.wait()
        for node in reversed(nodes):
            node.close()
        if verdict.failed:
            _keep_logs(work)
        remove(work)
    say(f"took {time.monotonic() - began_s:.0f} s")
    return verdict.close()


def _start(work: Path, nodes: list[Node]) -> None:
    names = ("head", "kn1", "kn2", "kn3")
    hosts = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
    (work / "hosts").write_text("\n".join(lines) + "\n")
    for name in ("programs", "hub"):
        shutil.copytree(HERE / name, work / name)
    shutil.copytree(REPOSITORY / "integrations/jupyterhub/spawners", work / "jupyterhub")
    slurm_checks.configure(work)
    for name, address in hosts.items():
        nodes.append(Node(name, address, work))
    connect(nodes)
    for node in nodes[1:3]:
        start_kiwi(node)
    start_kiwi(nodes[3], "2x512MiB")
    # The first program of a user compiles Kiwi's library, which must not count in a check.
    first = [nodes[1].start("kiwi", "run", "--", "true", user=user) for user in USERS]
    slurm_checks.start(nodes[0], nodes[1:])
    for program in first:
        program.wait(300)


def checks(work: Path, nodes: list[Node]) -> list[functools.partial[None]]:
    head, kn1, kn2, kn3 = nodes
    return [
        functools.partial(slurm_checks.check_right_gpu, work=work, head=head, kn1=kn1),
        functools.partial(slurm_checks.check_partition, work=work, head=head),
        functools.partial(slurm_checks.check_counting, work=work, head=head),
        functools.partial(slurm_checks.check_weights, work=work, head=head, kn1=kn1),
        functools.partial(slurm_checks.check_drain, head=head, kn2=kn2),
        functools.partial(slurm_checks.check_suspend, work=work, head=head, kn2=kn2),
        functools.partial(slurm_checks.check_little_ram, work=work, head=head, kn3=kn3),
        functools.partial(slurm_checks.check_leftovers, work=work, head=head, kn3=kn3),
        functools.partial(hub_checks.check_shared, work=work, node=kn1, kind="local"),
        functools.partial(hub_checks.check_spread, work=work, node=kn1),
        functools.partial(hub_checks.check_culling, work=work, node=kn1),
        functools.partial(hub_checks.check_shared, work=work, node=kn1, kind="sudo", user=HUB_USER),
        functools.partial(hub_checks.check_shared, work=work, node=head, kind="slurm"),
        functools.partial(hub_checks.check_form, work=work, head=head, kn1=kn1),
    ]


def _one(verdict: Verdict, check: functools.partial[None]) -> None:
    """Run one check. If it waits in vain, or cannot read something, it has failed."""
    name = " ".join([check.func.__name__, check.keywords.get("kind", "")]).strip()
    say(name)
    try:
        check(verdict)
    except Exception as error:  # noqa: BLE001 (the other checks still say what they find)
        verdict.judge(name, False, f"{type(error).__name__}: {error}")


def _begin(script: Path, work: Path) -> Script:
    """Start a folder's own checks; their lines go to a log."""
    name = script.parent.name
    env = {**os.environ, "KIWI_CLUSTER_PYTHON": str(work / "opt/bin/python")}
    with (work / f"{name}.log").open("wb") as log:
        return name, subprocess.Popen(
            ["bash", script], cwd=script.parent, env=env, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _await(verdict: Verdict, name: str, script: subprocess.Popen[bytes], work: Path) -> None:
    """Wait until the checks have ended, and show their lines: their exit status counts."""
    status = script.wait()
    say(f"{name}/check.sh")
    print((work / f"{name}.log").read_text(errors="replace"), end="", flush=True)
    verdict.judge(name, status == 0, f"exit status {status}")


def _keep_logs(work: Path) -> None:
    place = HERE.parents[1] / "test-artifacts/cluster"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for log in work.glob("*.log"):
        shutil.copy(log, place)
    say(f"logs of the failed run: {place}")


if __name__ == "__main__":
    sys.exit(main())
