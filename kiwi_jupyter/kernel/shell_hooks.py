"""Gives the cell hook each cell, and whatever else runs a user's code in a kernel: widget messages,
the expressions that front ends send along with a cell, and looking at an object (``repr`` of a
tensor).

While this process's memory is paged out, any driver call in that code would block the kernel, and
nobody would request the GPU. So this code waits for the lease like a cell, if a GPU library is
loaded.
"""

from __future__ import annotations

import ast
import inspect
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from IPython.core.interactiveshell import InteractiveShell

from kiwi_core.errors import KiwiError
from kiwi_jupyter.kernel.cell_hook import BLOCKING_POLL_S
from kiwi_jupyter.kernel.interrupts import interruptible
from kiwi_jupyter.kernel.stack import parsed_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from kiwi_jupyter.kernel.burst import Burst
    from kiwi_jupyter.kernel.cell_hook import CellHook
    from kiwi_jupyter.kernel.session import KernelSession

INSPECT_PATIENCE_S: Final = 1.0
"""How long a tooltip waits: it is not worth a place in the queue, and then does without the
object.
"""

NOT_NOW: Final = (
    "Kiwi: another notebook has the GPU, and showing this object may need it. Run a cell to wait"
    " for your turn."
)


class ShellHooks:
    """Wraps what IPython calls, on the instances of this kernel only."""

    def __init__(
        self, shell: Any, cell_hook: CellHook, session: KernelSession, burst: Burst
    ) -> None:
        self._shell = shell
        self._cell_hook = cell_hook
        self._session = session
        self._burst = burst
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        self._wrap(self._shell, "transform_ast", self._transform)
        self._wrap(self._shell, "user_expressions", self._expressions)
        self._wrap(self._shell, "object_inspect_mime", self._inspect)
        handlers = getattr(getattr(self._shell, "kernel", None), "shell_handlers", None)
        if isinstance(handlers, dict) and "comm_msg" in handlers:
            plain = handlers["comm_msg"]
            handlers["comm_msg"] = self._comm(plain)
            self._undo.append(lambda: handlers.__setitem__("comm_msg", plain))

    def uninstall(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name, None)
        if plain is None:
            return
        setattr(owner, name, make(plain))
        self._undo.append(lambda: delattr(owner, name))

    def _transform(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        is_ipythons = getattr(plain, "__func__", None) is InteractiveShell.transform_ast

        def transform_ast(node: Any) -> Any:
            # This runs after all transformers, and is not one of them: it sees the final tree, and
            # IPython need not walk through every cell to complete what transformers leave out.
            untouched = is_ipythons and not self._shell.ast_transformers
            text = parsed_from(node) if untouched else None
            return self._cell_hook.visit(plain(node), text)

        return transform_ast

    def _expressions(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def user_expressions(expressions: dict[str, str]) -> Any:
            if not expressions or not any(map(self._may_use_gpu, expressions.values())):
                return plain(expressions)
            with self._held("expressions"):
                return plain(expressions)

        return user_expressions

    def _inspect(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def object_inspect_mime(oname: str, *args: Any, **options: Any) -> Any:
            if not self._may_use_gpu(oname):
                return plain(oname, *args, **options)
            with self._held("inspect", patience_s=INSPECT_PATIENCE_S) as ours:
                return plain(oname, *args, **options) if ours else {"text/plain": NOT_NOW}

        return object_inspect_mime

    def _comm(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def comm_msg(*args: Any, **options: Any) -> Any:
            # A message can reach any callback, and there is no code here to look at.
            if not self._cell_hook.may_wait():
                return plain(*args, **options)
            with self._callback():
                answer = plain(*args, **options)
            if not inspect.isawaitable(answer):
                return answer
            return self._finish(answer)

        return comm_msg

    async def _finish(self, answer: Any) -> Any:
        with self._callback():
            return await answer

    def _callback(self) -> AbstractContextManager[object]:
        """Return what is around a callback: its calls wait at the gate, or it waits here."""
        if self._cell_hook.unguarded():
            return self._held(f"comm {threading.get_ident()}", shown=True)
        return self._cell_hook.callback()

    def _may_use_gpu(self, code: str) -> bool:
        if not self._cell_hook.may_wait():
            return False
        try:
            return self._cell_hook.judge(ast.parse(code)).gpu
        except SyntaxError:
            return False

    @contextmanager
    def _held(
        self, member: str, patience_s: float | None = None, *, shown: bool = False
    ) -> Iterator[bool]:
        """Hold the lease around code that is not a cell; false after ``patience_s`` without it.
        ``shown``: show the wait.

        Inside a cell that already has the lease this does nothing. Without a daemon the code runs.
        """
        client = self._session.connected_client
        if client is None:
            yield True
            return
        ours = False
        try:
            try:
                self._burst.join(client, member)
                with interruptible():
                    ours = self._await_lease(patience_s, shown=shown)
            except KiwiError:
                ours = True  # the daemon is away: as without Kiwi
            yield ours
        finally:
            self._burst.leave(member)

    def _await_lease(self, patience_s: float | None, *, shown: bool) -> bool:
        until_s = None if patience_s is None else time.monotonic() + patience_s
        line = self._cell_hook.lines.here() if shown else None
        try:
            while not self._burst.wait(BLOCKING_POLL_S):
                if line is not None:
                    line.show(self._burst.waiting)
                if until_s is not None and time.monotonic() >= until_s:
                    return False
            return True
        finally:
            if line is not None:
                line.close()
