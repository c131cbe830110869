"""The call that waits for the GPU, inserted into the tree of a cell before one of its statements.

It uses a name in ``builtins``, which survives ``%reset``.
"""

from __future__ import annotations

import ast
import inspect
from typing import Final

WAIT: Final = "__kiwi_wait__"
ASYNC_WAIT: Final = "__kiwi_async_wait__"

_ASYNC_NODES: Final = (ast.Await, ast.AsyncFor, ast.AsyncWith)


def insert_wait(node: ast.Module, at: int, token: int, *, awaited: bool) -> None:
    """Insert the call, with ``token``, before statement number ``at``."""
    call: ast.expr = ast.Call(
        func=ast.Name(id=ASYNC_WAIT if awaited else WAIT, ctx=ast.Load()),
        args=[ast.Constant(value=token)],
        keywords=[],
    )
    statement = ast.Expr(value=ast.Await(value=call) if awaited else call)
    line = node.body[at].lineno
    for part in ast.walk(statement):
        if isinstance(part, ast.expr | ast.stmt):
            part.lineno = part.end_lineno = line
            part.col_offset = part.end_col_offset = 0
    node.body.insert(at, statement)


def runs_as_coroutine(node: ast.Module) -> bool:
    """Return whether IPython runs this cell on the event loop if its ``autoawait`` is on. The rule
    is IPython's own.
    """
    if not any(_may_await(part) for part in ast.walk(node)):
        return False
    try:
        code = compile(node, "<kiwi>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _may_await(node: ast.AST) -> bool:
    return isinstance(node, _ASYNC_NODES) or (
        isinstance(node, ast.comprehension) and bool(node.is_async)
    )


def is_about_kiwi(node: ast.Module) -> bool:
    """Return whether this is a ``%kiwi`` line: ``%kiwi why`` is about the cell before it."""
    first = node.body[0]
    if len(node.body) != 1 or not isinstance(first, ast.Expr):
        return False
    call = first.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    name = call.args[0] if call.args else None
    is_kiwi = isinstance(name, ast.Constant) and name.value == "kiwi"
    return is_kiwi and call.func.attr == "run_line_magic"
