"""Tests that all code that starts Python does it by ``kiwi_core.interpreter``."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiwi_core import interpreter

ROOT = Path(__file__).parents[2]
STARTS = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec"}


def sources() -> list[Path]:
    found = [*ROOT.glob("kiwi_core/**/*.py"), *ROOT.glob("kiwi_jupyter/**/*.py")]
    return [path for path in found if path != Path(interpreter.__file__)]


def is_attribute(node: ast.AST, of: str, name: str) -> bool:
    return ast.unparse(node) == f"{of}.{name}" if isinstance(node, ast.Attribute) else False


def faults(tree: ast.AST) -> list[str]:
    """Return what in ``tree`` starts Python in another way, as words with a line number."""
    found = []
    names_it = any(isinstance(n, ast.Name) and n.id == "interpreter" for n in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            parts = node.args if isinstance(node, ast.Call) else node.elts
            if any(is_attribute(part, "sys", "executable") for part in parts):
                found.append(f"{node.lineno}: sys.executable in a command")
            words = [part.value for part in parts if isinstance(part, ast.Constant)]
            if "-m" in words and not isinstance(node, ast.Call):
                found.append(f"{node.lineno}: -m in a command")
        if names_it and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keywords = {word.arg: word.value for word in node.keywords}
            starts = node.func.attr in STARTS and ast.unparse(node.func).startswith(
                ("subprocess.", "asyncio.create_subprocess")
            )
            where = keywords.get("cwd")
            if starts and not (where and is_attribute(where, "interpreter", "DIRECTORY")):
                found.append(f"{node.lineno}: started in another directory")
    return found


def test_nothing_starts_python_in_another_way() -> None:
    assert len(sources()) > 200
    wrong = {
        f"{path.relative_to(ROOT)}:{fault}"
        for path in sources()
        for fault in faults(ast.parse(path.read_text()))
    }
    assert wrong == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "subprocess.Popen([sys.executable, '-m', 'kiwi_core.cli'])",
        "command = (sys.executable, '-c', text)",
        "os.execv(sys.executable, words)",
        "command = ['python3', '-m', 'kiwi_core.daemon']",
        "subprocess.run(interpreter.module('kiwi_core.daemon'))",
        "subprocess.run(interpreter.module('kiwi_core.daemon'), cwd='here')",
    ],
)
def test_the_faults_are_seen(wrong: str) -> None:
    assert faults(ast.parse(wrong))


PROGRAM = "import sys, json; print(json.dumps([sys.argv, sys.path, __name__]))"


@pytest.mark.parametrize("path", [None, "", ":", ".:relative", "/nonexistent"])
def test_a_program_sees_its_own_arguments_and_path(tmp_path: Path, path: str | None) -> None:
    env = dict(os.environ) if path is None else {**os.environ, "PYTHONPATH": path}
    out = subprocess.check_output(
        interpreter.source(PROGRAM, "one", "-c"), env=env, cwd=interpreter.DIRECTORY, text=True
    )
    argv, entries, name = json.loads(out)
    assert argv == ["-c", "one", "-c"]
    assert name == "__main__"
    assert "" not in entries
    assert str(ROOT / "kiwi_core") not in entries
    assert not any(entry.startswith(str(tmp_path)) for entry in entries)


def test_a_module_is_run_as_with_m(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "__main__.py").write_text(PROGRAM)
    out = subprocess.check_output(
        interpreter.module("mine", "word"), cwd=interpreter.DIRECTORY, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    argv, _entries, name = json.loads(out)
    assert argv == [str(tmp_path / "mine" / "__main__.py"), "word"]
    assert name == "__main__"
    assert interpreter.module("mine")[0] == sys.executable


NAMED = """
import runpy, sys
from pathlib import Path
comm = Path("/proc/self/comm")
comm.write_text("before")
runpy.run_path(sys.argv[1])["name_process"](sys.argv[2:])
print(comm.read_text())
"""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("kiwi_core.cli daemon", "kiwi-daemon"),
        ("kiwi_core.cli", "kiwi"),
        ("kiwi_core.movers 1", "kiwi-movers"),
        ("jupyterlab", "before"),
    ],
)
def test_processes_of_kiwi_have_its_name(words: str, name: str) -> None:
    """An admin sees in `top` what they are, and finds them by `pgrep kiwi-`."""
    command = [sys.executable, "-c", NAMED, str(ROOT / "kiwi_core/start.py"), *words.split()]
    assert subprocess.check_output(command, text=True).strip() == name
