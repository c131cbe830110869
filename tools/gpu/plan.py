"""The parts of run_all.py, their order, and their time limits.

The most valuable parts come first, and nothing dangerous comes before the safe results are back:
each set is one command on the borrowed machine, which takes at most ten minutes.
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
        "quirks", "quirks:run",
        "How does this driver behave, beside what others saw and what the emulator does?", 20, 140,
    ),
    Part(
        "suspensions", "suspensions:run",
        "Do suspensions by the default pager leave the results as they are?", 40, 170,
    ),
    Part(
        "suspensions_inprocess", "suspensions:run_inprocess",
        "Do suspensions by the in-process pager leave the results as they are?", 40, 170,
    ),
)  # fmt: skip
"""Safe parts, which can harm only the processes made for them."""

SECOND = (
    # This part writes its answers only at its end: it must not be cut off.
    Part("bench", "paging:bench", "What does kiwi bench measure here?", 125, 140),
    Part("gate_calls", "gate:calls", "What does the gate cost a single call?", 25, 60, ("torch",)),
    Part(
        "not_fitting", "pairs:not_fitting",
        "Two jobs that do not fit: sharing, against one after the other.", 60, 300,
    ),
    Part("fitting", "pairs:fitting", "Two jobs that fit the GPU: what does Kiwi cost?", 30, 100),
)  # fmt: skip
"""Parts about sharing and speed."""

THIRD = (
    Part(
        "notebooks", "real_notebooks:run",
        "Do real notebooks that do not fit share, with every byte kept?", 40, 90,
    ),
    Part(
        "shift_enter", "real_notebooks:run_shift_enter",
        "How long is Shift+Enter to the first kernel of a notebook that is out?", 40, 90,
    ),
    Part(
        "paging", "paging:run",
        "How fast does memory go out and come in, as a share of a pinned copy?", 25, 80,
    ),
    Part(
        "loops", "loops:run",
        "Add and matmul loops of a foreign kind: alone, under the gate, shared.", 30, 120,
    ),
    Part(
        "full", "last:full",
        "Is the last MiB of the GPU there for a program, and again later?", 20, 100,
    ),
    Part(
        "quirks_dangerous", "quirks:run_dangerous",
        "What kills, hangs or leaks on this driver?", 30, 150,
    ),
)  # fmt: skip
"""Notebooks and loops; then parts that may kill or leak."""

FOURTH = (
    Part(
        "killed", "last:killed",
        "Daemon and program killed while memory is out: does the rest go on?", 25, 120,
    ),
    Part(
        "inprocess", "suites:inprocess",
        "The in-process pager under PyTorch, CuPy, JAX and Triton.", 40, 150,
    ),
    Part("gpu_tests", "suites:gpu_tests", "The project's tests marked gpu.", 40, 150),
    Part(
        "synchronise", "suspensions:run_dangerous",
        "How do jobs without a gate end that the driver pages out from outside?", 20, 80,
    ),
    Part("conformance", "suites:conformance", "The suite that the emulator passes.", 40, 300),
)  # fmt: skip
"""Kills, and the project's tests, for the remaining time."""

FIFTH = (
    Part(
        "gate", "gate:run", "What does Kiwi cost a step whose GPU waits for launches?", 60, 225,
        ("torch",),
    ),
    Part("prove", "proof:run", "Does this machine prove itself for Kiwi's library?", 15, 70),
    Part("questions", "questions:run", "Small questions on which later steps depend.", 10, 45),
    Part(
        "nvml", "quirks:run_nvml",
        "Do NVML's calls wait in a process that the driver has locked or moved?", 15, 50,
    ),
    Part(
        "owner", "suites:owner",
        "Does memory that a program maps itself come back, with every byte?", 20, 60,
    ),
    Part(
        "suspensions_many", "suspensions:run_many",
        "Are results the same after a hundred in-process suspensions?", 60, 400,
    ),
    Part(
        "crowd", "suspensions:run_crowd",
        "Do six programs that read NVML share a GPU that three of them fill?", 90, 520,
    ),
    Part(
        "huge_pages", "huge_pages:run", "Do huge pages make the driver's own moves faster?", 30, 100
    ),
)  # fmt: skip
"""What must be known before the library is the default pager; README.md has the commands."""

SETS: dict[str, tuple[Part, ...]] = {
    "first": FIRST, "second": SECOND, "third": THIRD, "fourth": FOURTH, "fifth": FIFTH,
}  # fmt: skip
PARTS = {part.name: part for part in (FACTS, *FIRST, *SECOND, *THIRD, *FOURTH, *FIFTH)}
