"""Find the cells that need no analysis while nothing in the process has initialised the driver.

Such a process cannot use the GPU, so the only question is whether a cell plainly uses the GPU
(``plain.py``). Parsing the cell and following its names takes up to a millisecond. For most cells
of a notebook that computes on the CPU, the words alone decide, in microseconds: no GPU library is
loaded, none was ever named, and no unknown module was imported.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kiwi_jupyter.kernel.analysis.libraries import Libraries

LENGTH_MAX: Final = 20_000
"""Most characters of a cell that is judged by its words; a longer one is parsed."""

_WORD: Final = re.compile(r"[^\W\d]\w*")
_RUNS_OTHER_CODE: Final = frozenset(
    {"get_ipython", "exec", "eval", "execfile", "compile", "__import__", "import_module"}
    | {"importlib", "runpy", "ctypes", "cffi"}
)
_IMPORT: Final = re.compile(
    r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+([A-Za-z_][\w.]*)[ \t]+import\b[^;\n]*)$", re.M
)
"""A whole line that imports: modules, or names of one module."""


class Glance:
    """The state for one kernel."""

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries
        self._modules: set[str] = set()
        """Loaded modules that are not GPU libraries."""
        self._is_cpu_notebook = True
        """True while no cell has named a GPU library or imported an unknown module. Functions of
        such a module, or of such a cell, may use the GPU without a word in a later cell.
        """

    def suffices(self, text: str) -> bool:
        """Return whether the words of the cell show that it does not plainly use the GPU."""
        if not self._is_cpu_notebook or len(text) > LENGTH_MAX:
            return False
        words = _WORD.findall(text)
        if not self._libraries.gpu.isdisjoint(words) or self._gpu_library_is_loaded():
            self._is_cpu_notebook = False
            return False
        return _RUNS_OTHER_CODE.isdisjoint(words) and self._imports_are_known(text, words)

    def _imports_are_known(self, text: str, words: list[str]) -> bool:
        if "import" not in words:
            return True
        lines = _IMPORT.findall(text)
        # Otherwise there is an import in a string, or behind a semicolon.
        known = len(lines) == words.count("import") and all(map(self._is_known, lines))
        self._is_cpu_notebook = known
        return known

    def _is_known(self, line: tuple[str, str]) -> bool:
        modules, one_module = line
        if one_module:
            return self._libraries.is_trusted(one_module)
        parts = [part.split() for part in modules.split(",")]
        return all(part and self._libraries.is_trusted(part[0]) for part in parts)

    def _gpu_library_is_loaded(self) -> bool:
        if len(self._modules) == len(sys.modules):
            return False
        loaded = set(sys.modules)
        found = any(map(self._libraries.is_gpu_when_loaded, loaded - self._modules))
        self._modules = loaded
        return found
