"""The navigation of the documentation site, read from the tables of the index pages.

An index page lists pages in Markdown tables, which every viewer of Markdown shows. A row whose
first cell is a link to a page is an entry of the site's navigation, in the order of the rows.
``conf.py`` and ``tests/tooling/test_docs.py`` use this module. It imports nothing but the standard
library.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

START: Final = "docs/README"
"""The page that the site begins with."""

INDEX_PAGES: Final = (
    START,
    "docs/users",
    "docs/admins",
    "docs/contributors",
    "docs/internals",
)

_ROW: Final = re.compile(r"^\| \[[^\]]+\]\(([^)#\s]+)\.md\)", re.MULTILINE)


def entries(page: str, text: str) -> list[str]:
    """Return the pages that the tables of ``page`` list. A page is named as Sphinx names it: the
    path from the repository's root, without ``.md``."""
    folder = posixpath.dirname(page)
    return [posixpath.normpath(posixpath.join(folder, link)) for link in _ROW.findall(text)]


def listed() -> dict[str, list[str]]:
    """Return what each index page lists."""
    return {page: entries(page, (ROOT / f"{page}.md").read_text()) for page in INDEX_PAGES}


def pages() -> set[str]:
    """Return all pages of the site."""
    return {START}.union(*listed().values())


def with_toctree(page: str, text: str) -> str:
    """Return ``text``, if ``page`` is an index page with a hidden table of contents at its end."""
    if page not in INDEX_PAGES:
        return text
    lines = "".join(f"/{entry}\n" for entry in entries(page, text))
    return f"{text}\n```{{toctree}}\n:hidden:\n\n{lines}```\n"
