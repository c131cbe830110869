"""The configuration of the documentation site (``make docs``). Sphinx reads it.

The source directory is the repository's root, so that the site has README.md, CONTRIBUTING.md and
the other pages outside docs/ as well, and every relative link means the same on the site and on a
code host.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
import navigation
from pygments.lexers.special import TextLexer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Kiwi"
author = "The Kiwi developers"
release = version_of("kiwi-jupyter")
version = release

extensions = ["myst_parser"]
root_doc = navigation.START
include_patterns = [f"{page}.md" for page in sorted(navigation.pages())]
# Directories that Sphinx need not walk through to find them.
exclude_patterns = [".*", "build", "dist", "**/node_modules"]

# A heading has the anchor that code hosts give it; a link to a missing anchor is a warning.
myst_heading_anchors = 4

html_theme = "pydata_sphinx_theme"
html_title = f"Kiwi {release}"
html_additional_pages = {"index": "index.html"}
templates_path = ["_templates"]
html_sidebars = {"README": []}  # a separate page without others beside it
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "show_prev_next": False,
    "navigation_with_keys": False,
}


def _add_toctree(_app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = navigation.with_toctree(page, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    # Code hosts draw these diagrams. The site shows their text, because drawing them takes a script
    # that each reader would load from another site.
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _add_toctree)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
