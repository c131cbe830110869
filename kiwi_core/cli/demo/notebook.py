"""One notebook of the demo, run cell by cell in a real kernel, as Jupyter would."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.client.private_daemon import Guard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CELL_WITHIN_S: Final = 300.0
"""A cell of the demo takes seconds; with swaps on a loaded machine, a minute."""

LONG_CELL: Final = "# The long cell"
"""How the cell begins in which a notebook is suspended."""

ENDS_WITHIN_S: Final = 60.0
"""Time for a kernel that is paged out to get its turn and end, before it is killed."""


class Notebook(threading.Thread):
    """A thread that runs the notebook. ``say`` takes lines for the audience.

    It begins when ``after``, another notebook, is in its long cell, however slow the machine is.
    ``failure`` says what went wrong; ``intact`` is true if the notebook found its memory intact.
    """

    def __init__(
        self, path: Path, letter: str, env: dict[str, str], say: Callable[[str], None],
        after: Notebook | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name=f"notebook-{letter}", daemon=True)
        self.path = path
        self.letter = letter
        self.failure = ""
        self.intact = False
        self.pid = 0
        self._env = env
        self._say = say
        self._after = after
        self._in_long_cell = threading.Event()
        self._manager: Any = None
        self._guard: Guard | None = None
        self._client: Any = None

    def open(self) -> None:
        """Start the kernel and wait until it answers."""
        from jupyter_client.manager import KernelManager

        # Sockets in the demo's own directory: of TCP ports, another program could take one between
        # Jupyter's choice and the kernel's start.
        place = self.path.parents[1] / "kernels"
        place.mkdir(mode=0o700, exist_ok=True)
        self._manager = KernelManager(
            kernel_name="python3", transport="ipc",
            connection_file=str(place / f"kernel-{self.letter}.json"),
        )  # fmt: skip
        self._manager.start_kernel(
            env={**self._env, "JPY_SESSION_NAME": str(self.path)},
            cwd=str(self.path.parent),
            extra_arguments=["--log-level=ERROR"],  # or its warnings stand amid the commentary
        )
        self._guard = Guard(int(self._manager.provisioner.pid))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)
        self.pid = int(self._manager.provisioner.pid)

    def close(self) -> None:
        """Ask the kernel to end: killing a program that was moved out and back has hung hosts
        (NVIDIA/cuda-checkpoint#53)."""
        if self._client is not None:
            self._client.stop_channels()
        if self._guard is not None:
            self._guard.end()
            self._manager.shutdown_wait_time = ENDS_WITHIN_S
            self._manager.interrupt_kernel()  # the demo may end in the middle of a cell
            self._manager.shutdown_kernel(now=False)
        # Otherwise a signal came while the kernel was being started: Jupyter would wait for ever
        # for the end of that. The kernel, if there is one, ends with the demo's other processes.
        if self._manager is not None:  # else there is no loop, and perhaps half an import
            _close_event_loop()

    def run(self) -> None:
        if self._after is not None:
            self._after._in_long_cell.wait(CELL_WITHIN_S)
        cells = json.loads(self.path.read_text())["cells"]
        try:
            for cell in cells:
                if cell["cell_type"] != "code":
                    continue
                source = "".join(cell["source"])
                self._say(f"{self.letter} starts a cell: {_title(source)}")
                reply = self._client.execute_interactive(
                    source, timeout=CELL_WITHIN_S, output_hook=self._output, allow_stdin=False
                )
                content = reply["content"]
                if content["status"] != "ok":
                    why = f"{content.get('ename', 'aborted')}: {content.get('evalue', '')}"
                    raise RuntimeError(why)
        except Exception as error:  # noqa: BLE001  (told to the audience, and to the verdict)
            self.failure = f"{type(error).__name__}: {error}"
            self._say(f"{self.letter}: {self.failure}")
        finally:
            self._in_long_cell.set()  # or it failed: nobody waits for it
            _close_event_loop()

    def _output(self, message: dict[str, Any]) -> None:
        if message["msg_type"] == "execute_input" and LONG_CELL in message["content"]["code"]:
            self._in_long_cell.set()
        if message["msg_type"] != "stream":
            return
        for line in message["content"]["text"].splitlines():
            self.intact |= line.startswith("INTACT")
            self._say(f"{self.letter} prints: {line}")


def _close_event_loop() -> None:
    """Close the loop that jupyter_client's blocking calls made in this thread and left open: the
    garbage collector complains about it, at times with a traceback after the demo's verdict."""
    from jupyter_core.utils import ensure_event_loop

    ensure_event_loop().close()


def _title(source: str) -> str:
    first = next(line for line in source.splitlines() if line.strip())
    return first.removeprefix("# ")[:70]
