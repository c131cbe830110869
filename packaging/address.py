"""Where the project lives: the only place that says it.

The build reads it (``hatch_metadata.py`` for the Python packages, ``labextension_build.py`` for
the npm metadata of the labextension). While ``HOME`` is empty, no package names an address.
"""

from __future__ import annotations

import re
from typing import Any

HOME = ""
"""The address of the repository, without ".git" and without a slash at its end."""


def project_urls() -> dict[str, str]:
    """Return ``[project.urls]``; PyPI and `pip show` read these labels."""
    if not HOME:
        return {}
    changes = f"{HOME}/blob/main/CHANGELOG.md"
    return {"Homepage": HOME, "Source": HOME, "Issues": _issues(), "Changelog": changes}


def with_whole_links(readme: str) -> str:
    """Return the page with links and pictures that lead somewhere outside the repository, too."""
    if not HOME:
        return readme
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{HOME}/raw/HEAD/", readme)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{HOME}/blob/HEAD/", pictures)


def npm_fields() -> dict[str, Any]:
    """Return what package.json says about it; JupyterLab's extension manager links to it."""
    if not HOME:
        return {}
    return {
        "homepage": HOME,
        "repository": {"type": "git", "url": f"git+{HOME}.git"},
        "bugs": {"url": _issues()},
    }


def _issues() -> str:
    return f"{HOME}/issues"
