"""Read from the syntax tree what a statement of a cell reaches."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from kiwi_jupyter.kernel.analysis.needs import Chain, CodeNeeds, MagicCall
from kiwi_jupyter.kernel.analysis.scopes import Scope, bound_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_LEAVES: Final = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


def needs_of(nodes: Iterable[ast.AST]) -> CodeNeeds:
    """Return what ``nodes`` reach at the top level of a cell, including function bodies."""
    reader = _Reader()
    for node in nodes:
        reader.visit(node, Scope.top())
    return reader.needs


def chain_of(node: ast.expr) -> tuple[ast.expr, Chain]:
    """Return the expression whose attributes ``node`` reads, and these attributes: of ``a.b.c`` the
    name ``a`` and ``("b", "c")``.
    """
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    return node, tuple(reversed(chain))


def split_definition(node: ast.stmt) -> tuple[CodeNeeds, CodeNeeds] | None:
    """Return what defining a plain ``def`` or ``class`` at top level reaches, and what using it
    reaches.

    Return ``None`` if the definition itself may run the body: decorators, keywords of a class.
    """
    if isinstance(node, FunctionNode) and not node.decorator_list:
        now, later = _Reader(), _Reader()
        now.signature(node, Scope.top())
        later.body_of(node, Scope.top())
        return now.needs, later.needs
    if isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
        return _split_class(node)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        now, later = _Reader(), _Reader()
        now.defaults(node.value.args, Scope.top())
        for target in node.targets:
            now.visit(target, Scope.top())
        later.visit(node.value.body, Scope.of_arguments(node.value.args, Scope.top()))
        return now.needs, later.needs
    return None


def _split_class(node: ast.ClassDef) -> tuple[CodeNeeds, CodeNeeds]:
    now, later = _Reader(), _Reader()
    now.needs.stores.setdefault(node.name, node.lineno)
    for base in node.bases:
        now.mention(base, Scope.top(), now.needs.bases)
        later.visit(base, Scope.top())
    inner = Scope.of_class(node, Scope.top())
    for child in node.body:
        if isinstance(child, FunctionNode) and not child.decorator_list:
            now.signature(child, inner)
            later.body_of(child, inner)
        else:
            now.visit(child, inner)
    return now.needs, later.needs


class _Reader:
    def __init__(self) -> None:
        self.needs = CodeNeeds()

    def visit(self, node: ast.AST, scope: Scope) -> None:
        handler = _HANDLERS.get(type(node))
        if handler is not None:
            handler(self, node, scope)
        else:
            self.children(node, scope)

    def children(self, node: ast.AST, scope: Scope) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                for item in value:
                    if isinstance(item, ast.AST):
                        self.visit(item, scope)
            elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                self.visit(value, scope)

    # --- names and attributes

    def name(self, node: ast.Name, scope: Scope) -> None:
        if isinstance(node.ctx, ast.Load):
            self.load(node.id, (), node.lineno, scope)
        elif scope.is_global(node.id):
            self.needs.stores.setdefault(node.id, node.lineno)

    def load(self, name: str, chain: Chain, line: int, scope: Scope) -> None:
        alias = scope.alias(name)
        if alias is not None:
            self.needs.modules.setdefault((alias[0], alias[1] + chain), line)
        elif scope.is_global(name):
            self.needs.read(name, chain, line)
        else:
            for attribute in chain:
                self.needs.attributes.setdefault(attribute, line)
            if scope.in_class(name):  # a class body may read the global of that name first
                self.needs.read(name, chain, line)

    def attribute(self, node: ast.Attribute, scope: Scope) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.patch(node.value, node.attr, scope)
            self.visit(node.value, scope)
            return
        base, chain = chain_of(node)
        if isinstance(base, ast.Name):
            self.load(base.id, chain, node.lineno, scope)
            return
        if not self._formats_constant(node):
            for attribute in reversed(chain):
                self.needs.attributes.setdefault(attribute, node.lineno)
        self.visit(base, scope)

    def patch(self, target: ast.expr, attribute: str, scope: Scope) -> None:
        """Note ``target.attribute = …``, which matters if ``target`` is a library's class."""
        base, chain = chain_of(target)
        if isinstance(base, ast.Name) and scope.is_global(base.id):
            self.needs.patches.setdefault((base.id, chain, attribute), base.lineno)

    def _formats_constant(self, node: ast.Attribute) -> bool:
        """Return whether this is ``"…".format``: the constant shows which attributes it reads."""
        if node.attr != "format" or not isinstance(node.value, ast.Constant):
            return False
        return isinstance(node.value.value, str) and "__" not in node.value.value

    # --- calls

    def call(self, node: ast.Call, scope: Scope) -> None:
        function = node.func
        magic = _magic_call(node)
        if magic is not None and scope.is_global("get_ipython"):
            self.needs.magics.append(magic)
            return
        if (
            isinstance(function, ast.Name)
            and function.id == "getattr"
            and scope.is_global("getattr")
            and self._constant_attribute(node)
        ):
            self.needs.read("getattr", ("(constant)",), node.lineno)
            for argument in node.args:
                self.visit(argument, scope)
            return
        if isinstance(function, ast.Name) and function.id == "setattr" and len(node.args) == 3:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                self.patch(node.args[0], name.value, scope)
        self._called(node, scope)
        for argument in node.args:
            self.visit(argument, scope)
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle":
                self.needs.doors.append((node.lineno, "allow_pickle: pickles run what they hold"))
            self.visit(keyword.value, scope)

    def _called(self, node: ast.Call, scope: Scope) -> None:
        """Return the called function itself."""
        function = node.func
        if isinstance(function, ast.Attribute) and _plain_load(node):
            assert isinstance(function.value, ast.Name)
            self.load(function.value.id, (LOADS,), node.lineno, scope)
        elif isinstance(function, ast.Attribute) and self._harmless_query(node):
            self.visit(function.value, scope)
        else:
            self.visit(function, scope)

    def _constant_attribute(self, node: ast.Call) -> bool:
        """Record the name in ``getattr(x, "name"[, default])``. Then ``x`` is not a bare module,
        because reading one is a separate door.
        """
        if len(node.args) < 2 or node.keywords or not isinstance(node.args[1], ast.Constant):
            return False
        name = node.args[1].value
        if not isinstance(name, str):
            return False
        self.needs.attributes.setdefault(name, node.lineno)
        return True

    def _harmless_query(self, node: ast.Call) -> bool:
        """Return whether this is ``frame.query("a > 1")``: only ``@`` reaches names outside."""
        function = node.func
        if not isinstance(function, ast.Attribute) or function.attr not in ("query", "eval"):
            return False
        if len(node.args) != 1 or node.keywords or not isinstance(node.args[0], ast.Constant):
            return False
        text = node.args[0].value
        if not isinstance(text, str) or "@" in text or "__" in text:
            return False
        return not isinstance(function.value, ast.Name) or function.attr == "query"

    # --- definitions

    def signature(self, node: FunctionNode, scope: Scope) -> None:
        """Read the parts that run when the ``def`` itself runs."""
        if scope.is_global(node.name):
            self.needs.stores.setdefault(node.name, node.lineno)
        for decorator in node.decorator_list:
            self.visit(decorator, scope)
        self.defaults(node.args, scope)
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg) and argument.annotation is not None:
                self.annotation(argument.annotation, scope)
        if node.returns is not None:
            self.annotation(node.returns, scope)

    def defaults(self, arguments: ast.arguments, scope: Scope) -> None:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.visit(default, scope)

    def annotation(self, node: ast.expr, scope: Scope) -> None:
        """Read an annotation, which names classes and does no more with them: ``x: torch.Tensor |
        None``.
        """
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            self.annotation(node.left, scope)
            self.annotation(node.right, scope)
        elif isinstance(node, ast.Subscript):
            self.visit(node.value, scope)
            self.annotation(node.slice, scope)
        elif isinstance(node, ast.Tuple | ast.List):
            for element in node.elts:
                self.annotation(element, scope)
        else:
            self.mention(node, scope, self.needs.mentions)

    def mention(self, node: ast.expr, scope: Scope, into: dict[tuple[str, Chain], int]) -> None:
        base, chain = chain_of(node)
        if isinstance(base, ast.Name) and scope.is_global(base.id):
            into.setdefault((base.id, chain), node.lineno)
        else:
            self.visit(node, scope)

    def body_of(self, node: FunctionNode, scope: Scope) -> None:
        inner = Scope.of_function(node, scope)
        for statement in node.body:
            self.visit(statement, inner)

    def function(self, node: FunctionNode, scope: Scope) -> None:
        self.signature(node, scope)
        self.body_of(node, scope)

    def lambda_(self, node: ast.Lambda, scope: Scope) -> None:
        self.defaults(node.args, scope)
        self.visit(node.body, Scope.of_arguments(node.args, scope))

    def class_(self, node: ast.ClassDef, scope: Scope) -> None:
        if scope.is_global(node.name):
            self.needs.stores.setdefault(node.name, node.lineno)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part, scope)
        inner = Scope.of_class(node, scope)
        for statement in node.body:
            self.visit(statement, inner)

    def comprehension(self, node: ast.AST, scope: Scope) -> None:
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        names = set().union(*(bound_in([g.target]) for g in generators))
        inner = Scope(names, scope)
        self.children(node, inner)

    # --- statements

    def import_(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            self.needs.imports.setdefault(alias.name, node.lineno)
            bound = alias.asname or alias.name.partition(".")[0]
            if scope.is_global(bound):
                self.needs.stores.setdefault(bound, node.lineno)

    def import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        if node.level or node.module is None:
            self.needs.doors.append((node.lineno, "a relative import"))
            return
        self.needs.imports.setdefault(node.module, node.lineno)
        for alias in node.names:
            if alias.name == "*":
                self.needs.doors.append((node.lineno, "import *"))
                continue
            bound = alias.asname or alias.name
            if scope.is_global(bound):
                self.needs.stores.setdefault(bound, node.lineno)
            else:
                self.needs.modules.setdefault((node.module, (alias.name,)), node.lineno)

    def annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        self.annotation(node.annotation, scope)
        if node.value is not None:
            self.visit(node.value, scope)
        self.visit(node.target, scope)

    def augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        if isinstance(node.target, ast.Name):
            self.load(node.target.id, (), node.lineno, scope)
        self.children(node, scope)

    def handler(self, node: ast.ExceptHandler, scope: Scope) -> None:
        if node.name and scope.is_global(node.name):
            self.needs.stores.setdefault(node.name, node.lineno)
        self.children(node, scope)

    def pattern(self, node: ast.AST, scope: Scope) -> None:
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(name, str) and scope.is_global(name):
            self.needs.stores.setdefault(name, node.lineno)  # type: ignore[attr-defined]
        if isinstance(node, ast.MatchClass):
            for attribute in node.kwd_attrs:
                self.needs.attributes.setdefault(attribute, node.lineno)
        self.children(node, scope)


_HANDLERS: Final[dict[type[ast.AST], Callable[..., None]]] = {
    ast.Name: _Reader.name,
    ast.Attribute: _Reader.attribute,
    ast.Call: _Reader.call,
    ast.FunctionDef: _Reader.function,
    ast.AsyncFunctionDef: _Reader.function,
    ast.Lambda: _Reader.lambda_,
    ast.ClassDef: _Reader.class_,
    ast.ListComp: _Reader.comprehension,
    ast.SetComp: _Reader.comprehension,
    ast.DictComp: _Reader.comprehension,
    ast.GeneratorExp: _Reader.comprehension,
    ast.Import: _Reader.import_,
    ast.ImportFrom: _Reader.import_from,
    ast.AnnAssign: _Reader.annotated,
    ast.AugAssign: _Reader.augmented,
    ast.ExceptHandler: _Reader.handler,
    ast.MatchAs: _Reader.pattern,
    ast.MatchStar: _Reader.pattern,
    ast.MatchMapping: _Reader.pattern,
    ast.MatchClass: _Reader.pattern,
    ast.Constant: lambda _reader, _node, _scope: None,
}


LOADS: Final = "(load)"
"""The attribute ``load``, for calls in which numpy unpickles nothing."""


def _plain_load(node: ast.Call) -> bool:
    """Return whether this is ``np.load(path)`` without anything that may mean ``allow_pickle``."""
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr != "load":
        return False
    plain = len(node.args) <= 2 and not any(isinstance(a, ast.Starred) for a in node.args)
    named = all(keyword.arg in ("mmap_mode", "encoding") for keyword in node.keywords)
    return plain and named and isinstance(function.value, ast.Name)


_MAGIC_METHODS: Final = frozenset({"run_line_magic", "run_cell_magic", "system", "getoutput"})


def _magic_call(node: ast.Call) -> MagicCall | None:
    """Read ``get_ipython().run_line_magic("time", "f(x)")`` and the like, with constants only."""
    method = node.func
    if not isinstance(method, ast.Attribute) or method.attr not in _MAGIC_METHODS:
        return None
    shell = method.value
    if not isinstance(shell, ast.Call) or not isinstance(shell.func, ast.Name):
        return None
    if shell.func.id != "get_ipython" or node.keywords or shell.args or shell.keywords:
        return None
    texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
    words = tuple(text for text in texts if isinstance(text, str))
    return MagicCall(node.lineno, method.attr, words) if len(words) == len(node.args) else None
