"""Tests that the code has one vocabulary for where memory is, and one meaning per class
name."""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("kiwi_core", "kiwi_jupyter", "emulator/kiwi_emulator")
    for path in (ROOT / package).rglob("*.py")
)

SHARED_AT_MOST = 2
"""Words that two vocabularies may share by chance: one for moves and one for states have "out"."""

WHERE = {
    "resident", "in", "suspended", "held", "locked", "paged_out", "out", "checkpointed", "lost",
    "failed",
}  # fmt: skip
"""Words for where memory is. An enum with three of them is a vocabulary for it."""

BORDERS = {
    "CheckpointState": "the driver's states; kiwi_core/pager/look.py translates them",
    "DriverStep": "the driver's calls, which the emulator names, too",
    "LibraryState": "the library's words; kiwi_core/daemon/links/library_words.py translates them",
    "PagerAction": "the library's words for a step; translated in the same place",
    "SessionState": "what users read; kiwi_core/sched/view.py says when",
    "HistoryKind": "what users read of the past; kiwi_core/sched/model/history.py says when",
    "Role": "what a client says that it is; ConnectionState says so of a connection that may do it",
}
"""Vocabularies of other parties, and where they are translated."""

KNOWS_THE_DRIVER = ("kiwi_core/gpu/", "kiwi_core/movers/", "kiwi_core/pager/")
"""Modules that may name the driver's states."""


PAIRS = {
    "Suspend": "the action that the pager performs, and the message of `kiwi suspend`",
    "Resume": "its counterpart, likewise",
}
"""Names that two classes have on purpose."""

OTHERS_NAMES = {
    "kiwi_jupyter/server_ext/model.py": "the names of the REST interface's schemas",
    "emulator/kiwi_emulator/_layout.py": "the names of the structs in the emulator's C sources",
}


def words_of(node: ast.stmt) -> tuple[str, set[str]] | None:
    """Return the name and the words of an enum or of an alias of ``Literal`` strings."""
    if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(one) for one in node.bases):
        targets = [one.targets[0] for one in node.body if isinstance(one, ast.Assign)]
        names = {ast.unparse(one) for one in targets}
        return node.name, {name.lower() for name in names if name.isupper()}
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
        if ast.unparse(node.value.value) != "Literal":
            return None
        words = {
            str(one.value) for one in ast.walk(node.value.slice) if isinstance(one, ast.Constant)
        }
        return ast.unparse(node.targets[0]), {word.lower().replace("-", "_") for word in words}
    return None


def vocabularies() -> dict[str, set[str]]:
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    found = (words_of(node) for tree in trees for node in tree.body)
    return dict(one for one in found if one is not None)


def test_one_vocabulary_says_where_memory_is() -> None:
    about = {name for name, words in vocabularies().items() if len(words & WHERE) > SHARED_AT_MOST}
    assert about - set(BORDERS) == {"Residency"}


def test_no_two_vocabularies_name_the_same_things() -> None:
    ours = {name: words for name, words in vocabularies().items() if name not in BORDERS}
    shared = {(one, other): ours[one] & ours[other] for one, other in combinations(ours, 2)}
    assert {pair: both for pair, both in shared.items() if len(both) > SHARED_AT_MOST} == {}


def test_each_border_exists() -> None:
    assert set(BORDERS) <= set(vocabularies())


def test_the_name_of_a_class_means_one_class() -> None:
    """Private names are omitted, since they are not used outside their module."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        module = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name] += [module] if module not in OTHERS_NAMES else []
    twice = {name: modules for name, modules in where.items() if len(modules) > 1}
    assert {name: twice[name] for name in twice if name not in PAIRS} == {}
    assert set(PAIRS) <= set(twice)


def test_only_who_talks_to_the_driver_knows_its_states() -> None:
    named = {
        str(path.relative_to(ROOT)) for path in SOURCES if "CheckpointState" in path.read_text()
    }
    assert {one for one in named if not one.startswith(KNOWS_THE_DRIVER)} == set()
