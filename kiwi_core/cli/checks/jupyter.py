"""Checks that a Jupyter Server here loads Kiwi's extension, and JupyterLab its sidebar."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.cli.checks.finding import Finding, UnansweredError, ok, probe, warn
from kiwi_core.environments import loads_kiwi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SERVER_EXTENSION: Final = "kiwi_jupyter"
LAB_EXTENSION: Final = "kiwi-jupyter"

_AGAIN: Final = "Install Kiwi again: pip install --force-reinstall --no-deps . in a checkout of it."

_PROBE: Final = """
import importlib, json, sys
from importlib.util import find_spec
from jupyter_core.paths import jupyter_config_path, jupyter_path
from jupyter_server.extension.config import ExtensionConfigManager
server, lab = sys.argv[1:]
manager = ExtensionConfigManager(read_config_path=jupyter_config_path())
said = {"enabled": manager.get_jpserver_extensions().get(server), "error": "", "lab": None}
said["kernels"] = {}
try:
    importlib.import_module(server + ".server_ext.app")
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
if find_spec("jupyterlab_server"):
    from jupyterlab_server.config import get_federated_extensions, get_page_config
    paths = jupyter_path("labextensions")
    off = get_page_config(paths).get("disabledExtensions", {})
    off = [name for name in off if not isinstance(off, dict) or off[name]]
    said["lab"] = {
        "installed": lab in get_federated_extensions(paths),
        "disabled": sorted(name for name in off if name.partition(":")[0] == lab),
    }
if find_spec("jupyter_client"):
    from jupyter_client.kernelspec import KernelSpecManager
    for name, of in KernelSpecManager().get_all_specs().items():
        if of["spec"].get("language", "").lower() == "python" and of["spec"].get("argv"):
            said["kernels"][name] = of["spec"]["argv"][0]
print(json.dumps(said))
"""


def check() -> Iterator[Finding]:
    if find_spec("jupyter_server") is None:
        yield ok(
            "server",
            "no Jupyter Server in this environment; install Kiwi also where JupyterLab runs",
        )
        return
    try:
        said = ask()
    except UnansweredError as error:
        text = f"Could not find out which extensions a Jupyter Server loads here: {error}."
        yield warn("server", text, error.remedy)
        return
    yield server(said)
    if said["lab"] is not None:
        yield sidebar(said["lab"])
    yield from kernels(said["kernels"])


def ask() -> dict[str, Any]:
    """Ask Jupyter itself, in a separate process; no server needs to run. Raise
    ``UnansweredError``.
    """
    said: dict[str, Any] = probe(_PROBE, SERVER_EXTENSION, LAB_EXTENSION)
    return said


def server(said: Mapping[str, Any]) -> Finding:
    """Judge the server extension; ``enabled`` is ``None`` if no configuration names it."""
    if said["error"]:
        return warn("server", f"The server extension cannot be loaded: {said['error']}.", _AGAIN)
    if said["enabled"]:
        return ok("server", "Jupyter Server loads Kiwi's extension")
    if said["enabled"] is None:
        return warn(
            "server",
            "Nothing tells Jupyter Server to load Kiwi's extension: no sidebar, no placement.",
            # Not "jupyter server extension enable": it needs a configuration that names Kiwi.
            _AGAIN,
        )
    return warn(
        "server",
        "Kiwi's server extension is disabled: no sidebar, no placement of kernels.",
        f"jupyter server extension enable {SERVER_EXTENSION}",
    )


def kernels(interpreters: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the environments of the Python kernels that Jupyter offers, by kernelspec."""
    bare = {name: python for name, python in interpreters.items() if loads_kiwi(python) is False}
    for name, python in bare.items():
        yield warn(
            "kernels",
            f"The environment of the kernel {name!r} has no Kiwi: its notebooks show no waits, and "
            "take no part where Jupyter starts them without Kiwi's library.",
            f"{python} -m pip install . in a checkout of Kiwi",
        )
    if interpreters and not bare:
        yield ok("kernels", "every Python kernel that Jupyter offers here has Kiwi, or may have it")


def sidebar(lab: Mapping[str, Any]) -> Finding:
    if not lab["installed"]:
        return warn("sidebar", "Kiwi's sidebar is not installed in JupyterLab here.", _AGAIN)
    if lab["disabled"]:
        names = " ".join(lab["disabled"])
        return warn(
            "sidebar",
            f"JupyterLab has {names} disabled: the sidebar, or a part of it, is missing.",
            f"jupyter labextension enable {names}",
        )
    return ok("sidebar", "JupyterLab and Notebook show Kiwi's sidebar")
