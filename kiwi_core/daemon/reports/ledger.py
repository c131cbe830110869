"""The usage of one GPU by users and notebooks, on disk, in buckets of time; survives restarts.

An SQLite file (standard library), opened for each call: it may be deleted or damaged at any time.
Every function blocks on the disk, so none may be called in the loop.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

import structlog

from kiwi_core.sched.model.accounts import Account

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

log = structlog.get_logger(__name__)

VERSION: Final = 1

HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S

FINE_S: Final = 300
"""Length of a new bucket: ``--since 1h`` is right to within a few minutes."""
FINE_FOR_S: Final = 2 * DAY_S
"""At this age buckets become hours, and at ``HOURS_FOR_S`` days (UTC): the file stays small."""
HOURS_FOR_S: Final = 60 * DAY_S
KEPT_FOR_S: Final = 400 * DAY_S
"""A year and a month, so that two months of different years can be compared."""

ROWS_MAX: Final = 200_000
"""Some 20 MB: five hundred notebooks that work day and night. Beyond it the oldest are deleted."""

BUSY_S: Final = 2.0
"""How long to wait for another program that reads the file."""

_T = TypeVar("_T")

_COLUMNS: Final = ("begins_s", "uid", "name", "job", *Account._fields)
_SUMS: Final = ", ".join(f"SUM({name})" for name in Account._fields)
_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS usage (begins_s INTEGER NOT NULL, uid INTEGER NOT NULL, "
    "name TEXT NOT NULL, job TEXT NOT NULL, "
    + "".join(f"{name} INTEGER NOT NULL, " for name in Account._fields)
    + "PRIMARY KEY (begins_s, uid, name, job)) WITHOUT ROWID"
)
_ON_TOP: Final = "ON CONFLICT (begins_s, uid, name, job) DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in Account._fields
)
_ADD: Final = f"INSERT INTO usage VALUES ({', '.join('?' * len(_COLUMNS))}) {_ON_TOP}"
_COARSEN: Final = (
    f"INSERT INTO usage SELECT begins_s - begins_s % :length, uid, name, job, {_SUMS} FROM usage "
    f"WHERE begins_s < :before AND begins_s % :length != 0 GROUP BY 1, 2, 3, 4 {_ON_TOP}"
)
_COARSENED: Final = "DELETE FROM usage WHERE begins_s < :before AND begins_s % :length != 0"


class _ForeignError(Exception):
    """The file is a sound database, but not of this version of Kiwi."""


class UsageBucket(NamedTuple):
    begins_s: int
    """Unix seconds."""
    uid: int
    name: str
    """The name of the notebook or program."""
    job: str = ""
    """The batch job that it ran in; "": none."""


class Total(NamedTuple):
    uid: int
    name: str
    """The notebook or the job; "" if this is the total of a user, or of what ran in no job."""
    account: Account


def bucket_begin_s(unix_s: float) -> int:
    """Return when the bucket begins in which the time ``unix_s`` is counted."""
    return int(unix_s) - int(unix_s) % FINE_S


def since_s(unix_s: float, now_s: float) -> int:
    """Return when the bucket around ``unix_s`` begins, given how long buckets of that age are."""
    age_s = now_s - unix_s
    length_s = FINE_S if age_s < FINE_FOR_S else HOUR_S if age_s < HOURS_FOR_S else DAY_S
    return int(unix_s) - int(unix_s) % length_s


class Ledger:
    """The usage file. Methods raise ``sqlite3.Error`` or ``OSError`` if the disk is full or gone;
    then nothing was written. A damaged file is renamed once and replaced by a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._condensed_s = 0

    def add(self, sums: Mapping[UsageBucket, Account], now_s: float) -> None:
        """Add all of ``sums``, or nothing."""

        def write(db: sqlite3.Connection) -> None:
            db.executemany(_ADD, [(*bucket, *account) for bucket, account in sums.items()])
            self._tidy(db, int(now_s))

        self._with_file(write)

    def totals(
        self, since_s: int, *, by: Literal["name", "job"] | None = None
    ) -> tuple[int | None, list[Total]]:
        """Return when the first bucket since ``since_s`` begins (Unix seconds; ``None``: there is
        none), and the sums of each user, notebook (``by`` name) or job, those that held the lease
        longest first."""
        name, group = (by, f"uid, {by}") if by else ("''", "uid")

        def read(db: sqlite3.Connection) -> tuple[int | None, list[Total]]:
            where = "FROM usage WHERE begins_s >= ?"
            (began_s,) = db.execute(f"SELECT MIN(begins_s) {where}", (since_s,)).fetchone()
            rows = db.execute(
                f"SELECT uid, {name}, {_SUMS} {where} GROUP BY {group} "
                f"ORDER BY SUM(held_ns) DESC, uid, {name}",
                (since_s,),
            )
            return began_s, [Total(row[0], row[1], Account(*row[2:])) for row in rows]

        return self._with_file(read)

    # --- inside ---------------------------------------------------------------------------------

    def _with_file(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return self._attempt(work)
        except sqlite3.OperationalError:
            raise  # the disk, or another program's lock: the file itself may be good
        except (sqlite3.DatabaseError, _ForeignError) as error:
            log.error("usage is damaged: put aside, begun anew", why=str(error))
            self._path.replace(self._path.with_name(f"{self._path.name}.damaged"))
            with suppress(FileNotFoundError):
                self._path.with_name(f"{self._path.name}-journal").unlink()
            return self._attempt(work)

    def _attempt(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as db:
            db.execute("PRAGMA synchronous = NORMAL")
            self._check(db)
            with db:
                return work(db)

    @staticmethod
    def _check(db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        found = tuple(row[1] for row in db.execute("PRAGMA table_info(usage)"))
        if (version, found) == (0, ()):
            with db:
                db.execute(_CREATE)
                db.execute(f"PRAGMA user_version = {VERSION}")
        elif (version, found) != (VERSION, _COLUMNS):
            raise _ForeignError(f"version {version}, columns {', '.join(found)}")

    def _tidy(self, db: sqlite3.Connection, now_s: int) -> None:
        """Once an hour, merge old buckets into longer ones and delete very old ones."""
        if 0 <= now_s - self._condensed_s < HOUR_S:
            return
        for length_s, after_s in ((HOUR_S, FINE_FOR_S), (DAY_S, HOURS_FOR_S)):
            before_s = (now_s - after_s) // length_s * length_s
            these = {"length": length_s, "before": before_s}
            db.execute(_COARSEN, these)
            db.execute(_COARSENED, these)
        db.execute("DELETE FROM usage WHERE begins_s < ?", (now_s - KEPT_FOR_S,))
        (rows,) = db.execute("SELECT COUNT(*) FROM usage").fetchone()
        if rows > ROWS_MAX:
            # Whole buckets, down to nine tenths of the limit: not again in an hour.
            (first_s,) = db.execute(
                "SELECT begins_s FROM usage ORDER BY begins_s LIMIT 1 OFFSET ?",
                (rows - ROWS_MAX * 9 // 10,),
            ).fetchone()
            db.execute("DELETE FROM usage WHERE begins_s <= ?", (first_s,))
        self._condensed_s = now_s
