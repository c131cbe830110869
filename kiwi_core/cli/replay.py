"""``kiwi replay``: show what a journal records, and check that the scheduler still decides the
same."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from kiwi_core.cli import exits, journals
from kiwi_core.cli.terminal import Style, printable
from kiwi_core.errors import CallerError
from kiwi_core.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kiwi_core.cli.history import HistoryRun, HistorySpan
    from kiwi_core.sched.replay import JournalEntry, JournalHeader, ReplayLine

_NAMED_MAX = 20
"""Most sessions that an error message lists: a screenful."""

DESCRIPTION = """\
Reads a daemon's journal and shows what happened: each event and the scheduler's orders, then who
held the GPU when, who waited for how long, and what was moved. The scheduler of this version makes
each decision again; differences from the journal are marked with !!."""
EPILOG = """\
Each GPU's daemon writes its journal, UUID.journal, into the state directory ($KIWI_STATE_DIR, else
state/ in the socket directory); .1, .2 ... are earlier ones: of earlier daemons, or full. A full
one goes on in the next; to check both, play both: cat U.journal.1 U.journal | kiwi replay -
A journal holds no names of users or notebooks, no code and no data.

exit codes: 0 the scheduler decides as recorded, 1 it does not (or the journal cannot be read).

examples:
  kiwi replay GPU-0d1e.journal
  kiwi replay GPU-0d1e.journal --session s3      only what concerns one session
  kiwi replay GPU-0d1e.journal --summary         only who held, who waited, what was moved
  kiwi replay GPU-0d1e.journal --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", metavar="JOURNAL", help="the file, or - for standard input")
    parser.add_argument("--session", metavar="S", help="only this session, for example s3")
    parser.add_argument("--summary", action="store_true", help="leave out the single events")
    parser.add_argument("--json", action="store_true", help="the summary, for programs")


def run(args: argparse.Namespace) -> int:
    quiet = args.summary or args.json
    runs: list[HistoryRun] = []
    filtering = Filter(args.session)
    style = Style.of(sys.stdout)
    with journals.opened(args.journal) as file:
        for part in _tell(journals.records(file), filtering):
            if isinstance(part, ReplayPart):
                runs.append(part.run)
            elif not quiet:
                text = "\n".join(printable(line) for line in str(part).split("\n"))
                print(style.red(text) if part.differs else text)
    filtering.check()
    if args.json:
        print(_json(runs))
    else:
        print("\n".join(line for one in runs for line in summary(one)))
    return exits.FAILED if any(one.differences for one in runs) or not runs else exits.OK


class ReplayPart:
    """The end of one daemon's part of a journal."""

    def __init__(self, run: HistoryRun) -> None:
        self.run = run


def _tell(
    records: Iterator[JournalHeader | JournalEntry], filtering: Filter
) -> Iterator[ReplayLine | ReplayPart]:
    from kiwi_core.cli.history import Historian
    from kiwi_core.sched.replay import JournalHeader, Replay, goes_on

    player: Replay | None = None
    historian: Historian | None = None
    for record in records:
        if isinstance(record, JournalHeader):
            if player is not None and goes_on(record):
                continue
            if player is not None and historian is not None:
                yield ReplayPart(filtering.keep(historian.finish(player.differences)))
            player = Replay(record)
            historian = Historian(record, player.scheduler)
        elif player is None or historian is None:
            raise CallerError(
                "bad-journal", "The journal does not begin with a header.", "Give the whole file."
            )
        else:
            lines = player.feed(record)
            historian.feed(record)
            if filtering.concerns(record):
                yield from lines
    if player is not None and historian is not None:
        yield ReplayPart(filtering.keep(historian.finish(player.differences)))


class Filter:
    """Selects what concerns one session, or everything if none is named."""

    def __init__(self, only: str | None) -> None:
        self._only = only
        self._operations: set[int] = set()
        self._seen: dict[str, None] = {}

    def check(self) -> None:
        """Raise ``CallerError`` if the journal does not have the session."""
        if self._only is None or self._only in self._seen:
            return
        names = list(map(printable, self._seen))
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        has = f"It has {', '.join(names[:_NAMED_MAX])}{more}." if names else "It has none."
        what = f"The journal has no session {printable(self._only)}."
        raise CallerError("no-such-session", what, has)

    def concerns(self, entry: JournalEntry) -> bool:
        about = getattr(entry.event, "session", None)
        self._seen |= dict.fromkeys(action.session for action in entry.actions)
        if about is not None:
            self._seen[about] = None
        if self._only is None:
            return True
        mine = [action for action in entry.actions if action.session == self._only]
        self._operations |= {action.op for action in mine if hasattr(action, "op")}
        if mine or about == self._only:
            return True
        return getattr(entry.event, "op", None) in self._operations

    def keep(self, run: HistoryRun) -> HistoryRun:
        if self._only is not None:
            run.held = [span for span in run.held if span.session == self._only]
            run.waited = [span for span in run.waited if span.session == self._only]
            run.moves = [move for move in run.moves if move.session == self._only]
        return run


def summary(run: HistoryRun) -> list[str]:
    """Return lines on who held, who waited, what was moved, and whether decisions are the same."""
    began = datetime.fromtimestamp(run.began_at_unix_s, tz=timezone.utc)
    what = f"{run.events} events in {format_duration_s(run.seconds)}"
    lines = ["", f"{run.gpu_uuid}, from {began:%Y-%m-%d %H:%M:%S} UTC: {what}"]
    lines += _spans("held", run.held) + _spans("waited", run.waited)
    for move in run.moves:
        rate = f" ({move.bytes_moved / move.seconds / 1e9:.2f} GB/s)" if move.seconds else ""
        what = f"{format_bytes(move.bytes_moved)} in {format_duration_s(move.seconds)}{rate}"
        who = f"{printable(move.session)} moved {move.direction}"
        lines.append(f"  {move.at_s:10.3f} s               {who}: {what}")
    if not run.checked:
        lines.append(
            "The beginning of this journal is in an earlier file, or was lost: shown as recorded, "
            "not checked."
        )
    elif run.differences:
        lines.append(f"The scheduler of this version decides differently {run.differences} times.")
    else:
        lines.append("The scheduler of this version decides the same.")
    return lines


def _spans(word: str, spans: list[HistorySpan]) -> list[str]:
    return [
        f"  {span.from_s:10.3f} … {span.to_s:10.3f} s  {printable(span.session)} {word} "
        f"{format_duration_s(span.to_s - span.from_s)}"
        for span in sorted(spans, key=lambda span: (span.from_s, span.to_s))
    ]


def _json(runs: list[HistoryRun]) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode({"runs": runs}), indent=2).decode()
