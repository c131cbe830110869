"""Files that Kiwi makes, and what docs/security.md says about them."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
TABLE = re.compile(r"<!-- begin: files -->(.*?)<!-- end: files -->", re.DOTALL)
ROW = re.compile(r"^\| `([^|]+)` \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
HOLES = {
    "UUID": r"GPU-[0-9a-f-]{36}",
    "PID": r"\d+",
    "NS": r"\d+",
    "N": r"[1-9]",
    "HASH": r"[0-9a-f]{16}",
    "ANY": r".+",
}
"""Values of the placeholders such as ``<UUID>``."""


@dataclass(frozen=True)
class Row:
    """One line of the page's table. A mode that begins with "≤" may be less, depending on the
    umask."""

    pattern: str
    mode: str
    mode_of_root: str

    @property
    def regex(self) -> re.Pattern[str]:
        parts = re.split(r"<([A-Z]+)>", self.pattern)
        return re.compile(
            "".join(HOLES[p] if odd % 2 else re.escape(p) for odd, p in enumerate(parts))
        )

    def allows(self, mode: int, *, root: bool) -> bool:
        said = self.mode_of_root if root and self.mode_of_root != "same" else self.mode
        most = int(said.removeprefix("≤ "), 8)
        return mode & ~most == 0 if said.startswith("≤ ") else mode == most


def rows() -> list[Row]:
    (text,) = TABLE.findall(PAGE.read_text())
    found = [Row(*row) for row in ROW.findall(text)]
    assert len(found) > 10, "the table was not read"
    return found


@dataclass(frozen=True)
class Made:
    """A file that was found; ``name`` begins with the place that it is in: ``sockets/…``."""

    name: str
    mode: int
    uid: int


def found_in(places: Mapping[str, Path]) -> Iterator[Made]:
    """Yield everything in ``places`` (name in the table → directory or file) and the places
    themselves. A file inside a place with its own name belongs to that place."""
    named = {path: name for name, path in places.items()}
    for name, top in places.items():
        for path in [top, *sorted(top.rglob("*"))]:
            owner = next(p for p in (path, *path.parents) if p in named)
            if named[owner] != name:
                continue
            try:
                info = path.lstat()
            except FileNotFoundError:
                continue  # it has disappeared
            if stat.S_ISLNK(info.st_mode):
                continue  # the file that it points to decides
            below = "/".join((name, *path.relative_to(top).parts))
            slash = "/" if stat.S_ISDIR(info.st_mode) else ""
            yield Made(below + slash, stat.S_IMODE(info.st_mode), info.st_uid)


def wrong(made: Made, table: list[Row], uid: int, *, root: bool) -> str:
    """Return what the table does not allow of the file; "" if it is as the table says."""
    row = next((row for row in table if row.regex.fullmatch(made.name)), None)
    if row is None:
        return f"{made.name} is not in the table"
    if made.uid != uid:
        return f"{made.name} belongs to {made.uid}, not to {uid}"
    if not row.allows(made.mode, root=root):
        return f"{made.name} has {made.mode:04o}; the table: {row}"
    return ""
