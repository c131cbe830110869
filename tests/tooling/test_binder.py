"""The steps of ``binder/`` as repo2docker takes them, in an environment with the requirements."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from kernels import clean_environment
from lab import Lab
from patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("examples/emulated_training.ipynb", "examples/emulated_exploration.ipynb")


def test_the_requirements_are_kiwi_and_the_jupyterlab_that_it_supports() -> None:
    lines = (ROOT / "binder/requirements.txt").read_text().splitlines()
    here, lab = (line for line in lines if not line.startswith("#"))
    assert here == "."
    assert f'demo = ["{lab}"]' in (ROOT / "pyproject.toml").read_text()
    (python,) = re.findall(r"^python-3\.(\d+)\n$", (ROOT / "binder/runtime.txt").read_text())
    assert f"Python :: 3.{python}" in (ROOT / "pyproject.toml").read_text()


@pytest.fixture(name="server")
def _server() -> Iterator[Lab]:
    """Do what the image's build and its start do. In the image the repository is the home."""
    directory = Path(tempfile.mkdtemp(prefix="kw-binder-"))
    programs = Path(sys.executable).parent
    env = clean_environment(directory)
    env |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    for name in ("binder", "examples"):
        shutil.copytree(ROOT / name, directory / "notebooks" / name)
    repository = directory / "notebooks"
    try:
        subprocess.run(["binder/postBuild"], cwd=repository, env=env, check=True, timeout=100)
        lab = Lab(directory, env, prefix=(str(repository / "binder/start"),))
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()
    finally:
        subprocess.run([programs / "kiwi", "stop"], env=env, timeout=60, capture_output=True)
        shutil.rmtree(directory, ignore_errors=True)


async def run_all(server: Lab, path: str) -> str:
    """Run the cells of a notebook as a browser does; return what they print."""
    kernel = {"name": "python3"}
    body = {"path": path, "name": Path(path).name, "type": "notebook", "kernel": kernel}
    session = await asyncio.to_thread(server.rest, "POST", "api/sessions", body)
    file = f"{server.env['JUPYTER_RUNTIME_DIR']}/kernel-{session['kernel']['id']}.json"
    client = AsyncKernelClient(connection_file=file)
    client.load_connection_file()
    client.hb_channel.time_to_dead = PATIENCE_S  # a kernel on a busy machine is not a dead one
    client.start_channels()
    said = []
    try:
        await client.wait_for_ready(timeout=PATIENCE_S)
        for cell in json.loads((server.notebooks / path).read_text())["cells"]:
            if cell["cell_type"] == "code":
                said += await run_cell(client, "".join(cell["source"]))
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)
    return "".join(said)


async def run_cell(client: AsyncKernelClient, code: str) -> list[str]:
    asked, said = client.execute(code), []
    while True:
        message = await client.get_iopub_msg(timeout=PATIENCE_S)
        content = message["content"]
        said.append(content.get("text") or "\n".join(content.get("traceback", [])))
        if (
            message["parent_header"].get("msg_id") == asked
            and content.get("execution_state") == "idle"
        ):
            return said


async def run_both(server: Lab) -> list[str]:
    return await asyncio.gather(*(run_all(server, path) for path in NOTEBOOKS))


@pytest.mark.e2e
def test_two_notebooks_share_the_emulated_gpu_in_the_image(server: Lab) -> None:
    workspace = server.rest("GET", "lab/api/workspaces/default")
    opened = [each["data"]["path"] for each in workspace["data"].values() if "data" in each]
    assert opened == list(NOTEBOOKS)
    said = asyncio.run(run_both(server))
    assert all("INTACT" in each for each in said), said
    (gpu,) = server.rest("GET", "kiwi/api/status")["gpus"]
    assert gpu["emulated"]
    assert {each["path"] for each in gpu["sessions"]} == set(NOTEBOOKS)
    assert any(each["kind"] == "out" and each["ok"] for each in gpu["history"])
