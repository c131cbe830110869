"""Make summary.md from results.json: every question, its answer, its target and the verdict."""

from __future__ import annotations

from typing import Any

_VERDICTS = {None: "", True: "pass", False: "**FAIL**"}


def text(results: dict[str, Any]) -> str:
    """Return the summary as Markdown."""
    lines = ["# Kiwi on a GPU: what was measured", "", *_head(results), ""]
    for name, part in results["parts"].items():
        took = f", {part['took_s']:g} s of {part['limit_s']:g} s" if "took_s" in part else ""
        lines += [
            f"## {name}",
            "",
            f"{part['answers']}",
            "",
            f"Status: {part.get('status', 'under way')}{took}",
        ]
        lines += ["", *_table(part["rows"]), ""] if part["rows"] else [""]
    return "\n".join(lines)


def verdicts(results: dict[str, Any]) -> dict[str, int]:
    """Count the rows that passed, that failed, and those without a target."""
    rows = [row["passed"] for part in results["parts"].values() for row in part["rows"]]
    return {"passed": rows.count(True), "failed": rows.count(False), "open": rows.count(None)}


def _head(results: dict[str, Any]) -> list[str]:
    facts = results.get("facts", {})
    counts = verdicts(results)
    lines = [
        f"GPU: {facts.get('gpu', 'unknown')}, driver {facts.get('driver', 'unknown')}.",
        "{passed} rows passed, {failed} failed, {open} have no target.".format(**counts),
    ]
    if results.get("emulated"):
        lines.insert(0, "**The emulated driver: these figures mean nothing.**\n")
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["| question | answer | target | verdict |", "|---|---|---|---|"]
    return head + [
        f"| {_cell(row['name'])} | {_cell(row['value'])} {row['unit']} "
        f"| {_cell(row['target'])} | {_VERDICTS[row['passed']]} |"
        for row in rows
    ]


def _cell(value: object) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= 300 else text[:300] + " …"
