"""The scopes of Python names, as far as reading a cell needs them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kiwi_jupyter.kernel.analysis.needs import Chain

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Scope:
    """The names bound in one function, comprehension or class body, and what encloses it."""

    def __init__(
        self,
        names: set[str],
        parent: Scope | None,
        *,
        is_class: bool = False,
        declared_global: frozenset[str] = frozenset(),
        aliases: dict[str, tuple[str, Chain]] | None = None,
    ) -> None:
        self._names = names
        self._parent = parent
        self._is_class = is_class
        self._declared_global = declared_global
        self._aliases = aliases or {}

    @classmethod
    def top(cls) -> Scope:
        """Return the scope of the cell itself: all its names are global."""
        return _TOP

    @classmethod
    def of_function(cls, node: ast.FunctionDef | ast.AsyncFunctionDef, parent: Scope) -> Scope:
        own = list(_own_nodes(node.body))
        declared, nonlocals = _declarations(own)
        names = (_parameters(node.args) | _bound(own)) - declared - nonlocals
        aliases = {n: a for n, a in imports_in(own).items() if n in names}
        return cls(names, parent, declared_global=declared, aliases=aliases)

    @classmethod
    def of_arguments(cls, arguments: ast.arguments, parent: Scope) -> Scope:
        return cls(_parameters(arguments), parent)

    @classmethod
    def of_class(cls, node: ast.ClassDef, parent: Scope) -> Scope:
        own = list(_own_nodes(node.body))
        declared, _ = _declarations(own)
        names = _bound(own) - declared
        aliases = {n: a for n, a in imports_in(own).items() if n in names}
        return cls(names, parent, is_class=True, declared_global=declared, aliases=aliases)

    def _owner(self, name: str) -> Scope | None:
        scope: Scope | None = self
        first = True
        while scope is not None:
            if name in scope._declared_global:
                return None
            if name in scope._names and (first or not scope._is_class):
                return scope
            scope, first = scope._parent, False
        return None

    def is_global(self, name: str) -> bool:
        return self._parent is None or self._owner(name) is None

    def in_class(self, name: str) -> bool:
        """Return whether this is a class body that binds ``name``."""
        return self._is_class and name in self._names

    def alias(self, name: str) -> tuple[str, Chain] | None:
        """Return the module (and the part of it) that an import in a function bound to ``name``."""
        if self._parent is None:
            return None
        owner = self._owner(name)
        return owner._aliases.get(name) if owner is not None else None


_TOP = Scope(set(), None)


def _parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {argument.arg for argument in every}


def _own_nodes(nodes: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Yield every node that belongs to this scope, and only the outermost node of nested scopes."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, _OWN_SCOPE):
            continue
        if isinstance(node, _COMPREHENSIONS):
            # Targets are its own; a walrus inside binds in the enclosing scope.
            stack.extend(n for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
            continue
        stack.extend(ast.iter_child_nodes(node))


def bound_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that ``nodes`` bind or delete in their own scope."""
    return _bound(_own_nodes(nodes))


def _bound(own: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in own:
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {a.asname or a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return names


def _declarations(own: Iterable[ast.AST]) -> tuple[frozenset[str], frozenset[str]]:
    global_: set[str] = set()
    nonlocal_: set[str] = set()
    for node in own:
        if isinstance(node, ast.Global):
            global_.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            nonlocal_.update(node.names)
    return frozenset(global_), frozenset(nonlocal_)


def imports_in(own: Iterable[ast.AST]) -> dict[str, tuple[str, Chain]]:
    """Return the module, and the part of it, that imports bind to each name; relative imports are
    left out.
    """
    found: dict[str, tuple[str, Chain]] = {}

    def note(name: str, alias: tuple[str, Chain]) -> None:
        if found.setdefault(name, alias) != alias:
            found[name] = ("", ())  # two imports under one name: either may be meant

    for node in own:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                note(alias.asname or top, (alias.name if alias.asname else top, ()))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                note(alias.asname or alias.name, (node.module, (alias.name,)))
    return found
