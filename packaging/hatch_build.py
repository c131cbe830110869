"""Build hook of wheel and source distribution.

It adds the built labextension to both and, on request, the in-process pager's library to a wheel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import labextension_build as lab
import preload_build as pager

HOME = "share/jupyter/labextensions/kiwi-jupyter"


class LabextensionHook(BuildHookInterface[Any]):
    """Run for wheels, including editable ones, and for source distributions."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what pip puts into the build environment besides hatchling."""
        node = [lab.NODE_WHEEL] if lab.needs_node_wheel(Path(self.root)) else []
        return node + (pager.REQUIREMENTS if self._has_pager() else [])

    def _has_pager(self) -> bool:
        return bool(pager.machine()) and self.target_name == "wheel"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        root = Path(self.root)
        if self._has_pager():
            try:
                pager.add(root, root / "build" / "preload", build_data)
            except RuntimeError as error:
                self.app.abort(str(error))
        if lab.is_skipped():
            self.app.display_warning(f"{lab.SKIP} is set: no JupyterLab extension in this build.")
            return
        try:
            lab.ensure(root)
        except lab.BuildError as error:
            self.app.abort(str(error))
        if self.target_name == "sdist":
            # git ignores it; a wheel that is built from the source distribution needs no Node.
            build_data["artifacts"].append("/kiwi_jupyter/labextension")
        else:
            build_data["shared_data"][str(lab.built(root))] = HOME
            build_data["shared_data"]["labextension/install.json"] = f"{HOME}/install.json"
