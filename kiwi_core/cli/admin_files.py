"""The files for administrators that ``kiwi doctor --print`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent

FILES: Final = {
    "systemd": "systemd/kiwi.service",
    "grafana": "grafana/kiwi-dashboard.json",
    "cdi": "kubernetes/kiwi-cdi.json",
}
"""Their paths by the word that ``--print`` takes."""


def read(name: str) -> str:
    """Return the text of a file: a wheel has the files beside this module, a checkout in
    ``integrations``."""
    places = (HERE / "files", HERE.parents[1] / "integrations")
    return next(path for place in places if (path := place / FILES[name]).is_file()).read_text()
