"""Look at the statements of a cell in their order, until one plainly goes for the GPU or the time
is over.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import stat
import sys
import time
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight.libraries import (
    CPU_LIBRARIES,
    DEVICE_WORDS,
    PARTS,
    QUIET_ATTRIBUTES,
    TO_GPU,
    Libraries,
)
from kiwi_jupyter.kernel.foresight.values import (
    DEPTH_MAX,
    Values,
    held,
    is_container,
    is_module,
    is_plain,
    method,
    module_of,
    name_of,
    names_of,
    origin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

WITHIN_NS: Final = 2_000_000
"""Longest look at a cell, in processor time. What is not known by then is not foreseen."""

WAIT_MAX_NS: Final = 100_000_000
"""The same on the clock: a busy machine, a slow file system."""

TEXT_MAX: Final = 20_000
"""Most characters of a cell whose words are looked at first."""

CODE_MAX: Final = 6_000
"""Most characters of a magic's body or of a script: IPython takes a millisecond for so much."""

NOTHING: Final = (
    "nothing in it goes for the GPU; if it does all the same, it waits at its first call"
)
NO_TIME: Final = (
    "nothing in it goes for the GPU as far as Kiwi looked in two milliseconds; if it does all the "
    "same, it waits at its first call"
)

_RUN_PYTHON: Final = frozenset({"time", "timeit", "capture", "prun", "memit", "mprun", "lprun"})
"""Magics whose line and body are Python."""

_QUIET_BUILTINS: Final = frozenset(
    "isinstance issubclass type id len hasattr callable getattr del dir vars help range".split()
)
"""Builtins that tell about an object without using the GPU that it is on."""

_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WORD: Final = re.compile(r"[^\W\d]\w*")
_OPTIONS: Final = re.compile(r"\s*(-\w+(\s+\d+)?\s+)*")
_LOOKS: Final = PARTS["torch.cuda"]


@dataclass(frozen=True)
class Foreseen:
    """``first_statement`` is the index of the first top-level statement that goes for the GPU;
    ``why`` names the words in it, with the line. For a cell that does not: 0, and why it runs at
    once."""

    gpu: bool
    why: str
    first_statement: int = 0


class Forecaster:
    """Foresees for one kernel. ``transform`` makes Python of what IPython adds to it."""

    def __init__(
        self,
        libraries: Libraries | None = None,
        transform: Callable[[str], str] = lambda code: code,
        within_ns: int = WITHIN_NS,
    ) -> None:
        self.libraries = libraries or Libraries()
        self._transform = transform
        self._within_ns = within_ns

    def foresee(
        self, tree: ast.Module, space: Mapping[str, Any], text: str | None = None
    ) -> Foreseen:
        """Return whether a cell that is about to run in the namespace ``space`` goes for the GPU.
        Does not change ``tree``, and runs no code of the user's. ``text``: what ``tree`` was parsed
        from, if that is certain; it is only for speed."""
        if text is not None and self._says_nothing(text, space):
            return Foreseen(False, NOTHING)
        look = _Look(self.libraries, self._transform, space, self._within_ns)
        try:
            for index, statement in enumerate(tree.body):
                if why := look.statement(statement):
                    return Foreseen(True, f"line {look.line or statement.lineno}: {why}", index)
        except RecursionError:
            return Foreseen(False, NO_TIME)
        finally:
            on_time = look.on_time()
            look.forget()
        return Foreseen(False, NOTHING if on_time else NO_TIME)

    def _says_nothing(self, text: str, space: Mapping[str, Any]) -> bool:
        """Return whether the words of a cell are enough: no library for GPUs is loaded or named, or
        each name is new or means plain data."""
        if len(text) > TEXT_MAX:
            return False
        words = set(_WORD.findall(text))
        if not self.libraries.known.isdisjoint(words):
            return False
        if not self.libraries.any_loaded():
            return True
        if not words.isdisjoint(_SIGNALS):
            return False
        found = [space[word] for word in words if word in space]
        return all(_stays(one) or self._function_stays(one, space) for one in found)

    def _function_stays(self, value: Any, space: Mapping[str, Any]) -> bool:
        """Return whether a value is a function of the user's whose own words are enough."""
        if type(value) is not FunctionType or value.__globals__ is not space:
            return False
        if value.__closure__ or value.__defaults__ or value.__kwdefaults__:
            return False
        names, texts = _names_in(value.__code__)
        said = names | texts
        if not (self.libraries.known.isdisjoint(said) and said.isdisjoint(_SIGNALS)):
            return False
        return all(_stays(space[name]) for name in names if name in space)


FEW: Final = 64
"""A list that is no longer is looked through at a glance."""


def _stays(value: Any) -> bool:
    """Return whether a value is data, or a module of a library that stays on the CPU."""
    if is_plain(value):
        return True
    if (type(value) is list or type(value) is tuple) and len(value) <= FEW:
        return all(map(_is_row, value))
    if is_module(value):
        top = name_of(value).partition(".")[0]
        return top in CPU_LIBRARIES or top in sys.stdlib_module_names
    return module_of(type(value)) == "numpy"


def _is_row(value: Any) -> bool:
    return is_plain(value) or (
        type(value) is tuple and len(value) <= FEW and all(map(is_plain, value))
    )


_SIGNALS: Final = TO_GPU | DEVICE_WORDS | {"get_ipython", "exec", "eval"}


class _Look:
    """One look at one cell. It holds references to the user's objects until ``forget``."""

    def __init__(
        self,
        libraries: Libraries,
        transform: Callable[[str], str],
        space: Mapping[str, Any],
        within_ns: int,
    ) -> None:
        self._libraries = libraries
        self._transform = transform
        self._space = space
        self._ends_ns = time.thread_time_ns() + within_ns
        self._late_ns = time.monotonic_ns() + WAIT_MAX_NS
        self._over = False
        self._values = Values(libraries, self.on_time)
        self._imported: dict[str, str] = {}
        """Names that the cell has imported, with the full names of what they mean."""
        self._defined: dict[str, ast.AST] = {}
        """Functions and classes that the cell has defined; their bodies run when they are
        called."""
        self._bound: dict[str, list[ast.expr | None]] = {}
        """Names that the cell has bound, or may have, and to what; ``None``: that is not known."""
        self._followed: set[int] = set()
        self.line = 0
        """The line of what was found."""

    def on_time(self) -> bool:
        if not self._over:
            late = time.monotonic_ns() > self._late_ns
            self._over = late or time.thread_time_ns() > self._ends_ns
        return not self._over

    def forget(self) -> None:
        self._space = {}
        del self._values

    def statement(self, node: ast.stmt, depth: int = 0) -> str:
        """Return why a statement goes for the GPU, in words; "": it does not, or it is not known in
        time."""
        for found in self._parts(node):
            if not self.on_time():
                return ""
            if why := self._judge(found, depth):
                self.line = self.line or getattr(found, "lineno", 0)
                return why
        return ""

    # --- what runs of a statement

    def _parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the expressions that run when ``node`` does, outermost first, without those that
        only name something."""
        waiting: list[ast.AST] = [node]
        while waiting:
            one = waiting.pop()
            if isinstance(one, (ast.Import, ast.ImportFrom)):
                self._import(one)
                continue
            if isinstance(one, _DEFINITIONS):
                self._bind(one.name, None)
                self._defined[one.name] = one
                waiting += self._of_definition(one)
                continue
            if isinstance(one, ast.Assign):
                waiting += [*map(_Targets, [one]), *([] if _is_name(one) else [one.value])]
                continue
            if isinstance(one, _Targets):
                waiting += self._bind_targets(one.of)
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

    def _of_definition(self, node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.ClassDef):
            inside = [one for one in node.body if not isinstance(one, _DEFINITIONS)]
            return [*node.decorator_list, *inside]
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        defaults = [one for one in (*node.args.defaults, *node.args.kw_defaults) if one is not None]
        return [*node.decorator_list, *defaults]

    def _inside(self, node: ast.AST) -> Iterable[ast.AST]:
        """Return what runs inside ``node``, but not what is only looked at or given another
        name."""
        if isinstance(node, ast.Attribute):
            base, _ = _chain(node)
            if isinstance(base, ast.Name):
                return ()  # judged as a whole
            return (base,)
        if isinstance(node, ast.Call):
            return self._inside_call(node)
        if isinstance(node, ast.Compare) and all(
            isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops
        ):
            return ()
        if type(node) in _ORDER:
            return _ORDER[type(node)](node)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            into = node.value
            if isinstance(into, ast.Name) and is_container(self._space.get(into.id)):
                return (node.slice,)  # something is put into a list, or taken out
        return ast.iter_child_nodes(node)

    def _inside_call(self, node: ast.Call) -> Iterable[ast.AST]:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        base, chain = _chain(node.func)
        if isinstance(base, ast.Name):
            if not chain and base.id in _QUIET_BUILTINS and base.id not in self._space:
                return [one for one in arguments if not isinstance(one, ast.Name)]
            return arguments  # the function itself is judged with the call
        return [node.func, *arguments]

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self._imported[alias.asname or top] = alias.name if alias.asname else top
        elif node.module and not node.level:
            for alias in node.names:
                self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _bind_targets(self, node: ast.Assign) -> list[ast.AST]:
        """Note what an assignment binds; return what of its targets runs."""
        inside: list[ast.AST] = []
        for target in node.targets:
            if not isinstance(target, ast.Name):
                inside.append(target)
                continue
            self._bind(target.id, node.value)
            if isinstance(node.value, ast.Lambda):
                self._defined[target.id] = node.value
        return inside

    def _bind(self, name: str, to: ast.expr | None) -> None:
        self._imported.pop(name, None)
        self._defined.pop(name, None)
        self._bound.setdefault(name, []).append(to)

    # --- judging

    def _judge(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._used(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base, chain = _chain(node)
            quiet = chain[0] in QUIET_ATTRIBUTES
            return self._used(base.id, chain) if isinstance(base, ast.Name) and not quiet else ""
        return ""

    def _used(self, name: str, chain: tuple[str, ...] = ()) -> str:
        """Judge using the value of a name, or of what lies in it."""
        name = self._real(name)
        if name in self._imported or name in self._bound or name not in self._space:
            return ""
        value = self._space[name]
        for attribute in chain:  # ``job.steps`` is a number, whatever else the job holds
            inside = held(value)
            if attribute not in inside:
                break
            value = inside[attribute]
        why = self._values.holds(value)
        return f"`{'.'.join((name, *chain))}`: {why}" if why else ""

    def _real(self, name: str) -> str:
        """Return the name that ``name`` is another one for: ``m = model``."""
        for _ in range(DEPTH_MAX):
            last = (self._bound.get(name) or [None])[-1]
            if not isinstance(last, ast.Name):
                break
            name = last.id
        return name

    def _call(self, node: ast.Call, depth: int) -> str:
        if why := self._goes_to_device(node):
            return why
        base, chain = _chain(node.func)
        if not isinstance(base, ast.Name):
            return self._magic(node, depth)
        said = ".".join((base.id, *chain))
        if (path := self._imported.get(base.id)) is not None:
            return self._library(".".join((path, *chain)), said)
        if not chain and base.id in self._defined:
            return self._in_definition(self._defined[base.id], said, depth)
        name = self._real(base.id)
        if name in self._bound or name not in self._space:
            return ""
        return self._existing(self._space[name], chain, said, depth)

    def _library(self, path: str, said: str) -> str:
        return f"`{said}(`" if self._libraries.call_uses_gpu(path) else ""

    def _existing(self, value: Any, chain: tuple[str, ...], said: str, depth: int) -> str:
        """Judge calling ``value``, or something in it."""
        inside = list(chain)
        while inside and is_module(value):
            if self._libraries.call_uses_gpu(".".join((name_of(value), *inside))):
                return f"`{said}(`"
            value = names_of(value).get(inside.pop(0))
        if inside and is_container(value):
            return ""  # ``losses.append(…)``: what is put in is judged by itself
        owner = value if inside else None
        if inside:
            quiet = inside[0] in QUIET_ATTRIBUTES  # ``model.train()``, but not ``trainer.train()``
            if why := self._values.works(value) if quiet else self._values.holds(value):
                return f"`{said}(`: {why}"
            value = method(value, inside[0])
        elif why := self._values.holds(value):
            return f"`{said}(`: {why}"
        module, name = origin(value)
        if module and self._libraries.call_uses_gpu(f"{module}.{name}"):
            return f"`{said}(`"
        function = self._values.code_of(value)
        return "" if function is None else self._in_function(function, said, depth, owner)

    # --- to the device

    def _goes_to_device(self, node: ast.Call) -> str:
        """Judge ``x.to(device)``, ``x.cuda()`` and ``device="cuda"``, where PyTorch or something on
        top of it is loaded or imported."""
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        where = [keyword for keyword in node.keywords if keyword.arg in DEVICE_WORDS]
        if attribute not in TO_GPU and not where:
            return ""
        if not self._libraries.torch_like_loaded() and not self._imports_torch():
            return ""
        if attribute == "cuda":
            return "`.cuda(`"
        for keyword in where:
            if self._is_gpu(keyword.value):
                return f"`{keyword.arg}={ast.unparse(keyword.value)}`"
        if attribute in TO_GPU and node.args and self._is_gpu(node.args[0]):
            return f"`.{attribute}({ast.unparse(node.args[0])})`"
        return ""

    def _imports_torch(self) -> bool:
        return any(
            path.partition(".")[0] in self._libraries.on_request for path in self._imported.values()
        )

    def _is_gpu(self, node: ast.expr | None, depth: int = 0) -> bool:
        """Return whether an argument that says where to go may name a GPU. What is not known may:
        a parameter, a variable of a loop."""
        if node is None or depth > DEPTH_MAX:
            return True
        if isinstance(node, ast.Name):
            if node.id in self._bound:
                return any(self._is_gpu(one, depth + 1) for one in self._bound[node.id])
            return self._values.may_be_gpu(self._space.get(node.id))
        if isinstance(node, ast.Constant):
            return self._values.may_be_gpu(node.value)
        if isinstance(node, ast.Call):  # torch.device("cpu")
            return not node.args or any(self._is_gpu(one, depth + 1) for one in node.args)
        if isinstance(node, ast.IfExp):
            return self._is_gpu(node.body, depth + 1) or self._is_gpu(node.orelse, depth + 1)
        if isinstance(node, ast.Attribute):
            return self._attribute_is_gpu(node)
        return isinstance(node, (ast.JoinedStr, ast.Subscript))

    def _attribute_is_gpu(self, node: ast.Attribute) -> bool:
        """Judge ``.to(x.device)``, which goes where ``x`` is, and ``.to(torch.float16)``."""
        base, chain = _chain(node)
        if not isinstance(base, ast.Name) or chain[-1] != "device":
            return False
        value = self._space.get(base.id)
        return bool(self._values.holds(value)) if base.id in self._space else True

    # --- following

    def _in_definition(self, node: ast.AST, said: str, depth: int) -> str:
        """Judge what a function or class of this cell does when it is called."""
        if depth >= DEPTH_MAX or id(node) in self._followed:
            return ""
        self._followed.add(id(node))
        outer, self._bound = self._bound, {**self._bound}
        for argument in ast.walk(node.args) if hasattr(node, "args") else ():
            if isinstance(argument, ast.arg):
                self._bound[argument.arg] = [None]
        try:
            why = self._in_body(node, depth)
        finally:
            self._bound = outer
        return f"`{said}(` reaches {why}" if why else ""

    def _in_body(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Lambda):
            body: list[ast.stmt] = [ast.copy_location(ast.Expr(node.body), node)]
        elif isinstance(node, ast.ClassDef):
            functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            body = next((one.body for one in functions if one.name == "__init__"), [])
        else:
            assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            body = node.body
        return next((w for one in body if (w := self.statement(one, depth + 1))), "")

    def _in_function(
        self, function: FunctionType, said: str, depth: int, owner: object = None
    ) -> str:
        """Judge what a function of the user's from an earlier cell does, by the names in its code.
        ``owner`` is the object whose method it is, and whose other methods it may call."""
        if depth >= DEPTH_MAX or id(function.__code__) in self._followed or not self.on_time():
            return ""
        self._followed.add(id(function.__code__))
        names, constants = _names_in(function.__code__)
        space = function.__globals__
        if why := self._device_words(names, constants, function, space):
            return f"`{said}(` says {why}"
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        for name in names:
            value = space.get(name)
            if value is None and owner is not None and name not in cells:
                value = method(owner, name)
            if name in cells:
                try:
                    value = cells[name].cell_contents
                except ValueError:
                    continue
            if why := self._reached(value, name, names, depth, owner):
                return f"`{said}(` reaches {why}"
        return ""

    def _device_words(
        self, names: set[str], constants: set[str], function: FunctionType, space: Mapping[str, Any]
    ) -> str:
        if not self._libraries.torch_like_loaded():
            return ""
        if "cuda" in names and _LOOKS.isdisjoint(names):
            return "`cuda`"
        if any(text.startswith("cuda") for text in constants) and _LOOKS.isdisjoint(names):
            return '`"cuda"`'
        if not names & TO_GPU and "device" not in constants:
            return ""
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        device = space.get("device")
        if "device" in arguments or ("device" in names and self._values.may_be_gpu(device)):
            return "`.to(device)`"
        return ""

    def _reached(self, value: Any, name: str, names: set[str], depth: int, owner: object) -> str:
        if is_plain(value) or not self.on_time():
            return ""
        if is_module(value):
            path, inside = name_of(value), names_of(value)
            uses = (
                one in inside
                and not (is_plain(inside[one]) or is_module(inside[one]))
                and self._libraries.call_uses_gpu(f"{path}.{one}")
                for one in names
            )
            return f"`{name}`" if any(uses) else ""
        if why := self._values.holds(value):
            return f"`{name}`: {why}"
        module, own = origin(value)
        if module and self._libraries.call_uses_gpu(f"{module}.{own}"):
            return f"`{name}`"
        function = self._values.code_of(value)
        return "" if function is None else self._in_function(function, name, depth + 1, owner)

    # --- magics

    def _magic(self, node: ast.Call, depth: int) -> str:
        """Judge ``get_ipython().run_line_magic("time", "…")`` and its like, which IPython makes of
        magics. Programs that a cell starts have a gate of their own."""
        words = [one.value for one in node.args if isinstance(one, ast.Constant)]
        function = node.func
        if (
            depth >= DEPTH_MAX
            or not isinstance(function, ast.Attribute)
            or function.attr not in ("run_line_magic", "run_cell_magic")
            or not all(isinstance(word, str) for word in words)
            or not words
        ):
            return ""
        name, codes = str(words[0]), [str(word) for word in words[1:]]
        if name == "run":
            return self._script(codes[0] if codes else "", depth)
        if name not in _RUN_PYTHON:
            return ""
        first = _OPTIONS.sub("", codes[0], count=1) if codes else ""
        return next((w for one in (first, *codes[1:]) if (w := self._code(one, depth))), "")

    def _script(self, line: str, depth: int) -> str:
        path = next((word.strip("'\"") for word in line.split() if not word.startswith("-")), "")
        path = os.path.expanduser(path if path.endswith(".py") else path + ".py")
        try:
            about = os.stat(path)
            if not stat.S_ISREG(about.st_mode) or about.st_size > CODE_MAX:
                return ""
            with open(path, encoding="utf-8") as file:
                why = self._code(file.read(), depth)
        except (OSError, UnicodeDecodeError):
            return ""
        return f"`%run {path}` reaches {why}" if why else ""

    def _code(self, code: str, depth: int) -> str:
        if not code.strip() or len(code) > CODE_MAX or not self.on_time():
            return ""
        try:
            tree = ast.parse(self._transform(code))
        except Exception:  # noqa: BLE001 - input transformers are other people's code
            return ""
        return next((w for one in tree.body if (w := self.statement(one, depth + 1))), "")


def _chain(node: ast.expr) -> tuple[ast.expr, tuple[str, ...]]:
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


def _is_name(node: ast.Assign) -> bool:
    """Return whether an assignment only gives another name."""
    return isinstance(node.value, ast.Name)


def _names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names and the texts in a function's code, and in the functions inside it."""
    names, texts, waiting = set(code.co_freevars), set[str](), [code]
    while waiting:
        one = waiting.pop()
        names.update(one.co_names)
        for constant in one.co_consts:
            if type(constant) is str:
                texts.add(constant)
            elif type(constant) is CodeType:
                waiting.append(constant)
            elif type(constant) is tuple:
                texts.update(word for word in constant if type(word) is str)
    return names - set(vars(builtins)), texts
