"""Read what a function reaches from its bytecode: its source may be gone or changed."""

from __future__ import annotations

import dis
import sys
from types import CodeType
from typing import Final
from weakref import WeakKeyDictionary

from kiwi_jupyter.kernel.analysis.needs import Chain, CodeNeeds

NEWEST_KNOWN: Final = (3, 14)
"""Bytecode changes with each Python version; a version that was never checked is not trusted."""

INSTRUCTIONS_MAX: Final = 20_000
"""A function longer than this is generated code: reading it would take many milliseconds."""

_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELLS: Final = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_STORES: Final = frozenset({"STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL"})
_NO_VALUE: Final = frozenset({"CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"})
_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})

_cache: WeakKeyDictionary[CodeType, CodeNeeds] = WeakKeyDictionary()

Alias = tuple[str, Chain]
"""The module and attributes that an import bound to a local name."""


def needs_of_code(code: CodeType) -> CodeNeeds:
    """Return what a function with this ``code`` reaches; kept for as long as the code lives."""
    known = _cache.get(code)
    if known is None:
        known = _cache[code] = _Reader(code, {}).read()
    return known


class _Reader:
    def __init__(self, code: CodeType, outer_aliases: dict[str, Alias]) -> None:
        self._code = code
        self._needs = CodeNeeds()
        self._aliases = dict(outer_aliases)
        self._line = code.co_firstlineno
        self._open: tuple[str, str, list[str]] | None = None
        """The name just loaded, with the attributes read from it so far: kind, name, chain."""
        self._last_constant: object = None
        self._constant_before: object = None
        self._module: str = ""
        self._from: tuple[str, ...] | None = None
        self._pending: Alias | None = None
        """What the next store binds, in the middle of an import."""

    def read(self) -> CodeNeeds:
        if sys.version_info[:2] > NEWEST_KNOWN:
            self._needs.doors.append((self._line, "bytecode of a Python that Kiwi does not know"))
            return self._needs
        instructions = list(dis.get_instructions(self._code))
        if len(instructions) > INSTRUCTIONS_MAX:
            self._needs.doors.append((self._line, "a function too long to be looked at"))
            return self._needs
        self._find_aliases(instructions)
        for instruction in instructions:
            self._step(instruction)
        self._close()
        for constant in self._code.co_consts:
            if isinstance(constant, CodeType):
                self._absorb_inner(constant)
        return self._needs

    def _find_aliases(self, instructions: list[dis.Instruction]) -> None:
        """Find the aliases first, because a loop may read a name above the import that binds it."""
        for instruction in instructions:
            self._import_step(instruction)
        self._pending = None

    def _import_step(self, instruction: dis.Instruction) -> None:
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self._constant_before, self._last_constant = self._last_constant, value
        elif name == "IMPORT_NAME":
            wanted = self._last_constant
            # A relative import, whose absolute name is not known.
            self._module = value if self._constant_before == 0 else ""
            value = self._module
            self._from = wanted if isinstance(wanted, tuple) else None
            top = value.partition(".")[0]
            self._pending = None if self._from else (top, ())
        elif name == "IMPORT_FROM":
            self._pending = self._imported_from(value)
        elif name in _STORES and self._pending is not None:
            known = self._aliases.setdefault(value, self._pending)
            if known != self._pending:  # two imports under one name: either may be meant
                self._aliases[value] = ("", ())
            self._pending = None

    def _imported_from(self, name: str) -> Alias:
        if self._from is None:  # import a.b as c
            return self._module, ()
        return self._module, (name,)

    def _step(self, instruction: dis.Instruction) -> None:
        opname = instruction.opname
        if opname in _NO_VALUE:
            return
        self._line = _line_of(instruction) or self._line
        if opname in _ATTRIBUTES or opname == "LOAD_SUPER_ATTR":
            self._attribute(instruction)
            return
        self._close()
        if opname in _GLOBALS:
            self._open = ("global", instruction.argval, [])
        elif opname in _CELLS:
            self._open = ("cell", instruction.argval, [])
        elif opname.startswith("LOAD_FAST") or opname == "STORE_FAST_LOAD_FAST":
            self._local(instruction)
        else:
            self._other(instruction)

    def _attribute(self, instruction: dis.Instruction) -> None:
        name = instruction.argval
        if instruction.is_jump_target:
            self._close()
        if self._open is not None and instruction.opname != "LOAD_SUPER_ATTR":
            self._open[2].append(name)
            return
        if name == "format" and isinstance(self._last_constant, str):
            if "__" in self._last_constant:
                self._needs.doors.append((self._line, "a format string with attributes"))
            return
        self._needs.attributes.setdefault(name, self._line)

    def _local(self, instruction: dis.Instruction) -> None:
        value = instruction.argval
        names = value if isinstance(value, tuple) else (value,)
        for name in names:
            self._close()
            if name in self._aliases:
                self._open = ("alias", name, [])

    def _other(self, instruction: dis.Instruction) -> None:
        opname, value = instruction.opname, instruction.argval
        self._import_step(instruction)
        if opname not in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self._constant_before = self._last_constant = None
        if opname == "IMPORT_NAME":
            self._import(self._module)
        elif opname == "IMPORT_FROM" and self._from is not None:
            self._needs.modules.setdefault((self._module, (value,)), self._line)
        elif opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self._needs.stores.setdefault(value, self._line)
        elif _imports_star(instruction):
            self._needs.doors.append((self._line, "import *"))

    def _import(self, module: str) -> None:
        if not module:
            self._needs.doors.append((self._line, "a relative import"))
            return
        self._needs.imports.setdefault(module, self._line)

    def _close(self) -> None:
        """Close the current chain of attributes and record what it reached."""
        if self._open is None:
            return
        kind, name, chain = self._open
        self._open = None
        key: tuple[str, Chain] = (name, tuple(chain))
        if kind == "alias" or (kind == "cell" and name in self._aliases):
            module, prefix = self._aliases[name]
            self._needs.modules.setdefault((module, prefix + key[1]), self._line)
        elif kind == "global":
            self._needs.reads.setdefault(key, self._line)
        elif name in self._code.co_freevars:
            self._needs.cells.setdefault(key, self._line)
        else:
            self._computed(key[1])

    def _computed(self, chain: Chain) -> None:
        for name in chain:
            self._needs.attributes.setdefault(name, self._line)

    def _absorb_inner(self, code: CodeType) -> None:
        """Add nested functions, comprehensions and class bodies, which may run whenever this
        function does.
        """
        seen = {n: a for n, a in self._aliases.items() if n in code.co_freevars}
        inner = _Reader(code, seen).read()
        cells = inner.cells
        inner.cells = {}
        self._needs.absorb(inner)
        for (name, chain), line in cells.items():
            if name in self._code.co_freevars:
                self._needs.cells.setdefault((name, chain), line)
            else:
                self._computed(chain)


def _line_of(instruction: dis.Instruction) -> int | None:
    positions = getattr(instruction, "positions", None)
    if positions is not None:
        line: int | None = positions.lineno
        return line
    starts: int | None = instruction.starts_line
    return starts


def _imports_star(instruction: dis.Instruction) -> bool:
    if instruction.opname == "IMPORT_STAR":
        return True
    return instruction.opname == "CALL_INTRINSIC_1" and "IMPORT_STAR" in (instruction.argrepr or "")
