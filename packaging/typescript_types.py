"""Write the labextension's types from the structs of the server extension.

    .venv/bin/python packaging/typescript_types.py

The structs in ``kiwi_jupyter/server_ext/model.py``, and the wire's structs in them, define what
REST and the stream send. ``tests/tooling/test_typescript_types.py`` fails if the written file
differs.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import NODEFAULT, Struct, to_builtins
from msgspec import inspect as types

from kiwi_jupyter.server_ext import model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FILE: Final = Path(__file__).parents[1] / "labextension/src/model/types.ts"

ROOTS: Final = (model.State, model.Message, model.BroughtBack, model.Story)
"""The structs that TypeScript reads; they refer to all others."""

PARTS_OF_STRUCTS: Final = {
    "GpuDelta.set": "Partial<Omit<IGpu, 'sessions' | 'history'>>",
    "GpuDelta.sessions": "Readonly<Record<string, Partial<ISession>>>",
}
"""Fields that hold some fields of another struct: a ``dict`` in Python."""

WITH_DEFAULTS: Final = ("IGpu", "IMemory", "IScheduler", "ISession", "IWaiter")
"""The interfaces whose objects ``labextension/stories/make.ts`` makes."""

HEADER: Final = """\
/**
 * The types of the server extension's REST interface and stream (docs/rest.md).
 *
 * Written by packaging/typescript_types.py from kiwi_jupyter/server_ext/model.py: do not edit.
 * Times ending in `_at` or `_since` are Unix seconds on the *server's* clock; `_s` are durations
 * in seconds; `_bytes` are bytes. Names are the wire's, so that nothing has to be translated.
 */
"""
WIDTH: Final = 90


def written() -> str:
    """Return the whole file."""
    found: dict[str, str] = {}
    for root in types.multi_type_info(ROOTS):
        _reach(root, found)
    messages = types.type_info(model.Message)
    found["StreamMessage"] = f"export type StreamMessage = {_typed(messages)};\n"
    return "\n".join([HEADER, *found.values()])


def _reach(of: types.Type, found: dict[str, str]) -> None:
    """Add the structs inside ``of`` to ``found``, by name, and then ``of`` itself."""
    if isinstance(of, types.StructType):
        if of.cls.__name__ not in found:
            for field in of.fields:
                _reach(field.type, found)
            found[of.cls.__name__] = "".join(_interface(of))
    elif isinstance(of, types.EnumType):
        found.setdefault(of.cls.__name__, f"export type {of.cls.__name__} = {_values(of)};\n")
    else:
        for part in _parts(of):
            _reach(part, found)


def _parts(of: types.Type) -> Iterable[types.Type]:
    if isinstance(of, types.Metadata):
        return (of.type,)
    if isinstance(of, types.UnionType):
        return of.types
    if isinstance(of, types.ListType):
        return (of.item_type,)
    if isinstance(of, types.DictType):
        return (of.value_type,)
    return ()


def _interface(of: types.StructType) -> Iterator[str]:
    yield _comment(vars(of.cls).get("__doc__"), "")
    yield f"export interface {_name(of)} {{\n"
    if of.tag_field is not None:
        yield f"  readonly {of.tag_field}: '{of.tag}';\n"
    comments = field_docstrings(of.cls)
    for field in of.fields:
        yield _comment(comments.get(field.name, ""), "  ")
        yield f"  readonly {_field(of, field)};\n"
    yield "}\n"
    if _name(of) in WITH_DEFAULTS:
        yield _defaults(of)


def _defaults(of: types.StructType) -> str:
    """Return the optional fields, each with the value that an older daemon means by not sending it.
    For stories and tests, which make such objects."""
    lines = []
    for field in of.fields:
        if not field.required:
            made = field.default_factory is not NODEFAULT
            value = to_builtins(field.default_factory() if made else field.default)
            lines.append(f"  {field.encode_name}: {_literal(value)}")
    fields = ",\n".join(lines)
    name = _name(of)[1:].upper()
    return f"\nexport const {name}_DEFAULTS = {{\n{fields}\n}} as const;\n"


def _literal(value: object) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, dict):
        parts = [f"{key}: {_literal(one)}" for key, one in value.items()]
        return f"{{ {', '.join(parts)} }}" if parts else "{}"
    return json.dumps(value)


def _field(of: types.StructType, field: types.Field) -> str:
    if words := PARTS_OF_STRUCTS.get(f"{of.cls.__name__}.{field.name}"):
        return f"{field.encode_name}?: {words}"
    if of.cls.__struct_config__.omit_defaults and field.default is None:
        return f"{field.encode_name}?: {_typed(field.type).removesuffix(' | null')}"
    return f"{field.encode_name}: {_typed(field.type)}"


def _typed(of: types.Type) -> str:
    """Return the TypeScript type. Raises ``KeyError`` for a type that is not used yet."""
    if isinstance(of, types.Metadata):
        return _typed(of.type)
    if isinstance(of, types.StructType):
        return _name(of)
    if isinstance(of, types.EnumType):
        return of.cls.__name__
    if isinstance(of, types.LiteralType):
        return _values(of)
    if isinstance(of, types.UnionType):
        return " | ".join(map(_typed, of.types))
    if isinstance(of, types.ListType):
        item = _typed(of.item_type)
        return f"readonly {f'({item})' if '|' in item else item}[]"
    if isinstance(of, types.DictType):
        return f"Readonly<Record<string, {_typed(of.value_type)}>>"
    return _PLAIN[type(of)]


_PLAIN: Final[dict[type[types.Type], str]] = {
    types.NoneType: "null",
    types.BoolType: "boolean",
    types.IntType: "number",
    types.FloatType: "number",
    types.StrType: "string",
}


def _values(of: types.EnumType | types.LiteralType) -> str:
    values = [one.value for one in of.cls] if isinstance(of, types.EnumType) else of.values
    return " | ".join(f"'{value}'" for value in values)


def _name(of: types.StructType) -> str:
    """Return the name of an interface as JupyterLab's sources write it."""
    return f"I{of.cls.__name__.removesuffix('Status')}"


def _comment(text: str | None, indent: str) -> str:
    if not text:
        return ""
    text = " ".join(text.replace("``None``", "null").replace("``", "`").split())
    if len(indent + text) + 7 <= WIDTH:
        return f"{indent}/** {text} */\n"
    start = f"{indent} * "
    lines = textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=start)
    return f"{indent}/**\n{lines}\n{indent} */\n"


def field_docstrings(of: type) -> dict[str, str]:
    """Return the string below each field of a class and of its bases, by the field's name."""
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if not issubclass(base, Struct) or base is Struct:
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, note in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(note, ast.Expr)
                and isinstance(note.value, ast.Constant)
            ):
                found[field.target.id] = inspect.cleandoc(str(note.value.value))
    return found


if __name__ == "__main__":
    FILE.write_text(written())
