"""Threads and asyncio tasks that a cell leaves running, and that may go on using the GPU."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Final

IGNORED_THREADS: Final = (
    "IOPub", "Heartbeat", "Control", "Shell channel", "IPythonHistorySavingThread", "subshell-",
    "kiwi-", "pydevd", "debugpy", "ipykernel", "tqdm", "zmq", "jupyter",
)  # fmt: skip
"""Beginnings of the names of threads that live as long as the kernel."""

IGNORED_CLASSES: Final = frozenset(
    {"TMonitor", "ParentPollerUnix", "Heartbeat", "ControlThread", "HistorySavingThread"}
)
IGNORED_CODE: Final = ("/ipykernel/", "/tornado/", "/zmq/", "/jupyter_client/", "/IPython/")
"""Parts of the file names of the kernel's own tasks."""

Tasks = frozenset["asyncio.Task[Any]"]


@dataclass(frozen=True)
class Leftovers:
    """The threads and tasks that began during the cell and were still there when it ended."""

    threads: tuple[threading.Thread, ...] = ()
    tasks: tuple[asyncio.Task[Any], ...] = ()

    @property
    def alive(self) -> bool:
        return any(t.is_alive() for t in self.threads) or any(not t.done() for t in self.tasks)

    def and_also(self, other: Leftovers) -> Leftovers:
        """Return both together, without those that have ended."""
        return Leftovers(
            tuple({t for t in (*self.threads, *other.threads) if t.is_alive()}),
            tuple({t for t in (*self.tasks, *other.tasks) if not t.done()}),
        )


@dataclass(frozen=True)
class Before:
    """The threads and tasks that ran when a cell began."""

    threads: frozenset[threading.Thread]
    tasks: Tasks

    @classmethod
    def now(cls) -> Before:
        return cls(frozenset(threading.enumerate()), frozenset(_tasks()))

    def left(self) -> Leftovers:
        """Return those that have begun since, are still there, and are not the kernel's own."""
        threads = (t for t in threading.enumerate() if t not in self.threads and _counts(t))
        tasks = (t for t in _tasks() if t not in self.tasks and _is_users(t))
        return Leftovers(tuple(threads), tuple(tasks))


def _tasks() -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks()
    except RuntimeError:  # no loop runs in this thread
        return set()


def _counts(thread: threading.Thread) -> bool:
    if thread is threading.current_thread() or not thread.is_alive():
        return False
    if type(thread).__name__ in IGNORED_CLASSES:
        return False
    return not thread.name.startswith(IGNORED_THREADS)


def _is_users(task: asyncio.Task[Any]) -> bool:
    if task.done() or task is asyncio.current_task():
        return False
    code = getattr(task.get_coro(), "cr_code", None)
    return not any(place in getattr(code, "co_filename", "") for place in IGNORED_CODE)
