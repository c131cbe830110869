"""``%%kiwi cpu`` and ``%%kiwi gpu``: the user's decision about a cell.

The first line becomes a string of the same text, so that the rest stays a normal cell: with its
line numbers, its top-level ``await`` and the display of its last expression. The cell hook finds
the string, obeys it and removes it.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_HEAD: Final = re.compile(r"%%kiwi\s+(cpu|gpu)\s*\Z")


def rewrite_head(lines: list[str], inner: Callable[[list[str]], list[str]]) -> list[str]:
    """Transform the lines of a cell, each with its end; a cleanup transform of IPython.

    ``inner`` turns another cell magic below (``%%time``) into Python.
    """
    if not lines or not _HEAD.match(lines[0]) or not "".join(lines[1:]).strip():
        return lines
    rest = lines[1:]
    if rest[0].startswith("%%"):
        rest = inner(rest)
    return [f'"{lines[0].strip()}"\n', *rest]


def take_override(node: Any) -> str | None:
    """Return ``"cpu"``, ``"gpu"`` or ``None``, and remove the mark from the parsed cell."""
    if not isinstance(node, ast.Module) or not node.body:
        return None
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    found = _HEAD.match(first.value.value) if isinstance(first.value.value, str) else None
    if found is None or len(node.body) < 2:
        return None
    del node.body[0]
    return found[1]
