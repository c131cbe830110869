"""Writes the parts of the pages in ``PAGES`` that are generated from the code.

    .venv/bin/python docs/reference.py

The result of ``BLOCKS[NAME]()`` is between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``;
``tests/tooling/test_docs.py`` fails if a page differs.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily

from kiwi_core import config
from kiwi_core.cli.app import COMMANDS
from kiwi_core.metrics import families
from kiwi_core.peer_limits import PEER_LIMITS
from kiwi_core.units import format_bytes, format_duration_s, ns_to_seconds
from kiwi_jupyter.kernel.config import Kiwi
from kiwi_jupyter.server_ext.app import KiwiServerApp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from traitlets.config import Configurable

PAGES: Final = tuple(
    Path(__file__).with_name(name) for name in ("configuration.md", "jupyterlab.md", "metrics.md")
)
_LAB: Final = Path(__file__).parents[1] / "labextension"
_BLOCK: Final = re.compile(
    r"(?P<begin><!-- begin: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end: (?P=name) -->)", re.DOTALL
)


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, as ``kiwi`` builds it."""
    found = {}
    for name, command in COMMANDS.items():
        found[name] = argparse.ArgumentParser(prog=f"kiwi {name}")
        command.load().add_arguments(found[name])
    return found


def traits() -> str:
    return _traits_of(Kiwi)


def server_traits() -> str:
    return _traits_of(KiwiServerApp)


def _traits_of(configurable: type[Configurable]) -> str:
    rows = []
    for name, trait in sorted(configurable.class_own_traits(config=True).items()):
        default = repr(trait.default())
        rows.append([f"`c.{configurable.__name__}.{name}`", f"`{default}`", trait.help])
    return _table(["setting", "default", "meaning"], rows)


def options() -> str:
    parts = []
    for name, parser in parsers().items():
        actions = [a for a in parser._actions if a.dest != "help" and a.help != argparse.SUPPRESS]
        rows = [[_names(action), _value(action), action.help or ""] for action in actions]
        summary = COMMANDS[name].summary
        parts.append(f"### `kiwi {name}`\n\n{summary[:1].upper()}{summary[1:]}.\n\n")
        parts.append(_table(["option", "value", "meaning"], rows) + "\n")
    return "".join(parts).rstrip("\n") + "\n"


def limits() -> str:
    notes = _docstrings(config.Config)
    changed_by = {action.dest: _names(action) for action in parsers()["daemon"]._actions}
    rows = [
        [f"`{name}`", quantity(name, value), changed_by.get(name, ""), notes[name]]
        for name, value in vars(config.DEFAULTS).items()
    ]
    return _table(["limit", "value", "option", "why"], rows)


def peers() -> str:
    """Return the table of what peers can make a daemon hold."""
    rows = []
    for limit in PEER_LIMITS:
        size = format_bytes if limit.name.endswith("bytes") else "{:,}".format
        most = "in turns" if limit.most is None else size(limit.most)
        share = (
            f"{size(limit.per_user)}, {limit.per_s:,}/s" if limit.per_s else size(limit.per_user)
        )
        rows.append([f"`{limit.name}`", limit.what, most, share, limit.why])
    return _table(["`what`", "meaning", "all users", "one user, at most", "why"], rows)


def metrics() -> str:
    rows = [
        [f"`{families.UP[0]}`", "gauge", "", families.UP[1]],
        [f"`{families.INFO[0]}_info`", "gauge", _labels(families.INFO_LABELS), families.INFO[1]],
        [f"`{families.WAITS.name}`", "histogram", f"`{families.WAITS.label}`", families.WAITS.help],
    ]
    for family in families.FAMILIES:
        kind = "counter" if family.kind is CounterMetricFamily else "gauge"
        rows.append([f"`{family.name}`", kind, _labels(family.labels), family.help])
    return _table(["metric", "kind", "labels", "meaning"], rows)


def lab_schema() -> dict[str, Any]:
    """Return the schema that JupyterLab's settings editor reads."""
    schema: dict[str, Any] = json.loads((_LAB / "schema/plugin.json").read_text())
    return schema


def lab_settings() -> str:
    rows = [
        [f"**{of['title']}**", f"`{name}`", f"`{json.dumps(of['default'])}`", of["description"]]
        for name, of in lab_schema()["properties"].items()
    ]
    return _table(["setting", "in a file", "default", "meaning"], rows)


def lab_commands() -> str:
    """Return ids, labels and captions of the commands in ``labextension/src/plugins``."""
    ids = dict(re.findall(r"(\w+): '(kiwi:[\w-]+)'", (_LAB / "src/plugins/token.ts").read_text()))
    sources = "".join(path.read_text() for path in sorted((_LAB / "src/plugins").glob("*.ts")))
    added = re.findall(
        r"addCommand\(CommandIds\.(\w+), \{\s*label: trans\.__\('([^']+)'\),"
        r"\s*caption: trans\.__\(\s*'([^']+)'",
        sources,
    )
    assert sorted(name for name, *_ in added) == sorted(ids), "a command that cannot be read here"
    said = {name: f"**{label}** | `{ids[name]}` | {caption}." for name, label, caption in added}
    rows = [said[name].split(" | ") for name in ids]
    return _table(["command", "id", "what it does"], rows)


def _labels(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def quantity(name: str, value: Any) -> str:
    """Return ``value`` with the unit that ``name`` ends with."""
    if name.endswith("_ns"):
        return format_duration_s(ns_to_seconds(value))
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_s"):
        return ", ".join(f"{one:g} s" for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _names(action: argparse.Action) -> str:
    return f"`{', '.join(action.option_strings) or action.metavar or action.dest}`"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return f"`{action.metavar or action.dest.upper()}`"


def _docstrings(of: type) -> dict[str, str]:
    """Return the string below each field of a class."""
    (body,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, note in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(note.value))
    return found


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("%%", "%").split()).replace("|", "\\|")


BLOCKS: Final[dict[str, Callable[[], str]]] = {
    "traits": traits,
    "server-traits": server_traits,
    "options": options,
    "limits": limits,
    "metrics": metrics,
    "peers": peers,
    "lab-settings": lab_settings,
    "lab-commands": lab_commands,
}


def written_anew(page: str) -> str:
    """Return ``page`` with the present output of the code in every block."""
    return _BLOCK.sub(lambda m: f"{m['begin']}{BLOCKS[m['name']]()}{m['end']}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written_anew(page.read_text()))
