"""Execute a notebook in place, like nbclient or papermill; run as a program.

It reads each message before the tool does. When a waiting line comes, it keeps what the tool would
save at that moment and, if the cell says so, interrupts the kernel. At the end it prints both as
JSON: the comm ids of the waiting lines, and what was saved in mid-wait.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager

INTERRUPT_ME = "# interrupt me"


class _Watched:
    seen: Path
    ids: list[str]
    saved_meanwhile: list[str]
    tasks: set[asyncio.Future[None]]

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        shown = msg["content"].get("comm_id", "")
        if shown.startswith("kiwi-wait-"):
            self._see(shown, cell)
        return super().process_message(msg, cell, cell_index)  # type: ignore[misc]

    def _see(self, shown: str, cell: Any) -> None:
        self.saved_meanwhile.append(nbformat.writes(self.nb))  # type: ignore[attr-defined]
        if shown in self.ids:
            return
        self.ids.append(shown)
        if INTERRUPT_ME in cell.source:
            interrupt = self.km.interrupt_kernel()  # type: ignore[attr-defined]
            self.tasks.add(asyncio.ensure_future(interrupt))
        else:
            self.seen.write_text(str(len(self.ids)))


class _Nbclient(_Watched, nbclient.NotebookClient):
    pass


class _Papermill(_Watched, PapermillNotebookClient):
    pass


def main(tool: str, python: str, path: str, seen: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kw-") as place:
        # A TCP port that Jupyter picks for the kernel can be taken when the kernel binds it.
        manager = AsyncKernelManager(transport="ipc", connection_file=f"{place}/kernel.json")
        execute(manager, tool, python, path, seen)


def execute(manager: AsyncKernelManager, tool: str, python: str, path: str, seen: str) -> None:
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
    notebook = nbformat.read(path, 4)
    # A cell that takes long sends its prints in more pieces than a short one.
    options: dict[str, Any] = {
        "km": manager, "timeout": 100, "record_timing": False, "allow_errors": True,
        "coalesce_streams": True,
    }  # fmt: skip
    client: Any
    if tool == "papermill":
        for part in (notebook, *notebook.cells):
            part.metadata["papermill"] = nbformat.from_dict({})
        execution = NotebookExecutionManager(notebook, output_path=path, progress_bar=False)
        execution.notebook_start()
        client = _Papermill(execution, **options)
    else:
        client = _Nbclient(notebook, **options)
    client.seen, client.ids, client.saved_meanwhile, client.tasks = Path(seen), [], [], set()
    client.execute()
    for part in (notebook, *notebook.cells):
        part.metadata.pop("papermill", None)  # times
    nbformat.write(notebook, path)
    print(json.dumps([client.ids, client.saved_meanwhile]))


if __name__ == "__main__":
    main(*sys.argv[1:])
