"""Decide whether a cell takes its turn before it runs, by the analysis, the user and the gate.

A process that has not initialised the driver cannot use the GPU. There, only cells that plainly use
it wait beforehand. Every other cell runs at once; if it reaches the driver after all, the gate in
front of the driver requests the turn at that call.
"""

from __future__ import annotations

import ast
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kiwi_jupyter.kernel.analysis import Verdict

if TYPE_CHECKING:
    from kiwi_jupyter.kernel.analysis import Analyzer
    from kiwi_jupyter.kernel.analysis.steps import Source
    from kiwi_jupyter.kernel.driver_gate import DriverGate
    from kiwi_jupyter.kernel.session import KernelSession

UNTOUCHED: Final = (
    "nothing in this kernel has started the CUDA driver, and the cell does not plainly use the "
    "GPU; if it reaches the GPU all the same, it waits there for its turn (not proved: {doubt})"
)

AT_A_GLANCE: Final = (
    "nothing in this kernel has started the CUDA driver, and the cell names nothing that could "
    "use the GPU; if it reaches the GPU all the same, it waits there for its turn"
)

_log = logging.getLogger("kiwi.kernel")


@dataclass(frozen=True)
class Decision:
    """The result. After connecting, ``if_untouched`` replaces ``verdict`` if the process has the
    gate and nothing in it has started the driver. (An emulating daemon brings gate and driver only
    with the connection.) ``connect``: connect without making the cell wait, so that the daemon
    knows this notebook's name if the cell reaches the driver.
    """

    verdict: Verdict
    if_untouched: Verdict | None = None
    connect: bool = False


_GLANCED: Final = Decision(Verdict(False, AT_A_GLANCE))


class Decider:
    """Decides for one kernel. Any thread may call it."""

    def __init__(
        self, shell: Any, session: KernelSession, analyzer: Analyzer, driver_gate: DriverGate
    ) -> None:
        self._shell = shell
        self._session = session
        self._analyzer = analyzer
        self._driver_gate = driver_gate
        self._lock = threading.Lock()

    def untouched(self) -> bool:
        """Return whether this process cannot use the GPU without a call that Kiwi sees."""
        return self._driver_gate.untouched()

    def must_look(self) -> bool:
        """Return whether code that is not a cell could use the GPU at all."""
        return self._analyzer.tainted is not None and not self.untouched()

    def not_looked(self) -> None:
        """Record that a cell ran without a decision."""
        self._analyzer.taint("cells ran while Kiwi was not looking")

    def preview(self, tree: ast.Module) -> Verdict:
        """Decide about code that is not going to run."""
        with self._lock:
            verdict = self._analyzer.preview(tree, self._shell.user_ns)
            return self._decide(tree, verdict, None).verdict

    def decide(self, node: ast.Module, override: str | None, source: Source | None) -> Decision:
        """Decide about a cell that is about to run. ``override`` is the user's choice. ``source``
        is what ``node`` was parsed from, if that is certain.
        """
        try:
            with self._lock:
                if override is None and source is not None and self._suffices(source[0]):
                    self._analyzer.put_off(source)
                    return _GLANCED
                verdict = self._analyzer.analyse(node, self._shell.user_ns, source)
                decision = self._decide(node, verdict, source)
        except Exception as error:  # noqa: BLE001
            _log.exception("Kiwi could not analyse a cell; it counts as using the GPU")
            self._analyzer.taint("a cell could not be analysed")
            why = f"it could not be analysed ({type(error).__name__})"
            decision = Decision(Verdict(True, why))
        if override == "cpu":
            return Decision(Verdict(False, "%%kiwi cpu says so"))
        if override == "gpu":
            return Decision(Verdict(True, "%%kiwi gpu says so", _first_real_statement(node)))
        return decision

    def _suffices(self, text: str) -> bool:
        """Return whether the words of the cell are enough to run it at once."""
        return self._analyzer.glance.suffices(text) and self.untouched()

    def _decide(self, node: ast.Module, verdict: Verdict, source: Source | None) -> Decision:
        if not verdict.gpu:
            return Decision(verdict)
        untouched = self.untouched()
        if not untouched and not self._driver_may_come():
            return Decision(verdict)
        plain = self._analyzer.plainly(node, self._shell.user_ns, source)
        if plain.gpu:
            return Decision(plain if untouched else verdict)
        at_once = Verdict(False, UNTOUCHED.format(doubt=verdict.why))
        if untouched:
            return Decision(at_once, connect=self._session.connected_client is None)
        return Decision(verdict, if_untouched=at_once)

    def _driver_may_come(self) -> bool:
        """Return whether the first connection may bring the driver, and the gate in front of it."""
        return not self._driver_gate.in_front and self._session.connected_client is None


def _first_real_statement(node: ast.Module) -> int:
    """Skip ``from __future__``, which must stay first, and a docstring before it."""
    index = 0
    for number, statement in enumerate(node.body):
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            index = number + 1
    return min(index, len(node.body) - 1)
