"""Slurm: the right GPU, the notebooks' partition, the wait as a weight, a node without a daemon,
suspended programs, the usage of a job, and what a job leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from install import REPOSITORY, USERS
from nodes import start_kiwi, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from nodes import Node
    from verdict import Verdict

ADA, BOB = USERS
WORK = "gpu_work.py"


def configure(work: Path) -> None:
    """Called before the nodes start: they copy ``etc`` to /etc/slurm."""
    places = [REPOSITORY / "integrations/slurm", Path(__file__).parent / "slurm"]
    for source in (file for place in places for file in place.iterdir()):
        target = work / "etc" / source.name
        target.write_bytes(source.read_bytes())
        target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def start(head: Node, compute: list[Node]) -> None:
    for node in (head, *compute):
        node.run("setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged")
    head.start("slurmctld", "-D", log="slurmctld.log")
    # Here a program that has left its parents outlives its job, as without control groups.
    compute[-1].run("sed", "-i", "s,proctrack/cgroup,proctrack/linuxproc,", "/etc/slurm/slurm.conf")
    for node in compute:
        node.start("slurmd", "-D", "-N", node.name, log=f"slurmd.{node.name}.log")
    until(lambda: idle(head) == {node.name for node in compute}, "Slurm's nodes are idle", 60)


def idle(head: Node) -> set[str]:
    words = head.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()
    return set(words)


def program(work: Path, mib: int, seconds: float) -> list[object]:
    return ["python", work / "programs" / WORK, mib, seconds]


def told(said: str) -> dict[str, Any]:
    """Return what ``gpu_work.py`` printed; nothing if it did not come so far."""
    lines = [line for line in said.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


def check_right_gpu(verdict: Verdict, work: Path, head: Node, kn1: Node) -> None:
    second = kn1.gpu(1)["uuid"]
    first_taken = head.start("srun", "--gres=gpu:1", "-w", "kn1", "sleep", 300, user=ADA)
    until(
        lambda: "kn1" in head.run("squeue", "-h", "-t", "R", "-o", "%N"), "the first GPU is taken"
    )
    srun = ["srun", "--gres=gpu:1", "-w", "kn1"]
    run = ["kiwi", "run", "--require", "--", *program(work, 50, 0.5)]
    said = head.run(*srun, "env", user=BOB)
    verdict.check("a task's GPU has its UUID (TaskProlog)", said, f"CUDA_VISIBLE_DEVICES={second}")
    for words, what in (
        (["CUDA_VISIBLE_DEVICES=0"], "Slurm's own number, 0 in every job"),
        (["-u", "CUDA_VISIBLE_DEVICES"], "no variable at all"),
    ):
        said = head.run(*srun, "env", *words, *run, user=BOB)
        joined = told(said).get("uuid", "?") == second.removeprefix("GPU-").replace("-", "")
        verdict.judge(f"a job on the second GPU joins its queue: {what}", joined, said)
    said = head.run("srun", "-w", "kn1", *run, user=BOB)
    verdict.check("a job that was given no GPU is told so", said, "may open none of this machine")
    head.run("scancel", "--user", ADA)
    first_taken.wait(60)


def check_partition(verdict: Verdict, work: Path, head: Node) -> None:
    show = ["sh", "-c", "env | grep SHARDS; scontrol show job $SLURM_JOB_ID | grep MinMemoryNode"]
    for command, words in (
        ("srun", ["srun", "-p", "notebooks", "--gres=gpu:1", "--mem=300", *show]),
        ("srun --gpus", ["srun", "-p", "notebooks", "--gpus=1", *show]),
        ("sbatch", ["sbatch", "-W", "-p", "notebooks", "--gres=gpu:1", "-o", "out.txt",
                    "--wrap", show[-1]]),
    ):  # fmt: skip
        said = head.run(*words, user=BOB)
        if command == "sbatch":
            said += head.run("cat", f"/home/{BOB}/out.txt")
        verdict.check(f"{command}: a GPU of the notebooks' partition is a shard", said,
                      r"SLURM_SHARDS_ON_NODE=1$")  # fmt: skip
        verdict.check(f"{command}: with RAM for what is moved out", said, "MinMemoryNode=1112M")
    said = head.run("srun", "-p", "gpu", "--gres=gpu:1", "--mem=300", "env", user=BOB)
    verdict.check("other partitions give whole GPUs", said, "SLURM_GPUS_ON_NODE=1$")


def check_counting(verdict: Verdict, work: Path, head: Node) -> None:
    """Check two jobs at once on a node where Slurm only counts GPUs: each may open both."""
    words = [
        "srun",
        "-p",
        "counted",
        "--gres=kiwi:1",
        "--mem=1200",
        "kiwi",
        "run",
        "--require",
        "--",
    ]
    jobs = [head.start(*words, *program(work, 300, 4), user=user, log=f"count.{user}")
            for user in (ADA, BOB)]  # fmt: skip
    for job in jobs:
        job.wait(90)
    said = [(work / f"count.{user}").read_text() for user in (ADA, BOB)]
    intact = all(told(one).get("wrong") == 0 for one in said)
    verdict.judge("Slurm counts, Kiwi shares: two jobs on a node, every byte intact", intact,
                  "\n".join(said))  # fmt: skip


def check_weights(verdict: Verdict, work: Path, head: Node, kn1: Node) -> None:
    kn1.run("kiwi", "set", "tq=30")
    busy = [
        kn1.start("kiwi", "run", "--gpu", gpu, "--", *program(work, 300, 120), user=BOB)
        for gpu in (0, 1)
    ]
    try:
        until(lambda: weights(head)["kn1"] > weights(head)["kn2"], "the weight of kn1 rises", 90)
        said = kn1.run("kiwi", "wait", "--json")
        verdict.check("kiwi wait says what the weight says", said, r'"wait_s":\d+\.')
        said = head.run("srun", "--gres=shard:1", "--mem=500", "hostname", user=ADA)
        what = f"the next job goes where the wait is shortest {weights(head)}"
        verdict.check(what, said, "^kn2$")
    finally:
        ended(busy)
        kn1.run("kiwi", "set", "tq=3")


def weights(head: Node) -> dict[str, int]:
    lines = head.run("sinfo", "-h", "-N", "-o", "%N %w").splitlines()
    return {name: int(weight) for name, weight in (line.split() for line in lines)}


def check_drain(verdict: Verdict, head: Node, kn2: Node) -> None:
    kn2.run("kiwi", "stop")
    until(lambda: "kn2" in head.run("sinfo", "-h", "-R", "-o", "%E %N"), "kn2 is drained", 60)
    said = head.run("sinfo", "-h", "-R", "-o", "%E %N")
    verdict.check("a node without a daemon takes no jobs", said, "kiwi: no daemon answers kn2")
    start_kiwi(kn2)
    until(lambda: "kn2" in idle(head), "kn2 is back", 60)
    verdict.judge("and takes jobs again when the daemon is back", True)


def check_suspend(verdict: Verdict, work: Path, head: Node, kn2: Node) -> None:
    """Check a job whose processes Slurm stops (SIGSTOP) while it waits in mid-burst for its next
    turn."""
    job = ["sbatch", "--parsable", "-w", "kn2", "--gres=shard:1", "--mem=1200", "-o", "stopped.txt",
           "--wrap", "kiwi run --gpu 0 -- python " + f"{work}/programs/{WORK} 300 12"]  # fmt: skip
    number = head.run(*job, user=ADA).strip()
    state = dict[str, Any]()

    def sessions() -> Iterator[dict[str, Any]]:
        state.update(kn2.gpu(0))
        yield from state["sessions"]

    until(lambda: any(one["owner"] == ADA and one["state"] == "running" for one in sessions()),
          "the job computes")  # fmt: skip
    other = kn2.start("kiwi", "run", "--gpu", 0, "--", *program(work, 300, 8), user=BOB,
                      log="beside-stopped")  # fmt: skip
    until(lambda: any(one["owner"] == ADA and one["state"] == "suspended" for one in sessions()),
          "the job is out")  # fmt: skip
    head.run("scontrol", "suspend", number)
    until(lambda: other.poll() is not None, "the other program ends", 60)
    third = kn2.run("kiwi", "run", "--gpu", 0, "--", *program(work, 300, 1), user=BOB, within_s=30)
    verdict.judge("a job that Slurm has suspended does not keep a free GPU from others",
                  told(third).get("wrong") == 0, third)  # fmt: skip
    head.run("scontrol", "resume", number)
    out = Path(f"/home/{ADA}/stopped.txt")
    until(lambda: told(out.read_text()), "the suspended job goes on", 60)
    verdict.judge("and goes on when it is resumed, every byte intact",
                  told(out.read_text()).get("wrong") == 0, out.read_text())  # fmt: skip
    said = kn2.run("kiwi", "usage", "--by", "job")
    verdict.check("kiwi usage --by job names the job", said, rf"\b{number}\b")


def check_little_ram(verdict: Verdict, work: Path, head: Node, kn3: Node) -> None:
    """Check that the user of a notebook whose job lacks RAM for its GPU memory is told so, and that
    who waits for that memory gets on once the job is cancelled."""
    srun = ["srun", "-p", "counted", "--gres=kiwi:1"]
    idle = head.start(*srun, "--mem=600", "env", "KIWI_GPU=0", "python",
                      work / "programs/idle_notebook.py", user=ADA, log="idle-job")  # fmt: skip
    shown = work / "idle-job"
    until(lambda: "300 MiB taken" in shown.read_text(), "the notebook has its memory", 120)
    other = head.start(*srun, "--mem=1200", "kiwi", "run", "--gpu", 0, "--require", "--",
                       *program(work, 300, 1), user=BOB, log="beside-idle")  # fmt: skip
    until(lambda: any(one["blocked"] for one in kn3.gpu(0)["queue"]), "the other job waits", 60)
    verdict.check("a notebook with too little RAM is told how much to ask for",
                  shown.read_text(), r"in Slurm: --mem=\d+M")  # fmt: skip
    head.run("scancel", f"--user={ADA}")
    for job in (other, idle):
        job.wait(150)
    said = (work / "beside-idle").read_text()
    verdict.judge("the job that waited gets on, every byte intact", told(said).get("wrong") == 0,
                  said)  # fmt: skip


def check_leftovers(verdict: Verdict, work: Path, head: Node, kn3: Node) -> None:
    """Check the epilog: an idle notebook of ada's outlives its job, and its memory is paged out
    because bob's job on the same GPU has needed the room."""
    idle = f"KIWI_GPU=0 setsid -f python {work}/programs/idle_notebook.py"
    job = ["sbatch", "--parsable", "-p", "counted", "--gres=kiwi:1", "--mem=1200", "-o", "left.txt",
           "--wrap", f"{idle}; sleep 600"]  # fmt: skip
    number = head.run(*job, user=ADA).strip()
    shown = Path(f"/home/{ADA}/left.txt")

    def state(owner: str, sessions: list[dict[str, Any]]) -> str:
        return next((one["state"] for one in sessions if one["owner"] == owner), "gone")

    def now(owner: str) -> str:
        return state(owner, kn3.gpu(0)["sessions"])

    until(lambda: "taken" in shown.read_text(), "the notebook has its memory", 120)
    other = head.start("srun", "-p", "counted", "--gres=kiwi:1", "--mem=1200", "kiwi", "run",
                       "--gpu", 0, "--require", "--", *program(work, 300, 30), user=BOB,
                       log="beside-leftover")  # fmt: skip
    until(lambda: now(ADA) == "paged-out" and now(BOB) == "running", "bob's has the room", 120)
    head.run("scancel", number)
    until(lambda: kn3.run("cat", f"/var/spool/epilog.{number}") == "0\n", "the epilog has run", 60)
    (left,) = (gpu for gpu in json.loads(kn3.run("cat", f"/var/spool/left.{number}"))["gpus"]
               if gpu["index"] == 0)  # fmt: skip
    verdict.judge("a notebook outlives its job, its memory paged out",
                  state(ADA, left["sessions"]) == "paged-out", left)  # fmt: skip
    until(lambda: "the kernel has ended" in shown.read_text(), "the leftover is ended")
    verdict.judge("the epilog ends it", now(ADA) == "gone", kn3.gpu(0)["sessions"])
    verdict.judge("and leaves another job's program on that GPU alone", now(BOB) == "running")
    other.wait(120)
    said = (work / "beside-leftover").read_text()
    verdict.judge("which ends by itself, every byte intact", told(said).get("wrong") == 0, said)


def ended(programs: list[subprocess.Popen[bytes]]) -> None:
    for one in programs:
        one.terminate()
    for one in programs:
        one.wait(60)
