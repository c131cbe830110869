"""The record of the answers of ``quirks.py``: a row each, and a table that compares drivers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from callers import HERE, RESERVE_S
from quirks_known import KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from callers import Caller
    from stage import Stage

EMULATOR_FILE = HERE / "quirks_emulator.json"
"""The emulator's answers, by row: an emulated run writes the same file into its results."""

MEASURED_FILE = HERE / "quirks_h200.json"
"""The answers of Kiwi's own run on an H200 with driver 580.159.04 and the open kernel module
(26 November 2026, in a virtual machine), by row: its ``quirks.json``."""

_HEAD = """# How this driver behaves

"Others saw" is what other people's runs on drivers 580 and 595 showed; "Kiwi saw" is the answer of
an H200 with driver 580.159.04 and the open module; "emulator" is what Kiwi's emulated driver
answers in the same probe. Where a real driver is less kind than the emulator, the emulator is
wrong.

| probe | others saw | Kiwi saw | emulator | this driver | as others saw | as the emulator |
|---|---|---|---|---|---|---|
"""


def _answers(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    answers: dict[str, str] = json.loads(file.read_text())
    return answers


def emulator_answers() -> dict[str, str]:
    return _answers(EMULATOR_FILE)


def measured_answers() -> dict[str, str]:
    return _answers(MEASURED_FILE)


def plain(answer: str) -> str:
    """Return an answer without the figures in brackets at its end."""
    return answer.partition(" (")[0]


def compared(answer: str, expected: tuple[str, ...]) -> str:
    if not expected:
        return ""
    return "same" if plain(answer) in map(plain, expected) else "different"


class Book:
    """The answers of a part; those of earlier parts of the same run stay in the table."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._emulator, self._measured = emulator_answers(), measured_answers()
        self._file = stage.folder / "quirks.json"
        self.answers: dict[str, str] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def note(self, name: str, answer: str, **more: object) -> None:
        """Record the answer of one probe."""
        self.answers[name] = answer
        known, emulator = KNOWN.get(name), self._emulator.get(name)
        seen = known.answers if known else ()
        self.stage.row(
            name,
            answer,
            target=f"others saw: {' or '.join(seen)}" if seen else "",
            source=known.source if known else "",
            kiwi_saw=self._measured.get(name, ""),
            emulator=emulator or "",
            as_others_saw=compared(answer, seen),
            as_the_emulator=compared(answer, (emulator,) if emulator else ()),
            **more,
        )

    def figure(self, name: str, value: object, unit: str) -> None:
        """Record a figure without a comparison."""
        self.stage.row(name, value, unit=unit)

    def group(self, name: str, needs_s: float, run: Callable[[Book, Caller], None]) -> None:
        """Run some probes. If they fail the others still run; the table is written after each."""
        from callers import Caller

        if self.stage.left_s < needs_s + RESERVE_S:
            words = (
                f"left out: {self.stage.left_s:.0f} s were left, and it may take {needs_s:.0f} s"
            )
            self.stage.row(f"group.{name}", words)
            return
        try:
            with Caller(self.stage) as caller:
                run(self, caller)
        except Exception as error:  # noqa: BLE001 - one group's failure must not cost the others
            words = f"broke off: {type(error).__name__}: {error}"[:500]
            self.stage.row(f"group.{name}", words, passed=False)
        finally:
            self.write()

    def summary(self) -> None:
        """Record how many answers of this part and earlier ones are those of other drivers."""
        others = [
            compared(answer, KNOWN[name].answers)
            for name, answer in self.answers.items()
            if name in KNOWN
        ]
        emulator = [
            compared(answer, (self._emulator[name],))
            for name, answer in self.answers.items()
            if name in self._emulator
        ]
        words = "; ".join(
            f"{what}: {found.count('same')} same, {found.count('different')} different"
            for what, found in (("as others saw", others), ("as the emulator", emulator))
        )
        self.stage.row("compared", words)

    def write(self) -> None:
        self._file.write_text(json.dumps(self.answers, indent=1) + "\n")
        lines = [self._line(name) for name in self.answers]
        (self.stage.folder / "quirks.md").write_text(_HEAD + "".join(lines))
        if self.stage.emulated:
            answers = {name: plain(answer) for name, answer in self.answers.items()}
            text = json.dumps(answers, indent=1, sort_keys=True) + "\n"
            (self.stage.folder / EMULATOR_FILE.name).write_text(text)

    def _line(self, name: str) -> str:
        answer, known = self.answers[name], KNOWN.get(name)
        seen = known.answers if known else ()
        emulator = self._emulator.get(name, "")
        others = f"{' or '.join(seen)} [{known.source}]" if known else ""
        cells: list[Any] = [
            name, others, self._measured.get(name, ""), emulator, answer,
            compared(answer, seen), compared(answer, (emulator,) if emulator else ()),
        ]  # fmt: skip
        return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |\n"
