"""Kernels of a real Jupyter Server, used by their connection files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_client.blocking.client import BlockingKernelClient
from patience import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from lab import Lab


def start(server: Lab, spec: str = "python3") -> str:
    """Start a kernel and return its id."""
    return str(server.rest("POST", "api/kernels", {"name": spec})["id"])


def run(server: Lab, kernel_id: str, code: str) -> str:
    """Run ``code`` in the kernel and return what it prints."""
    runtime = Path(server.env["JUPYTER_RUNTIME_DIR"])
    client = BlockingKernelClient(connection_file=str(runtime / f"kernel-{kernel_id}.json"))
    client.load_connection_file()
    client.start_channels()
    said: list[str] = []

    def listen(message: dict[str, Any]) -> None:
        content = message["content"]
        if content.get("name") != "stderr":
            said.append(content.get("text") or "\n".join(content.get("traceback", [])))

    try:
        wait_until(lambda: answers(client), "an answer of the kernel", 2 * PATIENCE_S)
        client.execute_interactive(code, timeout=2 * PATIENCE_S, output_hook=listen)
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)
    return "".join(said).strip()


def answers(client: BlockingKernelClient) -> bool:
    """Return whether the kernel answers in time: several kernels that start at once take longer
    than the client's first time limit."""
    try:
        client.wait_for_ready(timeout=PATIENCE_S)
    except RuntimeError:
        return False
    return True
