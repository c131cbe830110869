"""Which expressions run when a statement of a cell does, and what the cell has bound so far."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight.values import DEPTH_MAX, is_container

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_QUIET_BUILTINS: Final = frozenset(
    "isinstance issubclass type id len hasattr callable getattr del dir vars help range".split()
)
"""Builtins that tell about an object without using the GPU that it is on."""

_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Running:
    """The statements of one cell, in their order: ``parts`` yields what runs, and records what is
    bound by it."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.space = space
        self.imported: dict[str, str] = {}
        """Names that the cell has imported, with the full names of what they mean."""
        self.defined: dict[str, ast.AST] = {}
        """Functions and classes that the cell has defined; their bodies run when they are
        called."""
        self.bound: dict[str, list[ast.expr | None]] = {}
        """Names that the cell has bound, or may have, and to what; ``None``: that is not known."""

    def parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the expressions that run when ``node`` does, outermost first, without those that
        only name something."""
        waiting: list[ast.AST] = [node]
        while waiting:
            one = waiting.pop()
            if isinstance(one, ast.Import):
                for alias in one.names:
                    top = alias.name.partition(".")[0]
                    self.imported[alias.asname or top] = alias.name if alias.asname else top
                continue
            if isinstance(one, ast.ImportFrom):
                if one.module and not one.level:
                    for alias in one.names:
                        self.imported[alias.asname or alias.name] = f"{one.module}.{alias.name}"
                continue
            if isinstance(one, _DEFINITIONS):
                self._bind(one.name, None)
                self.defined[one.name] = one
                waiting += one.decorator_list
                if isinstance(one, ast.ClassDef):
                    waiting += [part for part in one.body if not isinstance(part, _DEFINITIONS)]
                else:
                    waiting += [*one.args.defaults, *filter(None, one.args.kw_defaults)]
                continue
            if isinstance(one, ast.Assign):
                # An assignment from a name only gives another name.
                named = isinstance(one.value, ast.Name)
                waiting += [_Targets(one)] if named else [_Targets(one), one.value]
                continue
            if isinstance(one, _Targets):
                for target in one.of.targets:
                    if not isinstance(target, ast.Name):
                        waiting.append(target)
                        continue
                    self._bind(target.id, one.of.value)
                    if isinstance(one.of.value, ast.Lambda):
                        self.defined[target.id] = one.of.value
                continue
            if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
                self._bind(one.id, None)
                continue
            if isinstance(one, ast.ExceptHandler) and one.name:
                self._bind(one.name, None)
            if isinstance(one, ast.Lambda):
                continue
            if isinstance(one, ast.AnnAssign):
                waiting += [part for part in (one.value, one.target) if part is not None]
                continue
            yield one
            waiting += reversed(list(self._inside(one)))

    def _inside(self, node: ast.AST) -> Iterable[ast.AST]:
        """Return what runs inside ``node``, but not what is only looked at or given another
        name."""
        if isinstance(node, ast.Attribute):
            base, _ = chain_of(node)
            return () if isinstance(base, ast.Name) else (base,)  # of a name: judged as a whole
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            base, chain = chain_of(node.func)
            if not isinstance(base, ast.Name):
                return [node.func, *arguments]
            if not chain and base.id in _QUIET_BUILTINS and base.id not in self.space:
                return [one for one in arguments if not isinstance(one, ast.Name)]
            return arguments  # the function itself is judged with the call
        if isinstance(node, ast.Compare) and all(
            isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops
        ):
            return ()
        if type(node) in _ORDER:
            return _ORDER[type(node)](node)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            into = node.value
            if isinstance(into, ast.Name) and is_container(self.space.get(into.id)):
                return (node.slice,)  # something is put into a list, or taken out
        return ast.iter_child_nodes(node)

    def _bind(self, name: str, to: ast.expr | None) -> None:
        self.imported.pop(name, None)
        self.defined.pop(name, None)
        self.bound.setdefault(name, []).append(to)

    def real(self, name: str) -> str:
        """Return the name that ``name`` is another one for: ``m = model``."""
        for _ in range(DEPTH_MAX):
            last = (self.bound.get(name) or [None])[-1]
            if not isinstance(last, ast.Name):
                break
            name = last.id
        return name


def chain_of(node: ast.expr) -> tuple[ast.expr, tuple[str, ...]]:
    """Return the expression whose attributes ``node`` reads, and these attributes: of ``a.b.c`` the
    name ``a`` and ``("b", "c")``."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    return node, tuple(reversed(chain))


def _of_augmented(node: ast.AugAssign) -> Iterable[ast.AST]:
    if not isinstance(node.target, ast.Name):
        return (node.value, node.target)
    changed = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
    return (changed, node.value, node.target)


_ORDER: Final[dict[type[ast.AST], Callable[[Any], Iterable[ast.AST]]]] = {
    ast.AugAssign: _of_augmented,
    **dict.fromkeys(
        (ast.For, ast.AsyncFor), lambda node: (node.iter, node.target, *node.body, *node.orelse)
    ),
    **dict.fromkeys(
        (ast.ListComp, ast.SetComp, ast.GeneratorExp), lambda node: (*node.generators, node.elt)
    ),
    ast.DictComp: lambda node: (*node.generators, node.key, node.value),
    ast.comprehension: lambda node: (node.iter, node.target, *node.ifs),
}
"""What runs inside a node, in the order in which names are bound."""


class _Targets(ast.AST):
    """What an assignment binds, after its value has been looked at."""

    def __init__(self, of: ast.Assign) -> None:
        super().__init__()
        self.of = of
