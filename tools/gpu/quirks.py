"""A part of run_all.py: how this driver treats processes that are locked or checkpointed.

``run`` has the probes that are safe for the machine: at worst a process made for the probe dies.
``run_dangerous`` stops and kills processes, and makes a restore fail: its last probe keeps GPU
memory until its process is killed. Both add to one table, ``quirks.md`` in the results.
``quirks_emulator.json`` has the emulator's answers with the profile ``worst``: an emulated run of
both with ``KIWI_EMULATOR_DRIVER=worst`` writes that file into its results, to be copied here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import quirks_calls
import quirks_ends
import quirks_moves
import quirks_states
from quirks_book import Book

if TYPE_CHECKING:
    from stage import Stage


def run(stage: Stage) -> None:
    """Run the safe probes, in about two minutes: most of it is ``cuInit`` of the targets. Probes
    that kill a target on some drivers come early, because Kiwi's safety depends on their answers;
    they harm no other process."""
    book = Book(stage)
    book.group("wrong_states", 10, quirks_states.wrong_states)
    book.group("deadly_calls", 15, quirks_calls.deadly_calls)
    book.group("queries", 15, quirks_moves.queries_during_moves)
    book.group("memory", 10, quirks_moves.memory)
    book.group("harmless_calls", 25, quirks_calls.harmless_calls)
    book.group("lock_limits", 15, quirks_states.lock_limits)
    book.group("strangers", 10, quirks_states.strangers)
    book.summary()


def run_nvml(stage: Stage) -> None:
    """Run the probes of NVML's calls alone: do they wait while the driver has the process?"""
    book = Book(stage)
    book.group("nvml", 25, quirks_calls.nvml_calls)
    book.summary()


def run_dangerous(stage: Stage) -> None:
    """Run the dangerous probes, in about two minutes; the most important ones come first."""
    book = Book(stage)
    book.group("stopped", 25, quirks_ends.stopped)
    book.group("failed_restore", 30, quirks_ends.failed_restore)
    book.group("exits", 15, quirks_ends.exits)
    book.group("signals", 15, quirks_ends.signals)
    book.group("killed_callers", 20, quirks_moves.killed_callers)
    book.group("killed_in_mid_move", 10, quirks_moves.killed_in_mid_move)
    book.summary()
