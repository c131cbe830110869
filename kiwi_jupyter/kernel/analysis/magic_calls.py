"""Judge which magics and shell commands in a cell may use the GPU."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kiwi_jupyter.kernel.analysis.check import Objection
from kiwi_jupyter.kernel.analysis.shell_commands import may_use_gpu, python_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_jupyter.kernel.analysis.needs import MagicCall
    from kiwi_jupyter.kernel.analysis.shell_commands import PythonProgram

HARMLESS_LINE: Final = frozenset(
    """
    alias alias_magic autoawait automagic autoreload autosave bookmark cat cd clear colors conda
    config connect_info cp dhist dirs doctest_mode env hist history kiwi less lf lk ll load
    ls lsmagic lx magic man matplotlib micromamba mkdir more mv notebook pip
    popd precision pushd pwd pycat quickref rehashx rm rmdir set_env
    subshell unalias unset_env uv who who_ls writefile
    """.split()
)
HARMLESS_CELL: Final = frozenset(
    "html HTML javascript js latex markdown svg SVG writefile file kiwi".split()
)
SHELL_CELLS: Final = frozenset({"bash", "sh", "!", "sx", "system"})
SHELL_LINES: Final = frozenset({"sx", "system", "!", "sc"})
PYTHON_LINES: Final = frozenset({"time", "timeit", "prun", "pinfo", "pinfo2", "pdoc", "psource"})
PYTHON_LINES_ONLY_READ: Final = frozenset({"pinfo", "pinfo2", "pdoc", "psource"})
PYTHON_CELLS: Final = frozenset({"time", "timeit", "capture", "prun"})
SAFE_EXTENSIONS: Final = frozenset({"autoreload", "kiwi_jupyter.kernel", "storemagic"})

SCRIPT_MAX_BYTES: Final = 512 * 1024
"""A longer ``%run`` script counts as one that may use the GPU."""

_OPTION: Final = re.compile(r"\s*-[nrtspq]\s*\d+\s*|\s*-[a-zA-Z]+\s+")
_EXPANSION: Final = re.compile(r"\{([^{}]*)\}|\$([A-Za-z_]\w*)")


class Magics:
    """``body(code, fresh)`` judges Python code; ``fresh``: it runs in a separate namespace."""

    def __init__(self, body: Callable[[str, bool], Objection | None]) -> None:
        self._body = body

    def __call__(self, magic: MagicCall) -> Objection | None:
        fault = self._judge(magic)
        return None if fault is None else _at(fault, magic.line)

    def _judge(self, magic: MagicCall) -> Objection | None:
        words = magic.arguments
        if magic.method in ("system", "getoutput"):
            return self._shell(words[0] if words else "")
        if not words:
            return Objection(magic.line, magic.method, "it has no name")
        if magic.method == "run_line_magic":
            return self._line(words[0], words[1] if len(words) > 1 else "")
        return self._cell(words[0], words[1] if len(words) > 1 else "", words[-1])

    def _line(self, name: str, line: str) -> Objection | None:
        expanded = self._expansions(line)
        if expanded is not None:
            return expanded
        if name in SHELL_LINES:
            return self._shell(line)
        if name in PYTHON_LINES:
            code = _without_options(line) if name not in PYTHON_LINES_ONLY_READ else line
            return self._body(code, False) if code.strip() else None
        if name in ("load_ext", "reload_ext", "unload_ext"):
            if line.strip() in SAFE_EXTENSIONS:
                return None
            return Objection(0, f"%{name} {line}", "it imports what Kiwi does not know")
        if name == "run":
            return self._run(line)
        if name == "store" and not {"-r", "-d", "-z"} & set(line.split()):
            return self._stored(line)
        if name in HARMLESS_LINE:
            return None
        return Objection(0, f"%{name}", "Kiwi does not know this magic", taints=True)

    def _cell(self, name: str, line: str, body: str) -> Objection | None:
        expanded = self._expansions(line) if name not in HARMLESS_CELL else None
        if expanded is not None:
            return expanded
        if name in SHELL_CELLS:
            return self._shell(body, expand=False)
        if name in HARMLESS_CELL:
            return None
        if name in PYTHON_CELLS:
            if name == "timeit" and line.strip():
                fault = self._body(_without_options(line), False)
                if fault is not None:
                    return fault
            return self._body(body, False) if body.strip() else None
        return Objection(0, f"%%{name}", "Kiwi does not know this magic", taints=True)

    def _shell(self, script: str, *, expand: bool = True) -> Objection | None:
        fault = self._expansions(script) if expand else None
        if fault is not None:
            return fault
        plain = _EXPANSION.sub("x", script) if expand else script
        python = None if _EXPANSION.search(script) else python_program(plain)
        if python is not None:
            return self._python(script.strip(), python)
        command = may_use_gpu(plain)
        if command is None:
            return None
        return Objection(0, f"!{command}", "a program may use the GPU", taints=False)

    def _python(self, script: str, program: PythonProgram) -> Objection | None:
        """Check a Python program in a separate process, which has only what it imports."""
        source = program.source
        if source is None:
            source, fault = _read(program.path, f"!{script}")
            if source is None:
                return fault
        fault = self._body(source, True)
        if fault is None:
            return None
        why = f"it reaches `{fault.subject}` in line {fault.line}: {fault.why}"
        return Objection(0, f"!{script}", why, taints=False, plain=fault.plain)

    def _expansions(self, line: str) -> Objection | None:
        """Check ``{expression}`` and ``$name``: IPython prints their values into the line."""
        for match in _EXPANSION.finditer(line):
            fault = self._body((match[1] or match[2] or "").partition(":")[0], False)
            if fault is not None:
                return fault
        return None

    def _stored(self, line: str) -> Objection | None:
        """Check ``%store a b >file``, which writes the values of names to a file."""
        names = [word for word in line.partition(">")[0].split() if word.isidentifier()]
        return self._body("\n".join(names), False) if names else None

    def _run(self, line: str) -> Objection | None:
        words = line.split()
        path = next((word for word in words if not word.startswith("-")), "")
        path = os.path.expanduser(path.strip("'\""))
        if not path.endswith(".py") and os.path.exists(path + ".py"):
            path += ".py"
        subject = f"%run {path}"
        if {"-m", "-d", "-p"} & set(words) or path.endswith(".ipynb"):
            return Objection(0, subject, "Kiwi does not look into that kind of run")
        source, fault = _read(path, subject)
        if source is None:
            return fault
        fault = self._body(source, "-i" not in words)
        if fault is None:
            return None
        why = f"it reaches `{fault.subject}` in line {fault.line}: {fault.why}"
        return Objection(0, subject, why, plain=fault.plain)


def _read(path: str, subject: str) -> tuple[str | None, Objection | None]:
    try:
        if os.path.getsize(path) > SCRIPT_MAX_BYTES:
            return None, Objection(0, subject, "the script is too long to be looked at")
        with open(path, encoding="utf-8") as file:
            return file.read(), None
    except (OSError, UnicodeDecodeError) as error:
        return None, Objection(0, subject, f"it cannot be read ({type(error).__name__})")


def parse(code: str, transform: Callable[[str], str]) -> ast.Module | None:
    """Return the body of a magic as Python; ``None`` if it is not Python. It may hold magics
    itself.
    """
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        pass
    try:
        return ast.parse(transform(code))
    except Exception:  # noqa: BLE001 - input transformers are other people's code
        return None


def _without_options(line: str) -> str:
    """Return ``f(x)`` of ``-n 10 -r 3 f(x)``."""
    while True:
        match = _OPTION.match(line)
        if match is None:
            return line
        line = line[match.end() :]


def _at(fault: Objection, line: int) -> Objection:
    return replace(fault, line=line)
