"""Decide whether a cell takes its turn before it runs, by a forecast, the user and the gate.

The gate takes the lease at the first call that needs it. So a cell runs at once unless it plainly
goes for the GPU; the forecast is there so that the wait is shown before the statement.
"""

from __future__ import annotations

import ast
import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.foresight import Foreseen
from kiwi_jupyter.kernel.foresight.libraries import CPU_LIBRARIES
from kiwi_jupyter.kernel.foresight.plain import is_plain

if TYPE_CHECKING:
    from kiwi_jupyter.kernel.driver_gate import DriverGate
    from kiwi_jupyter.kernel.foresight import Forecaster
    from kiwi_jupyter.kernel.session import KernelSession

NOT_LOADED: Final = "nothing in it goes for the GPU, and nothing in this kernel has loaded a driver"

UNGUARDED: Final = (
    "this kernel has no gate that could hold its calls to the driver, so every cell waits that is "
    "more than plain data work"
)

_log = logging.getLogger("kiwi.kernel")


@dataclass(frozen=True)
class Decision:
    """The result. After connecting, ``if_untouched`` replaces ``forecast`` if the process has the
    gate and nothing in it has started the driver. (An emulating daemon brings gate and driver only
    with the connection.) ``connect``: connect without making the cell wait, so that the daemon
    knows this notebook's name if the cell reaches the driver.
    """

    forecast: Foreseen
    if_untouched: Foreseen | None = None
    connect: bool = False


class Decider:
    """Decides for one kernel. Any thread may call it."""

    def __init__(
        self, shell: Any, session: KernelSession, forecaster: Forecaster, driver_gate: DriverGate
    ) -> None:
        self._shell = shell
        self._session = session
        self._forecaster = forecaster
        self._driver_gate = driver_gate

    def untouched(self) -> bool:
        """Return whether this process cannot use the GPU without a call that Kiwi sees."""
        return self._driver_gate.untouched()

    def far_from_gpu(self) -> bool:
        """Return whether a gate stands before a driver that nothing has started, or no driver is in
        this process."""
        gate = self._driver_gate
        return gate.untouched() or not (gate.in_front or gate.driver_loaded())

    def unguarded(self) -> bool:
        """Return whether the driver is in this process without a gate in front of it."""
        return not self._driver_gate.in_front and self._driver_gate.driver_loaded()

    def preview(self, tree: ast.Module) -> Foreseen:
        """Decide about code that is not going to run."""
        return self._safely(tree, None).forecast

    def decide(self, node: ast.Module, override: str | None, text: str | None) -> Decision:
        """Decide about a cell that is about to run. ``override`` is the user's choice. ``text`` is
        what ``node`` was parsed from, if that is certain.
        """
        if override == "cpu":
            return Decision(Foreseen(False, "%%kiwi cpu says so"))
        if override == "gpu":
            return Decision(Foreseen(True, "%%kiwi gpu says so", _first_real(node)))
        return self._safely(node, text)

    def _safely(self, node: ast.Module, text: str | None) -> Decision:
        try:
            return self._decide(node, text)
        except Exception as error:  # noqa: BLE001 - objects of the user's may raise anything
            _log.debug("Kiwi could not look at a cell", exc_info=True)
            why = f"Kiwi could not look at it ({type(error).__name__})"
            if self.unguarded():
                return Decision(Foreseen(True, f"{why}, and {UNGUARDED}", _first_real(node)))
            return Decision(Foreseen(False, f"{why}; its calls wait at the gate"))

    def _decide(self, node: ast.Module, text: str | None) -> Decision:
        space, libraries = self._shell.user_ns, self._forecaster.libraries
        foreseen = self._forecaster.foresee(node, space, text)
        may_come = self._session.connected_client is None  # a driver and its gate, by a daemon
        if foreseen.gpu or self._driver_gate.in_front:
            connect = may_come and not foreseen.gpu
            near = connect and (libraries.any_loaded() or _imports_others(node))
            return Decision(foreseen, connect=near)
        if not (may_come or self._driver_gate.driver_loaded()):
            return Decision(replace(foreseen, why=NOT_LOADED))
        if is_plain(node, space, libraries):
            return Decision(foreseen)
        coarse = Foreseen(True, UNGUARDED, _first_real(node))
        return Decision(coarse, if_untouched=foreseen if may_come else None)


def _imports_others(node: ast.Module) -> bool:
    """Return whether a cell imports more than the standard library and what stays on the CPU: then
    its user's choice of a GPU must be known before CUDA starts."""
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            tops = [alias.name.partition(".")[0] for alias in one.names]
        elif isinstance(one, ast.ImportFrom):
            tops = [(one.module or "").partition(".")[0]]
        else:
            continue
        if not all(top in CPU_LIBRARIES or top in sys.stdlib_module_names for top in tops):
            return True
    return False


def _first_real(node: ast.Module) -> int:
    """Skip ``from __future__``, which must stay first, and a docstring before it."""
    index = 0
    for number, statement in enumerate(node.body):
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            index = number + 1
    return min(index, len(node.body) - 1)
