"""What run_all.py runs, in which order, and for how long.

Most valuable first, and nothing dangerous before the safe results are back: each set is one command
on the borrowed machine, which takes at most ten minutes.
"""

from __future__ import annotations

from conductor import Part

FACTS = Part("machine", "machine:facts", "What is this machine?", 5, 75)

FIRST = (
    Part(
        "probe", "probe:run",
        "What can this machine do, and does the library live here? No checkpoint.", 15, 60,
    ),
    Part(
        "checkpoint", "roundtrip:run",
        "Does one checkpoint round trip keep every byte, library by library?", 20, 90,
    ),
    Part(
        "manners", "manners:run",
        "How does this driver behave, beside what others saw and what the emulator does?", 20, 120,
    ),
    Part(
        "suspensions", "suspensions:run",
        "Do 100 random suspensions leave the results as they are?", 40, 260,
    ),
    Part("gate", "gate:run", "What does the gate cost a training loop?", 25, 80, ("torch",)),
)  # fmt: skip
"""Safe: it hurts nobody but the processes made for it."""

SECOND = (
    Part("fitting", "pairs:fitting", "Two jobs that fit the GPU: what does Kiwi cost?", 30, 90),
    Part(
        "not_fitting", "pairs:not_fitting",
        "Two jobs that do not fit: sharing, against one after the other.", 60, 300,
    ),
    Part(
        "paging", "paging:run",
        "How fast does memory go out and come in, as a share of a pinned copy?", 25, 90,
    ),
    Part("bench", "paging:bench", "What does kiwi bench measure here?", 25, 110),
)  # fmt: skip
"""Sharing and speed."""

THIRD = (
    Part(
        "notebooks", "real_notebooks:run",
        "Do real notebooks share, and how long is Shift+Enter to the first kernel?", 40, 140,
    ),
    Part(
        "loops", "loops:run",
        "Add and matmul loops of a foreign kind: alone, under the gate, shared.", 30, 90,
    ),
    Part("full", "last:full", "Is the last MiB of the GPU there for a program?", 20, 45),
    Part(
        "killed", "last:killed",
        "Daemon and program killed while memory is out: does the rest go on?", 25, 100,
    ),
    Part(
        "synchronise", "suspensions:run_dangerous",
        "How does a job end that waits by a bare synchronise while it is suspended?", 25, 80,
    ),
    Part(
        "manners_dangerous", "manners:run_dangerous",
        "What kills, hangs or leaks on this driver?", 30, 110,
    ),
    Part("gpu_tests", "suites:gpu_tests", "The project's tests marked gpu.", 40, 150),
    Part(
        "inprocess", "suites:inprocess",
        "The in-process pager under PyTorch, CuPy, JAX and Triton.", 40, 150,
    ),
    Part("conformance", "suites:conformance", "The suite that the emulator passes.", 40, 300),
)  # fmt: skip
"""Notebooks, then what may break something."""

SETS: dict[str, tuple[Part, ...]] = {"first": FIRST, "second": SECOND, "third": THIRD}
PARTS = {part.name: part for part in (FACTS, *FIRST, *SECOND, *THIRD)}
