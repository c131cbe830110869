"""Tests of ``scripts/rooms.py``, which keeps the preloaded library's rooms, and of their page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "native/src"
README = (ROOT / "native/README.md").read_text()


def check(*folder: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/rooms.py", *folder],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def house(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_library_keeps_its_rooms() -> None:
    assert check() == (0, ["rooms of the preloaded library: kept"])


GOOD = {
    "base/log.h": "void kp_log(void);\n",
    "base/log.c": '#include "base/log.h"\n\nvoid kp_log(void) {}\n',
    "gate/gate.h": '#include "base/log.h"\n\nvoid kp_gate(void); /* not kp_link */\n',
    "gate/gate.c": '#include <link.h>\n#include "gate/gate.h"\nvoid kp_gate(void) { kp_log(); }\n',
    "link/link.h": '#include "gate/gate.h"\n\nvoid kp_link(void);\n',
    "link/link.c": '#include "link/link.h"\n\nvoid kp_link(void) { kp_gate(); }\n',
}


def test_rooms_know_those_below(tmp_path: Path) -> None:
    assert check(house(tmp_path, GOOD))[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        pytest.param(
            "gate/gate.c",
            '\n# include "link/link.h"\n',
            'gate/gate.c:2: includes "link/link.h", but link is above gate. Move this code up',
            id="up",
        ),
        pytest.param(
            "base/more.h",
            "\n\nvoid kp_link(void);\n",
            "base/more.h:3: names kp_link, which link/link.c defines, but link is above base.",
            id="up, by a declaration below",
        ),
        pytest.param(
            "gate/gate.c",
            '#include "log.h"\n',
            'gate/gate.c:1: "log.h" names no room. Write "room/header.h".',
            id="no room",
        ),
        pytest.param(
            "attic/attic.c",
            "",
            "attic/attic.c:1: stands in no room. Move it into one of base, gate, owner, link",
            id="a room that is not one",
        ),
        pytest.param(
            "base/log.h",
            '#include "base/log.h"\n',
            "base/log.h:1: headers include each other in a circle.",
            id="a circle of one",
        ),
    ],
)
def test_a_planted_mistake_fails(tmp_path: Path, name: str, text: str, told: str) -> None:
    status, lines = check(house(tmp_path, GOOD | {name: text}))
    assert status == 1
    assert [line for line in lines if line.startswith(told)], lines


def test_a_planted_circle_fails(tmp_path: Path) -> None:
    """Inside one room, where no header is above another."""
    circle = {
        "owner/one.h": '#include "owner/two.h"\n',
        "owner/two.h": '\n#include "owner/three.h"\n',
        "owner/three.h": '#include "base/log.h"\n#include "owner/one.h"\n',
    }
    status, lines = check(house(tmp_path, GOOD | circle))
    assert status == 1
    (line,) = lines
    places, _, told = line.partition(": headers include each other in a circle. Take out one")
    assert set(places.split(", ")) == {"owner/one.h:1", "owner/two.h:2", "owner/three.h:2"}
    assert told


@pytest.mark.parametrize("name", ["kp_link_wake", "kp_pager_away"])
def test_one_call_up_fails(tmp_path: Path, name: str) -> None:
    """In the library as it is: its own text, with one call up."""
    shutil.copytree(SOURCES, tmp_path, dirs_exist_ok=True)
    gate = tmp_path / "gate/gate.c"
    gate.write_text(gate.read_text().replace("kp_daemon_want_lease(true)", f"{name}()"))
    status, lines = check(tmp_path)
    assert status == 1
    assert len(lines) == 1
    assert f"names {name}, which link/" in lines[0]


def test_the_page_has_a_row_for_every_room_and_names_files_that_are_there() -> None:
    (rooms,) = re.findall(r"^## The rooms\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", rooms, re.MULTILINE))
    assert set(rows) == {path.name for path in SOURCES.iterdir() if path.is_dir()}
    for room, text in rows.items():
        for name in re.findall(r"`([\w*]+\.(?:c|def))`", text):
            assert list((SOURCES / room).glob(name)), f"{room}/{name}"


def test_the_page_names_every_lock() -> None:
    (locks,) = re.findall(r"^## Locks\n(.*)", README, re.MULTILINE | re.DOTALL)
    lock = re.compile(r"^ *(?:static )?pthread_mutex_t (\w+)", re.MULTILINE)
    there = {
        (name, path.relative_to(SOURCES).as_posix())
        for path in SOURCES.rglob("*.c")
        for name in lock.findall(path.read_text())
    }
    assert set(re.findall(r"^\| `(\w+)` (?:in |\()`(\S+)`", locks, re.MULTILINE)) == there
