"""What certainly stays on the CPU, for kernels without a gate.

Nothing holds such a kernel's calls, so there the rule is coarse: once the driver is in the process,
every cell waits that is more than plain data work. A cell is that if it imports and names nothing
but libraries that stay on the CPU, and data.
"""

from __future__ import annotations

import ast
import builtins
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight.libraries import CPU_LIBRARIES
from kiwi_jupyter.kernel.foresight.values import (
    ELEMENTS_MAX,
    is_container,
    is_module,
    module_of,
    name_of,
    origin,
)
from kiwi_jupyter.kernel.foresight.values import is_plain as is_data

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_jupyter.kernel.foresight.libraries import Libraries

NODES_MAX: Final = 2_000
"""A longer cell is not plain."""

_DOORS: Final = frozenset("exec eval compile __import__ getattr globals locals vars".split())
_DOOR_MODULES: Final = frozenset(
    "ctypes gc importlib inspect multiprocessing runpy subprocess".split()
)


def is_plain(tree: ast.Module, space: Mapping[str, Any], libraries: Libraries) -> bool:
    """Return whether a cell is plain data work, whatever functions it defines."""
    for number, node in enumerate(ast.walk(tree)):
        if number > NODES_MAX:
            return False
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "." if not node.level else "."]
        else:
            if isinstance(node, ast.Name) and not _plain_name(node, space, libraries):
                return False
            continue
        if not all(_stays(module, libraries) for module in modules):
            return False
    return True


def _plain_name(node: ast.Name, space: Mapping[str, Any], libraries: Libraries) -> bool:
    if not isinstance(node.ctx, ast.Load):
        return True
    if node.id not in space:
        return node.id not in _DOORS and node.id != "get_ipython"
    return _plain_value(space[node.id], libraries)


def _plain_value(value: Any, libraries: Libraries, depth: int = 0) -> bool:
    if is_data(value):
        return True
    if is_container(value):
        some = list(islice(value.values() if hasattr(value, "values") else value, ELEMENTS_MAX))
        return depth < 3 and all(_plain_value(one, libraries, depth + 1) for one in some)
    if is_module(value):
        return _stays(name_of(value), libraries)
    if any(value is one for one in vars(builtins).values()):
        return not any(vars(builtins).get(door) is value for door in _DOORS)
    module = origin(value)[0] or module_of(type(value))
    return module != "builtins" and _stays(module, libraries)


def _stays(module: str, libraries: Libraries) -> bool:
    top = module.partition(".")[0]
    if top in _DOOR_MODULES or top in libraries.known or not top:
        return False
    return top in CPU_LIBRARIES or top in libraries.named_cpu or top in sys.stdlib_module_names
