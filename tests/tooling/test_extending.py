"""Tests that the instructions of docs/extending.md work in a copy of the checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from kernels import ROOT, clean_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
"""Each starts Python many times, from sources that have no byte code yet."""

PAGE = ROOT / "docs/extending.md"
COPIED = ("docs", "kiwi_core", "kiwi_jupyter", "emulator/kiwi_emulator",
          "integrations/kubernetes/kiwi_kubernetes", "labextension/schema",
          "labextension/src", "packaging", "tests/support",
          "tests/client", "tests/wire", "pyproject.toml")  # fmt: skip

FIELD = "A new field of the status"
MESSAGE = "A new message of the protocol"
OPTION = "An option of `kiwi daemon`"

_STEP = re.compile(
    r"^(?:\d\. `(?P<file>[^`]+)`, |   and )before (?P<each>each )?`(?P<anchor>[^`]+)`.*?"
    r"^   (?P<fence>```+)\w+\n(?P<text>.*?)^   (?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


def section(heading: str) -> str:
    _, _, rest = PAGE.read_text().partition(f"\n## {heading}\n")
    assert rest, heading
    return rest.partition("\n## ")[0]


def steps(heading: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield the file, the anchor and the text of each step, and how often the anchor is there."""
    file = ""
    for step in _STEP.finditer(section(heading)):
        file = step["file"] or file
        text = re.sub("^   ", "", step["text"], flags=re.MULTILINE)
        yield file, step["anchor"], text, 2 if step["each"] else 1


def walk(copy: Path, heading: str) -> set[str]:
    """Make the changes; return the files."""
    touched = set()
    for file, anchor, text, times in steps(heading):
        path = copy / file
        before = path.read_text()
        assert before.count(anchor) == times, f"{file}: {anchor}"
        path.write_text("".join(put(line, anchor, text) for line in before.splitlines(True)))
        touched.add(file)
    return touched


def put(line: str, anchor: str, text: str) -> str:
    """Put ``text`` before ``anchor``: on its own lines if the anchor begins its line."""
    at = line.find(anchor)
    if at < 0:
        return line
    indent = line[:at]
    if indent.strip():
        space = " " if indent.endswith(" ") else ""
        return f"{indent}{text.rstrip()}{space}{line[at:]}"
    return "".join(f"{indent}{one}".rstrip() + "\n" for one in text.splitlines()) + line


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", *COPIED]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def run(copy: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env=clean_environment(copy, sys.executable) | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ASK = """
import json, os, socket, sys
import kiwi_core
from daemon import running_daemon

assert kiwi_core.__file__.startswith(os.getcwd()), kiwi_core.__file__
with running_daemon("1x64MiB") as daemon, socket.socket(socket.AF_UNIX) as s:
    s.connect(str(daemon.sockets()[0]))
    lines = s.makefile("r")
    for message in json.loads(sys.argv[1]):
        s.sendall(json.dumps(message).encode() + b"\\n")
        print(next(lines), end="")
"""

HELLO = {"type": "hello", "protocol": 1, "role": "session", "client": "test", "name": "first"}
GET_STATUS = {"type": "get-status"}


def answers(copy: Path, *messages: dict[str, object]) -> list[dict[str, object]]:
    """Return the answers of a daemon of the copy."""
    script = copy / "tests/support/ask.py"
    script.write_text(ASK)
    said = run(copy, str(script), json.dumps([HELLO, *messages]))
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.e2e
def test_a_new_field_of_the_status(copy: Path) -> None:
    touched = walk(copy, FIELD)
    types = "labextension/src/model/types.ts"
    before = (copy / types).read_text()
    run(copy, "packaging/typescript_types.py")
    assert "readonly gates: number;" in (copy / types).read_text()
    assert (copy / types).read_text() != before
    assert len(touched | {types}) <= 5
    run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/wire/test_docs.py")
    _, status = answers(copy, GET_STATUS)
    (session,) = status["gpu"]["sessions"]  # type: ignore[index]
    assert session["gates"] == 0, "a program without the library"


@pytest.mark.e2e
def test_a_new_message(copy: Path) -> None:
    assert len(walk(copy, MESSAGE)) <= 4
    tests = ("tests/wire/test_docs.py", "tests/wire/test_legality.py", "tests/wire/test_framing.py")
    # Tests that try many random messages are left out: they take longer than all others.
    quick = ("-k", "not any_bytes and not AnyTalk")
    run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quick, *tests)
    _, ok, status = answers(copy, {"type": "label", "text": "draft"}, GET_STATUS)
    assert ok == {"type": "ok"}
    (session,) = status["gpu"]["sessions"]  # type: ignore[index]
    assert session["name"].endswith(" [draft]")


OPTED = """
import kiwi_core, os
from daemon import running_daemon

assert kiwi_core.__file__.startswith(os.getcwd()), kiwi_core.__file__
with running_daemon("1x64MiB", "--room-patience", "7") as daemon:
    print(daemon.records()[0].config.room_patience_ns)
"""


@pytest.mark.e2e
def test_an_option(copy: Path) -> None:
    assert len(walk(copy, OPTION)) == 1
    run(copy, "docs/reference.py")
    rows = (copy / "docs/configuration.md").read_text().splitlines()
    assert any(row.startswith("| `room_patience_ns` | 10 s | `--room-patience` |") for row in rows)
    script = copy / "tests/support/opted.py"
    script.write_text(OPTED)
    assert run(copy, str(script)).split() == ["7000000000"]
