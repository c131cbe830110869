"""Write the labextension's terms from ``kiwi_core/terms.py``, so that every surface has the same.

    .venv/bin/python packaging/typescript_terms.py

``tests/tooling/test_typescript_types.py`` fails if the written file differs. Each term is a
function that gives a literal to ``trans``, so that ``npm run catalogue`` finds it for translators.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kiwi_core import terms

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE: Final = Path(__file__).parents[1] / "labextension/src/model/terms.ts"

HEADER: Final = """\
/**
 * The words that every surface uses for the same thing.
 *
 * Written by packaging/typescript_terms.py from kiwi_core/terms.py: do not edit.
 */

import type { SessionState } from './types';
import { trans } from './translation';
"""
_PART: Final = re.compile(r"\{(\w+)\}")


def written() -> str:
    """Return the whole file."""
    return HEADER + "".join(f"\n{term}" for term in _terms())


def _terms() -> Iterator[str]:
    for name, value in vars(terms).items():
        if not name.isupper() or name == "TYPE_CHECKING":
            continue
        if isinstance(value, int):
            yield f"export const {name} = {value};\n"
        elif isinstance(value, str):
            yield _function(_camel(name), value)
        else:
            yield _of_states(value)


def _function(name: str, text: str) -> str:
    parts = _PART.findall(text)
    for number, part in enumerate(parts, start=1):
        text = text.replace("{" + part + "}", f"%{number}")
    arguments = ", ".join(f"{part}: string | number" for part in parts)
    call = f"trans.__({', '.join([_quoted(text), *parts])})"
    return f"export function {name}({arguments}): string {{\n  return {call};\n}}\n"


def _of_states(states: dict[Any, str]) -> str:
    cases = "".join(
        f"    case '{state.value}':\n      return trans.__({_quoted(word)});\n"
        for state, word in states.items()
    )
    head = "export function stateWord(state: SessionState): string"
    return f"{head} {{\n  switch (state) {{\n{cases}  }}\n}}\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if "'" in text else f"'{text}'"


def _camel(name: str) -> str:
    first, *others = name.lower().split("_")
    return first + "".join(word.capitalize() for word in others)


if __name__ == "__main__":
    FILE.write_text(written())
