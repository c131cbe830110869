"""Each field of ``Session`` and ``State`` is written in one module, so that a reader knows where to
look. The exceptions are listed; the list may only get shorter."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

from kiwi_core import sched
from kiwi_core.sched.model.session import Session

FOLDER = Path(sched.__file__).parent

EXCEPTIONS = {
    "Session": """
        at_work attained_ns backoff_ns backoff_until_ns burst busy busy_at_ns fixed gone guarded
        hinted_ns home level lingering mid_burst op paged_out_bytes protected_until_ns queued_ns
        resident_bytes restore_bytes turn_id unmovable want
    """.split(),
    "State": "actions hinted ignored_events moved_at_ns now_ns outgrown wake_ns".split(),
}
"""What several modules write: most of it is where the memory is (readings, outcomes, arrivals) and
what a session wants (arrivals, orders, outcomes)."""

MADE_IN = {"forecast/state_copy.py"}
"""Modules that only make copies."""


def writes(of_state: bool) -> dict[str, set[str]]:
    """Return the modules that assign each field, except where the object is made."""
    own = {one.name for one in fields(Session)}
    found: dict[str, set[str]] = defaultdict(set)
    for path in FOLDER.rglob("*.py"):
        module = str(path.relative_to(FOLDER))
        if module in MADE_IN:
            continue
        mine = "model/state.py" if of_state else "model/session.py"
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                continue
            for node in ast.walk(function):
                if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                    continue
                name = ast.unparse(node.value)
                if name == "self":
                    counts = module == mine
                elif of_state:
                    counts = name in ("st", "self._st")
                else:
                    counts = name != "st" and node.attr in own
                if counts:
                    found[node.attr].add(module)
    return found


def written_in_several(of_state: bool) -> list[str]:
    return sorted(name for name, modules in writes(of_state).items() if len(modules) > 1)


def test_each_field_of_a_session_is_written_in_one_module() -> None:
    assert written_in_several(of_state=False) == EXCEPTIONS["Session"]


def test_each_field_of_the_state_is_written_in_one_module() -> None:
    assert written_in_several(of_state=True) == EXCEPTIONS["State"]


def test_the_writes_are_found() -> None:
    assert writes(of_state=False)["blocked"] == {"model/session.py"}
    assert writes(of_state=True)["outside_bytes"] == {"model/state.py"}
