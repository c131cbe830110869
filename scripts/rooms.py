#!/usr/bin/env python3
"""rooms [FOLDER]: check that no room of the preloaded library knows a room above its own.

Each file stands in a room, a folder of ``native/src``. A file may include headers of its
own room and of those below, and may name what their sources define. Headers that include each other
in a circle are a mistake in any room. Prints each mistake with its line, and what to do.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOMS = ("base", "gate", "owner", "link", "hooks")
"""From the lowest to the highest; ``README.md`` beside them says what each is."""
SOURCES = Path(__file__).parents[1] / "native/src"
GIVEN = frozenset({"testing.h"})
"""Headers that the build for tests adds."""
REMEDY = (
    "Move this code up, or down what it needs. What the gate and the owner want of the daemon goes "
    "through base/daemon.h."
)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]*)"', re.MULTILINE)
_NOT_CODE = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.DOTALL)
_DEFINITION = re.compile(r"^(?!static\b|extern\b|typedef\b)\w[^\n(;={]*", re.MULTILINE)
_ATTRIBUTE = re.compile(r"__attribute__\(\(.*?\)\)+[ \t]*")
_NAME = re.compile(r"(?<!struct )(?<!enum )(?<!union )\bkp_\w+")


class Source:
    def __init__(self, root: Path, path: Path) -> None:
        self.name = path.relative_to(root).as_posix()
        self.room = self.name.partition("/")[0]
        self.text = path.read_text()
        self.code = _NOT_CODE.sub(lambda found: "\n" * found[0].count("\n"), self.text)

    def includes(self) -> Iterator[tuple[int, str]]:
        return ((_line(self.text, found), found[1]) for found in _INCLUDE.finditer(self.text))

    def defined(self) -> set[str]:
        """Return the functions and variables that other files can use."""
        if not self.name.endswith(".c"):
            return set()
        heads = _DEFINITION.findall(_ATTRIBUTE.sub("", self.code))
        return {name for head in heads for name in _NAME.findall(head)}


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def _above(room: str, other: str) -> bool:
    return ROOMS.index(other) > ROOMS.index(room)


def mistakes(root: Path) -> list[str]:
    sources = [Source(root, path) for path in sorted(root.rglob("*.[ch]"))]
    lost = [one for one in sources if one.room not in ROOMS]
    if lost:
        rooms = ", ".join(ROOMS)
        return [f"{one.name}:1: stands in no room. Move it into one of {rooms}." for one in lost]
    return [*_includes_up(sources), *_names_up(sources), *_circles(sources)]


def _includes_up(sources: list[Source]) -> Iterator[str]:
    for one in sources:
        for line, header in one.includes():
            room, slash, _ = header.partition("/")
            if header not in GIVEN and (not slash or room not in ROOMS):
                yield f'{one.name}:{line}: "{header}" names no room. Write "room/header.h".'
            elif slash and _above(one.room, room):
                yield (
                    f'{one.name}:{line}: includes "{header}", but {room} is above {one.room}. '
                    f"{REMEDY}"
                )


def _names_up(sources: list[Source]) -> Iterator[str]:
    """A header below may declare what a source above defines: that is a call up, too."""
    home = {name: one for one in sources for name in one.defined()}
    for one in sources:
        for found in _NAME.finditer(one.code):
            other = home.get(found[0])
            if other and _above(one.room, other.room):
                yield (
                    f"{one.name}:{_line(one.code, found)}: names {found[0]}, which {other.name} "
                    f"defines, but {other.room} is above {one.room}. {REMEDY}"
                )


def _circles(sources: list[Source]) -> Iterator[str]:
    includes = {one.name: list(one.includes()) for one in sources}
    done: set[str] = set()

    def walk(name: str, way: list[tuple[str, int]]) -> Iterator[str]:
        names = [each for each, _ in way]
        if name in names:
            circle = way[names.index(name) :]
            told = ", ".join(f"{each}:{line}" for each, line in circle)
            yield f"{told}: headers include each other in a circle. Take out one of these includes."
        elif name not in done:
            for line, header in includes.get(name, []):
                yield from walk(header, [*way, (name, line)])
            done.add(name)

    for name in includes:
        yield from walk(name, [])


if __name__ == "__main__":
    found = mistakes(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES)
    print("\n".join(found) or "rooms of the preloaded library: kept")
    sys.exit(bool(found))
