"""JupyterLab's layout in the demo: both notebooks side by side, Kiwi's sidebar open."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SIDEBAR: Final = "kiwi-panel"
"""The panel's id in ``labextension/``."""


def write_workspace(directory: Path, notebooks: Sequence[str]) -> None:
    """Make ``directory`` a directory for ``--LabApp.workspaces_dir``, with a default workspace.
    ``notebooks`` are paths below the server's root."""
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    WorkspacesManager(str(directory)).save("default", json.dumps(workspace(notebooks)))


def write_settings(directory: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Make ``directory`` Jupyter's first configuration directory; return the variables that it
    needs. JupyterLab's question about news would cover the sidebar, and turns of two seconds can be
    told apart only in a timeline of one minute."""
    place = directory / "labconfig"
    place.mkdir(parents=True)
    announcements = "@jupyterlab/apputils-extension:announcements"
    page = {"disabledExtensions": {announcements: True}}
    (place / "page_config.json").write_text(json.dumps(page))
    settings = {"kiwi-jupyter:plugin": {"timelineMinutes": 1}}
    (place / "default_setting_overrides.json").write_text(json.dumps(settings))
    paths = [str(directory), env.get("JUPYTER_CONFIG_PATH", "")]
    return {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, paths))}


def workspace(notebooks: Sequence[str]) -> dict[str, Any]:
    """Return the workspace in the form that JupyterLab saves and restores."""
    widgets = {f"notebook:{path}": path for path in notebooks}
    opened = {
        name: {"data": {"path": path, "factory": "Notebook"}} for name, path in widgets.items()
    }
    columns = [{"type": "tab-area", "currentIndex": 0, "widgets": [name]} for name in widgets]
    dock = {
        "type": "split-area",
        "orientation": "horizontal",
        "sizes": [1 / len(columns)] * len(columns),
        "children": columns,
    }
    layout = {
        "main": {"dock": dock, "current": next(iter(widgets))},
        "left": {"collapsed": True, "visible": True, "widgets": ["filebrowser"]},
        "right": {
            "collapsed": False, "visible": True, "current": SIDEBAR, "widgets": [SIDEBAR],
        },
        "relativeSizes": [0, 0.76, 0.24],
    }  # fmt: skip
    return {
        "metadata": {"id": "default"},
        "data": {"layout-restorer:data": layout, **opened},
    }
