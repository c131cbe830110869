"""JupyterHub with three spawners: users share a GPU, see their own names only, and alter nothing of
others; its options page, and idle kernels."""

from __future__ import annotations

import re
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from install import REPOSITORY, USERS
from nodes import until
from slurm_checks import ADA, BOB, ended, program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nodes import Node
    from verdict import Verdict

PYTHON = "/opt/kiwi/bin/python"
SOON = """
c.MappingKernelManager.cull_idle_timeout = 10
c.MappingKernelManager.cull_interval = 1
"""


@contextmanager
def hub(
    node: Node, work: Path, kind: str, user: str = "root", *, culls: bool = False
) -> Iterator[None]:
    """Run a hub on ``node`` until the end of the block. ``culls``: with the hub's idle culler."""
    place = f"/var/spool/hub-{kind}"
    node.run("install", "-d", "-o", user, "-m", "0700", place)
    running = node.start(
        "jupyterhub", "-f", work / "hub/jupyterhub_config.py", user=user, directory=place,
        env={"HUB_SPAWNER": kind, "HUB_EXAMPLES": str(work / "jupyterhub"),
             "HUB_CULLS": "1" if culls else ""},
        log=f"hub.{kind}.log",
    )  # fmt: skip
    asks = 'import urllib.request as u; u.urlopen("http://127.0.0.1:8000/hub/api"); print("up")'
    try:
        until(lambda: "up" in node.run(PYTHON, "-c", asks).split(), f"the hub ({kind})", 60)
        yield
    finally:
        drive(node, work, "stop", *USERS)
        running.send_signal(signal.SIGINT)
        node.run("pkill", "-INT", "-f", "bin/jupyterhub -f")
        running.wait(60)
        node.run("pkill", "-f", "configurable-http-proxy")


def drive(node: Node, work: Path, *words: str) -> str:
    return node.run(PYTHON, work / "hub/drive.py", *words)


def check_shared(verdict: Verdict, work: Path, node: Node, kind: str, user: str = "root") -> None:
    with hub(node, work, kind, user):
        said = drive(node, work, "run", str(work / "programs/notebook.py"), ADA, BOB)
        intact = said.count("wrong blocks: 0") == 2
        verdict.judge(f"hub ({kind}): two users share a GPU, every byte intact", intact, said)
        hidden = "another user of another user" in said and f"{ADA} sees on GPU" in said
        names = re.findall(rf"{ADA} sees on GPU \d: .* of (\S+)", said)
        verdict.judge(
            f"hub ({kind}): names of others are hidden", hidden and BOB not in names, said
        )
        verdict.check(f"hub ({kind}): others' memory cannot be released", said,
                      "releases another's session: 404")  # fmt: skip
        verdict.check(f"hub ({kind}): settings cannot be changed", said, "sets the quantum: 403")


def check_spread(verdict: Verdict, work: Path, node: Node) -> None:
    """Check that kernels spread although two servers know nothing of each other, and no program has
    used a GPU yet."""
    with hub(node, work, "local"):
        said = drive(node, work, "run", str(work / "programs/where.py"), ADA, BOB)
        placed = re.findall(r"placed on (GPU-\S+)", said)
        good = len(placed) == 2 and placed[0] != placed[1]
        verdict.judge("kernels of two servers are placed on two GPUs", good, said)


def check_form(verdict: Verdict, work: Path, head: Node, kn1: Node) -> None:
    """Check the options page of a hub before Slurm, while all GPUs of one node are busy."""
    kn1.run("kiwi", "set", "tq=30")
    busy = [
        kn1.start("kiwi", "run", "--gpu", gpu, "--", *program(work, 300, 150), user=BOB)
        for gpu in (0, 1)
    ]
    try:
        with hub(head, work, "slurm"):
            until(lambda: re.search(r"kn1: a cell waits", drive(head, work, "form", ADA)),
                  "the page shows the wait", 90)  # fmt: skip
            said = drive(head, work, "form", ADA)
            page = r"now kn2, free now\) checked\nkn2: free now \nkn1: a cell waits"
            verdict.check("the hub's page shows each node's wait, shortest first", said, page)
            said = drive(head, work, "place", ADA, "kn9 --uid=0")
            verdict.check("a place that does not exist is refused", said, "refused")
            drive(head, work, "place", ADA, "")
            said = head.run("squeue", "-h", "-u", ADA, "-t", "R", "-o", "%N")
            verdict.check("a server goes where the wait is shortest", said, "^kn2$")
            drive(head, work, "stop", ADA)
            drive(head, work, "place", ADA, "kn1")
            said = head.run("squeue", "-h", "-u", ADA, "-t", "R", "-o", "%N")
            verdict.check("and to the node that its user chose", said, "^kn1$")
    finally:
        ended(busy)
        kn1.run("kiwi", "set", "tq=3")


def check_culling(verdict: Verdict, work: Path, node: Node) -> None:
    """Check the configuration that keeps idle kernels with GPU memory, with Jupyter Server's timer
    and the hub's. Ada's kernel has memory, which a program of bob's needs out of the way."""
    recipe = (REPOSITORY / "packaging/jupyter_server/keep_gpu_memory.py").read_text()
    places = [Path(f"/home/{user}/.jupyter/jupyter_server_config.py") for user in USERS]
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.write_text(recipe + SOON)
        node.run("chown", "-R", f"{place.parent.parent.name}:", place.parent)

    def kernels(user: str) -> list[str]:
        return drive(node, work, "kernels", user).split()

    def sessions() -> list[tuple[int, str]]:
        return [(gpu["index"], one["state"]) for gpu in node.status()["gpus"]
                for one in gpu["sessions"] if one["owner"] == ADA]  # fmt: skip

    try:
        with hub(node, work, "local", culls=True):
            drive(node, work, "run", str(work / "programs/notebook.py"), ADA)
            until(lambda: [state for _, state in sessions()] == ["idle"], "the notebook idles")
            ((gpu, _),) = sessions()
            (holder,) = kernels(ADA)
            node.run("kiwi", "run", "--gpu", gpu, "--", *program(work, 300, 1), user=BOB)
            verdict.judge("the memory of an idle kernel is paged out for another program",
                          sessions() == [(gpu, "paged-out")], sessions())  # fmt: skip
            drive(node, work, "kernel", ADA)
            until(lambda: len(kernels(ADA)) == 2, "a second kernel runs")
            until(lambda: kernels(ADA) == [holder], "the culler has ended a kernel", 60)
            verdict.judge("Jupyter Server's culler ends an idle kernel without memory, and keeps"
                          " the other", True)  # fmt: skip
            # From here on, nobody but the kernel keeps ada's server, and nobody keeps bob's.
            drive(node, work, "start", BOB)
            until(lambda: "none" in drive(node, work, "server", BOB).split(),
                  "the hub has ended bob's server", 90)  # fmt: skip
            verdict.judge("the hub's culler ends an idle server, and keeps the one with that"
                          " kernel", kernels(ADA) == [holder], kernels(ADA))  # fmt: skip
            verdict.judge("whose memory is still paged out", sessions() == [(gpu, "paged-out")],
                          sessions())  # fmt: skip
            said = drive(node, work, "run", str(work / "programs/intact.py"), ADA)
            verdict.check("and comes back, every byte intact", said, "after idling: 0")
    finally:
        for place in places:
            place.unlink()
