"""One look at a cell: whether a statement plainly goes for the GPU, and by which words."""

from __future__ import annotations

import ast
import builtins
import os
import re
import stat
import time
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight.libraries import (
    DEVICE_WORDS,
    PARTS,
    QUIET_ATTRIBUTES,
    TO_GPU,
    Libraries,
)
from kiwi_jupyter.kernel.foresight.running import Running, chain_of
from kiwi_jupyter.kernel.foresight.values import (
    DEPTH_MAX,
    Values,
    held,
    is_container,
    is_module,
    is_plain,
    method,
    name_of,
    names_of,
    origin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WAIT_MAX_NS: Final = 100_000_000
"""Longest look at a cell on the clock: a busy machine, a slow file system."""

CODE_MAX: Final = 6_000
"""Most characters of a magic's body or of a script: IPython takes a millisecond for so much."""

_RUN_PYTHON: Final = frozenset({"time", "timeit", "capture", "prun", "memit", "mprun", "lprun"})
"""Magics whose line and body are Python."""

_OPTIONS: Final = re.compile(r"\s*(-\w+(\s+\d+)?\s+)*")
_LOOKS: Final = PARTS["torch.cuda"]


class CellLook:
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
        self._ends_ns = time.thread_time_ns() + within_ns
        self._late_ns = time.monotonic_ns() + WAIT_MAX_NS
        self._over = False
        self._values = Values(libraries, self.on_time)
        self._running = Running(space)
        self._followed: set[int] = set()
        self.line = 0
        """The line of what was found."""

    def on_time(self) -> bool:
        if not self._over:
            late = time.monotonic_ns() > self._late_ns
            self._over = late or time.thread_time_ns() > self._ends_ns
        return not self._over

    def forget(self) -> None:
        del self._values, self._running

    def statement(self, node: ast.stmt, depth: int = 0) -> str:
        """Return why a statement goes for the GPU, in words; "": it does not, or it is not known in
        time."""
        for found in self._running.parts(node):
            if not self.on_time():
                return ""
            if why := self._judge(found, depth):
                self.line = self.line or getattr(found, "lineno", 0)
                return why
        return ""

    # --- judging

    def _judge(self, node: ast.AST, depth: int) -> str:
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._used(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base, chain = chain_of(node)
            quiet = chain[0] in QUIET_ATTRIBUTES
            return self._used(base.id, chain) if isinstance(base, ast.Name) and not quiet else ""
        return ""

    def _used(self, name: str, chain: tuple[str, ...] = ()) -> str:
        """Judge using the value of a name, or of what lies in it."""
        running = self._running
        name = running.real(name)
        if name in running.imported or name in running.bound or name not in running.space:
            return ""
        value = running.space[name]
        for attribute in chain:  # ``job.steps`` is a number, whatever else the job holds
            inside = held(value)
            if attribute not in inside:
                break
            value = inside[attribute]
        why = self._values.holds(value)
        return f"`{'.'.join((name, *chain))}`: {why}" if why else ""

    def _call(self, node: ast.Call, depth: int) -> str:
        if why := self._goes_to_device(node):
            return why
        base, chain = chain_of(node.func)
        if not isinstance(base, ast.Name):
            return self._magic(node, depth)
        said = ".".join((base.id, *chain))
        if (path := self._running.imported.get(base.id)) is not None:
            uses = self._libraries.call_uses_gpu(".".join((path, *chain)))
            return f"`{said}(`" if uses else ""
        if not chain and base.id in self._running.defined:
            return self._in_definition(self._running.defined[base.id], said, depth)
        name = self._running.real(base.id)
        if name in self._running.bound or name not in self._running.space:
            return ""
        return self._existing(self._running.space[name], chain, said, depth)

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
        imported = {path.partition(".")[0] for path in self._running.imported.values()}
        loaded = self._libraries.torch_like_loaded()
        if not loaded and imported.isdisjoint(self._libraries.on_request):
            return ""
        if attribute == "cuda":
            return "`.cuda(`"
        for keyword in where:
            if self._is_gpu(keyword.value):
                return f"`{keyword.arg}={ast.unparse(keyword.value)}`"
        if attribute in TO_GPU and node.args and self._is_gpu(node.args[0]):
            return f"`.{attribute}({ast.unparse(node.args[0])})`"
        return ""

    def _is_gpu(self, node: ast.expr | None, depth: int = 0) -> bool:
        """Return whether an argument that says where to go may name a GPU. What is not known may:
        a parameter, a variable of a loop."""
        if node is None or depth > DEPTH_MAX:
            return True
        if isinstance(node, ast.Name):
            if node.id in self._running.bound:
                return any(self._is_gpu(one, depth + 1) for one in self._running.bound[node.id])
            return self._values.may_be_gpu(self._running.space.get(node.id))
        if isinstance(node, ast.Constant):
            return self._values.may_be_gpu(node.value)
        if isinstance(node, ast.Call):  # torch.device("cpu")
            return not node.args or any(self._is_gpu(one, depth + 1) for one in node.args)
        if isinstance(node, ast.IfExp):
            return self._is_gpu(node.body, depth + 1) or self._is_gpu(node.orelse, depth + 1)
        if isinstance(node, ast.Attribute):
            # ``.to(x.device)`` goes where ``x`` is; ``.to(torch.float16)`` goes nowhere.
            base, chain = chain_of(node)
            if not isinstance(base, ast.Name) or chain[-1] != "device":
                return False
            space = self._running.space
            return bool(self._values.holds(space[base.id])) if base.id in space else True
        return isinstance(node, (ast.JoinedStr, ast.Subscript))

    # --- following

    def _in_definition(self, node: ast.AST, said: str, depth: int) -> str:
        """Judge what a function or class of this cell does when it is called."""
        if depth >= DEPTH_MAX or id(node) in self._followed:
            return ""
        self._followed.add(id(node))
        if isinstance(node, ast.Lambda):
            body: list[ast.stmt] = [ast.copy_location(ast.Expr(node.body), node)]
        elif isinstance(node, ast.ClassDef):
            functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            body = next((one.body for one in functions if one.name == "__init__"), [])
        else:
            assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            body = node.body
        outer, self._running.bound = self._running.bound, {**self._running.bound}
        for argument in ast.walk(node.args) if hasattr(node, "args") else ():
            if isinstance(argument, ast.arg):
                self._running.bound[argument.arg] = [None]
        try:
            why = next((w for one in body if (w := self.statement(one, depth + 1))), "")
        finally:
            self._running.bound = outer
        return f"`{said}(` reaches {why}" if why else ""

    def _in_function(
        self, function: FunctionType, said: str, depth: int, owner: object = None
    ) -> str:
        """Judge what a function of the user's from an earlier cell does, by the names in its code.
        ``owner`` is the object whose method it is, and whose other methods it may call."""
        if depth >= DEPTH_MAX or id(function.__code__) in self._followed or not self.on_time():
            return ""
        self._followed.add(id(function.__code__))
        names, constants = names_in(function.__code__)
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


def names_in(code: CodeType) -> tuple[set[str], set[str]]:
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
