"""The cell hook: waits for the GPU before the first statement of a cell that may use it.

``shell_hooks.py`` gives each cell, as IPython has parsed and transformed it, to ``CellHook.visit``,
which inserts a call (``wait_call.py``). Events of IPython only end what the hook began: an
exception or an interrupt in a ``pre_run_cell`` callback would be printed and the cell would run all
the same.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import logging
import os
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.client.patience import FULL_AGAIN_S
from kiwi_core.errors import KiwiError, PeerError, is_full
from kiwi_jupyter.kernel.display import CellWaitLine, on_no_screen, screens_for
from kiwi_jupyter.kernel.interrupts import GpuMemoryLostError, Interrupted, interruptible
from kiwi_jupyter.kernel.leftovers import Before
from kiwi_jupyter.kernel.lines_below import LinesBelow
from kiwi_jupyter.kernel.override import take_override
from kiwi_jupyter.kernel.stack import cells_on_stack, is_silent
from kiwi_jupyter.kernel.wait_call import insert_wait, is_about_kiwi, runs_as_coroutine
from kiwi_jupyter.kernel.words import LOST

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kiwi_core.client import Client
    from kiwi_jupyter.kernel.burst import Burst
    from kiwi_jupyter.kernel.config import Kiwi
    from kiwi_jupyter.kernel.decision import Decider, Decision
    from kiwi_jupyter.kernel.display import Screen
    from kiwi_jupyter.kernel.foresight import Foreseen
    from kiwi_jupyter.kernel.leftovers import Leftovers
    from kiwi_jupyter.kernel.session import KernelSession

FAST_S: Final = 0.005
"""Longest time that an async cell blocks the event loop, for a grant that comes at once."""

ASYNC_POLL_S: Final = 0.05
BLOCKING_POLL_S: Final = 0.25
"""Interval at which an interrupt (async: a cancellation) takes effect."""

PENDING_MAX: Final = 64
"""Cells that were transformed and never ran (the inserted call was not reached)."""

_log = logging.getLogger("kiwi.kernel")


@dataclass
class CellRun:
    """A cell that goes for the GPU, from its transformation to its end."""

    member: int
    silent: bool
    if_untouched: Foreseen | None = None
    """See ``Decision``."""
    before: Before = field(default_factory=Before.now)
    screens: Callable[[], Screen] = on_no_screen
    """Make the screens of its waiting lines, which the cell's own thread knows when it begins."""
    below: CellWaitLine | None = None
    """The line that another thread draws below the cell while a driver call holds it."""


class CellHook:
    """The hook of a kernel. IPython calls ``visit`` and ``cell_ended``, the cells call ``blocking``
    and ``awaiting``.
    """

    def __init__(
        self, shell: Any, config: Kiwi, session: KernelSession, burst: Burst, decider: Decider
    ) -> None:
        self._shell = shell
        self._config = config
        self._session = session
        self._burst = burst
        self._decider = decider
        self._lock = threading.RLock()
        self._tokens = itertools.count(1)
        self._pending: dict[int, CellRun] = {}
        self._running: dict[int, CellRun] = {}
        self.lines = LinesBelow(shell, config)
        self._pid = os.getpid()
        self.last_forecast: Foreseen | None = None
        """The decision about the last cell, for ``%kiwi why``."""

    # --- deciding, before the cell runs

    def visit(self, node: Any, text: str | None = None) -> Any:
        """Decide about a parsed cell, or the body of a magic. ``text`` is what ``node`` was parsed
        from, if that is certain.
        """
        try:
            override = take_override(node)
            # Only the outermost cell is judged: its forecast covers the bodies of magics and nested
            # cells.
            if not isinstance(node, ast.Module) or cells_on_stack() != 1 or not node.body:
                return node
            if not self._config.enabled or not self._session.possible() or os.getpid() != self._pid:
                self.last_forecast = None
                return node
            decision = self._decider.decide(node, override, text)
            if not is_about_kiwi(node):
                self.last_forecast = decision.forecast
            if decision.forecast.gpu:
                self.lines.bystander_ends()
                self._insert_wait(node, decision, text)
            else:
                self.lines.bystander_begins()
            if decision.connect:
                self._session.connect_soon()
            return node
        except Exception:  # noqa: BLE001 - the user's cell must run whatever Kiwi does
            _log.exception("Kiwi could not look at a cell; it runs without Kiwi")
            return node

    def _insert_wait(self, node: ast.Module, decision: Decision, text: str | None) -> None:
        token = next(self._tokens)
        with self._lock:
            while len(self._pending) >= PENDING_MAX:
                del self._pending[next(iter(self._pending))]
            self._pending[token] = CellRun(
                threading.get_ident(), is_silent(), decision.if_untouched
            )
        is_plain = text is not None and "await" not in text and "async" not in text
        awaited = not is_plain and self._shell.autoawait and runs_as_coroutine(node)
        insert_wait(node, decision.forecast.first_statement, token, awaited=awaited)

    def judge(self, tree: ast.Module) -> Foreseen:
        """Return the forecast for code that is not going to run (``%kiwi why CODE``)."""
        return self._decider.preview(tree)

    def may_wait(self) -> bool:
        """Return whether code that is not a cell can meet the GPU at all."""
        return (
            self._config.enabled
            and os.getpid() == self._pid
            and self._session.connected_client is not None
            and not self._decider.untouched()
        )

    def unguarded(self) -> bool:
        """Return whether nothing but Kiwi's own look keeps such code from the GPU."""
        return self.may_wait() and self._decider.unguarded()

    # --- waiting, in the cell

    def blocking(self, token: int) -> None:
        """Wait until this process has the GPU, or until the cell must go on without Kiwi:
        ``__kiwi_wait__``.

        Raise nothing but ``KeyboardInterrupt`` and ``GpuMemoryLostError``.
        """
        run = self._start(token)
        if run is None:
            return
        try:
            with interruptible():
                client = self._session.connected_client
                if client is None:
                    client = self._client_for(run)
                if client is not None and not self._runs_at_once(run):
                    self._burst.join(client, run.member)
                    if not self._burst.wait(0):
                        with closing(self._line(run)) as line:
                            while not self._burst.wait(
                                min(BLOCKING_POLL_S, line.due_in_s() or BLOCKING_POLL_S)
                            ):
                                line.show(self._burst.waiting)
                    self._granted()
        except KeyboardInterrupt:
            self._leave(run.member)
            raise Interrupted from None
        except GpuMemoryLostError:
            self._leave(run.member)
            raise
        except Exception as error:  # noqa: BLE001 - the user's cell must run whatever Kiwi does
            self._failed(run, error)

    async def awaiting(self, token: int) -> None:
        """Do the same for a cell on the event loop (``await __kiwi_async_wait__``), where SIGINT
        cancels the cell's task instead of raising."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # another library's loop, on which this cannot be awaited
            self.blocking(token)
            return
        run = self._start(token)
        if run is None:
            return
        try:
            client = self._session.connected_client
            if client is None:
                client = await self._await_client(run, loop)
            if client is not None and not self._runs_at_once(run):
                self._burst.join(client, run.member)
                with closing(self._line(run)) as line:
                    granted = self._burst.wait(FAST_S)
                    while not granted:
                        await asyncio.sleep(ASYNC_POLL_S)
                        line.show(self._burst.waiting)
                        granted = self._burst.wait(0)
                self._granted()
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._leave(run.member)
            raise Interrupted from None
        except GpuMemoryLostError:
            self._leave(run.member)
            raise
        except Exception as error:  # noqa: BLE001
            self._failed(run, error)

    def _runs_at_once(self, run: CellRun) -> bool:
        """Return whether the cell needs no turn, as the connection has shown."""
        if run.if_untouched is None or not self._decider.far_from_gpu():
            return False
        self.last_forecast = run.if_untouched
        self.lines.bystander_begins()
        self._leave(run.member)
        return True

    def _client_for(self, run: CellRun) -> Client | None:
        """Return the session's client. Shows the wait for a daemon, and for a full one."""
        with closing(self._line(run)) as line:
            while True:
                try:
                    return self._session.client(line.say)
                except PeerError as error:
                    if not is_full(error):
                        raise
                    line.say(str(error))
                time.sleep(FULL_AGAIN_S)

    async def _await_client(self, run: CellRun, loop: asyncio.AbstractEventLoop) -> Client | None:
        with closing(self._line(run)) as line:
            while True:
                found = loop.run_in_executor(None, self._session.client)
                while not (await asyncio.wait({found}, timeout=ASYNC_POLL_S))[0]:
                    if words := self._session.wait:
                        line.say(words)
                try:
                    return found.result()
                except PeerError as error:
                    if not is_full(error):
                        raise
                    line.say(str(error))
                await asyncio.sleep(FULL_AGAIN_S)

    def joined(self, client: Client) -> None:
        """Request the GPU for cells that run without a daemon, now that one has come. They go on
        running; the daemon must know that they use the GPU. Called in the session's thread.
        """
        with self._lock:
            members = list(self._running)
        for member in members:
            with suppress(KiwiError):
                self._burst.join(client, member)
            if member not in self._running:  # it ended meanwhile
                self._burst.leave(member)

    def _start(self, token: int) -> CellRun | None:
        with self._lock:
            run = self._pending.pop(token, None)
            if run is None or os.getpid() != self._pid or self._burst.is_in(run.member):
                return None
            try:
                run.screens = screens_for(self._shell, silent=run.silent)
            except Exception:  # noqa: BLE001 - the user's cell must run whatever Kiwi does
                _log.exception("Kiwi cannot draw below this cell")
            self._running[run.member] = run
            return run

    def _granted(self) -> None:
        self._session.notices.show()
        if self._session.lost:
            raise GpuMemoryLostError(LOST)

    def _line(self, run: CellRun) -> CellWaitLine:
        return CellWaitLine(run.screens(), delay_s=self._config.waiting_line_delay_s)

    def suspended_line(self) -> CellWaitLine | None:
        """Return a line below the cell that has the GPU. It ends with that cell. Called in any
        thread."""
        with self._lock:
            run = next(iter(self._running.values()), None)
            if run is None:
                return None
            run.below = self.lines.held(run.screens())
            return run.below

    def callback(self) -> AbstractContextManager[None]:
        """Let the callback of a widget show the wait of its calls."""
        return self.lines.callback(a_cell_has_the_gpu=bool(self._running))

    def _leave(self, member: int, left: Leftovers | None = None) -> None:
        """Take a cell out of the burst. It counts as running until then: where an interrupt comes
        before that, the next cell does the rest."""
        self._burst.leave(member, left)
        with self._lock:
            self._running.pop(member, None)
        self._burst.leave(member)  # ``joined`` may have added it once more

    def _failed(self, run: CellRun, error: Exception) -> None:
        stays = False
        if isinstance(error, KiwiError) and error.code == "no-daemon":
            # The cell stays in the burst although nobody can grant it now.
            with suppress(KiwiError):
                self._burst.go_on_without()
                stays = True
        if not stays:
            self._leave(run.member)
        self._session.notices.show()  # the cell may never end without the text of these notices
        if isinstance(error, KiwiError):
            self._session.failed(error)
        else:
            _log.error("Kiwi failed; this cell runs without waiting", exc_info=error)

    # --- the end of a cell

    def cell_ended(self, _result: object = None) -> None:
        """End the outermost cell of this thread, however it ended (``post_run_cell``)."""
        if os.getpid() != self._pid:
            return
        self.lines.bystander_ends()
        member = threading.get_ident()
        if member not in self._running or cells_on_stack(1):
            return
        self._end(member)

    def silent_cell_ended(self) -> None:
        """End silent cells, which have no ``post_run_cell``, and a cell of this thread that was
        left open (``post_execute``, which comes first).
        """
        run = self._running.get(threading.get_ident())
        if run is not None and run.silent:
            self.cell_ended()

    def before_cell(self) -> None:
        """End the last cell if nobody has, because a new outermost cell begins (``pre_execute``,
        the safety net).
        """
        member = threading.get_ident()
        if member in self._running and cells_on_stack() == 1:
            self._end(member)

    def _end(self, member: int) -> None:
        run = self._running.get(member)
        if run is None or os.getpid() != self._pid:
            return
        left = None
        try:
            left = run.before.left()
        finally:
            self._leave(member, left)
        if run.below is not None:
            run.below.close()
        self._session.notices.show()
