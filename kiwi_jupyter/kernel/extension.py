"""Put the parts together in one shell, and take them apart again."""

from __future__ import annotations

import builtins
import logging
import os
from typing import Any

from IPython.core.inputtransformer2 import cell_magic

from kiwi_core import preallocation
from kiwi_core.config import is_disabled
from kiwi_core.errors import KiwiError
from kiwi_jupyter.kernel.burst import Burst
from kiwi_jupyter.kernel.cell_hook import CellHook
from kiwi_jupyter.kernel.config import Kiwi
from kiwi_jupyter.kernel.decision import Decider
from kiwi_jupyter.kernel.driver_gate import DriverGate
from kiwi_jupyter.kernel.foresight import Forecaster, Libraries
from kiwi_jupyter.kernel.gcguard import GcGuard
from kiwi_jupyter.kernel.held_line import line_of_suspension, line_of_unforeseen
from kiwi_jupyter.kernel.magics import KiwiMagics
from kiwi_jupyter.kernel.override import rewrite_head
from kiwi_jupyter.kernel.session import KernelSession, say_on_stderr
from kiwi_jupyter.kernel.shell_hooks import ShellHooks
from kiwi_jupyter.kernel.wait_call import ASYNC_WAIT, WAIT

LEAVE_TIMEOUT_S = 60.0
"""Limit for ``%kiwi off`` and unloading, until the memory is back in the GPU."""

_log = logging.getLogger("kiwi.kernel")


class Extension:
    """Everything that ``load_ipython_extension`` installs in ``shell``."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.config = Kiwi(parent=shell)
        if is_disabled(os.environ):
            self.config.enabled = False
        self.driver_gate = DriverGate()
        if self.config.enabled:
            preallocation.switch_off(os.environ)
            self.driver_gate.prepare()
        self.session = KernelSession(self.config, shell.user_ns, say_on_stderr, self.driver_gate)
        self.burst = Burst(GcGuard(enabled=self.config.gc_guard), self.config.turn_grace_s)
        self.session.mid_burst = lambda: self.burst.held
        libraries = Libraries(
            cpu=frozenset(self.config.cpu_modules), gpu=frozenset(self.config.gpu_modules)
        )
        forecaster = Forecaster(libraries, self._transform)
        decider = Decider(shell, self.session, forecaster, self.driver_gate)
        self.cell_hook = CellHook(shell, self.config, self.session, self.burst, decider)
        self.session.joined = self.cell_hook.joined
        self.session.suspended = line_of_suspension(self.burst, self.cell_hook.suspended_line).began
        self.session.unforeseen = line_of_unforeseen(
            lambda: self.session.connected_client, self.cell_hook.lines.unforeseen
        ).began
        self.shell_hooks = ShellHooks(shell, self.cell_hook, self.session, self.burst)
        self._installed = False

    def install(self) -> None:
        shell = self._shell
        setattr(builtins, WAIT, self.cell_hook.blocking)
        setattr(builtins, ASYNC_WAIT, self.cell_hook.awaiting)
        shell.input_transformers_cleanup.append(self._rewrite)
        shell.events.register("pre_execute", self.cell_hook.before_cell)
        shell.events.register("post_execute", self.cell_hook.silent_cell_ended)
        shell.events.register("post_run_cell", self.cell_hook.cell_ended)
        shell.register_magics(KiwiMagics(shell, self))
        self.shell_hooks.install()
        self._installed = True
        os.register_at_fork(after_in_child=self._forked)

    def uninstall(self) -> None:
        shell = self._shell
        self._installed = False
        self.shell_hooks.uninstall()
        for events, callback in (
            ("pre_execute", self.cell_hook.before_cell),
            ("post_execute", self.cell_hook.silent_cell_ended),
            ("post_run_cell", self.cell_hook.cell_ended),
        ):
            shell.events.unregister(events, callback)
        shell.input_transformers_cleanup.remove(self._rewrite)
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("kiwi", None)
        self.switch_off()
        # The names stay, because code compiled before may still call them. They do nothing any
        # more.
        setattr(builtins, WAIT, lambda _token: None)
        setattr(builtins, ASYNC_WAIT, _no_wait)

    def switch_off(self) -> None:
        """Bring memory back into the GPU and let cells run at once from now on: ``%kiwi off``."""
        self.config.enabled = False
        self.burst.end_now()
        try:
            self.session.leave(LEAVE_TIMEOUT_S)
        except KiwiError as error:
            say_on_stderr(f"Kiwi: {error}")

    def switch_on(self) -> None:
        self.config.enabled = True

    def _transform(self, code: str) -> str:
        transformed: str = self._shell.transform_cell(code)
        return transformed

    def _rewrite(self, lines: list[str]) -> list[str]:
        return rewrite_head(lines, cell_magic)

    def _forked(self) -> None:
        if self._installed:
            self.session.forget_after_fork()
            self.burst.abandon()


async def _no_wait(_token: int) -> None:
    pass
