"""A pager in a process of its own, so that a test can kill the caller at any point.

``PagerProcess`` has the pager's five calls and passes each to that process, which runs the real
``SessionPager`` and its movers on the driver of its environment.
"""

from __future__ import annotations

from typing import Any

from cuda_processes import Worker

from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import (
    Lost,
    Moved,
    Observation,
    Outcome,
    ProcessMemory,
    Refused,
    Target,
)
from kiwi_core.states import Reason, Residency

_SETUP = """
import dataclasses
from blocking import Blocking, Loop
from kiwi_core.config import DEFAULTS
from kiwi_core.movers.pool import MoverPool
from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu, gpus
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager.api import Target
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.units import SessionId

roots = set()
remembered = {{}}
loop = Loop()
movers = MoverPool()
loop.loop.call_soon_threadsafe(movers.start)
gpu = next(gpu for gpu in loop.run(gpus(movers)) if gpu.uuid == {uuid!r})
paging = SessionPager(
    RemoteDriver(movers),
    RemoteGpu(movers, gpu.uuid, gpu.total_bytes),
    dataclasses.replace(DEFAULTS, **{config!r}),
    other_roots=lambda: roots,
    store_footprints=lambda: remembered.update(paging.export_footprints()),
    host_available_bytes=lambda pids: {host_bytes!r},
)
pager = Blocking(paging, loop)

def target_of(session, pid, ticks):
    return Target(SessionId(session), ProcessRef(pid, ticks))

def plain(value):
    return [type(value).__name__, dataclasses.asdict(value)]
"""


_LINKED = """
from link_server import LinkServer

server = loop.run(LinkServer.serve({path!r}, {gpu_bytes}))
paging = SessionPager(
    RemoteDriver(movers),
    RemoteGpu(movers, gpu.uuid, gpu.total_bytes),
    dataclasses.replace(DEFAULTS, **{config!r}),
    links=server.links,
    other_roots=lambda: roots,
    store_footprints=lambda: remembered.update(paging.export_footprints()),
    host_available_bytes=lambda pids: {host_bytes!r},
)
pager = Blocking(paging, loop)
"""


class PagerProcess:
    def __init__(
        self,
        environment: dict[str, str],
        gpu_uuid: str,
        *,
        host_bytes: int = 1 << 50,
        **config: object,
    ) -> None:
        self.worker = Worker(environment)
        self.patched = False
        self.worker.do(_SETUP.format(uuid=gpu_uuid, config=config, host_bytes=host_bytes))

    def link(
        self, path: str, gpu_bytes: int, *, host_bytes: int = 1 << 50, **config: object
    ) -> None:
        """Use the in-process pager from now on, for programs that connect at ``path``."""
        code = _LINKED.format(path=path, gpu_bytes=gpu_bytes, config=config, host_bytes=host_bytes)
        self.worker.do(code)

    def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        return self._call("suspend", target, deadline_ns)

    def resume(self, target: Target, deadline_ns: int) -> Outcome:
        return self._call("resume", target, deadline_ns)

    def page_out(self, target: Target, deadline_ns: int) -> Outcome:
        return self._call("page_out", target, deadline_ns)

    def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        return self._call("page_in", target, deadline_ns)

    def residue_in(self, target: Target, deadline_ns: int) -> Outcome:
        return self._call("residue_in", target, deadline_ns)

    def observe(self, target: Target) -> Observation:
        _, fields = self.worker.get(f"plain(pager.observe({_expression(target)}))")
        processes = tuple(_process(p) for p in fields.pop("processes"))
        residency = Residency(fields.pop("residency"))
        return Observation(**fields, residency=residency, processes=processes)

    def begin(self, call: str, target: Target, deadline_ns: int, *more: int) -> None:
        """Begin a call without waiting for the outcome; ``finish`` waits."""
        arguments = ", ".join([_expression(target), *map(str, (deadline_ns, *more))])
        self.worker.send(f"plain(pager.{call}({arguments}))")

    def finish(self) -> Outcome:
        return _outcome(*self.worker.answer())

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        of = _expression(target) if target is not None else ""
        code = f"[(r.pid, r.start_ticks, s) for r, s in pager.export_footprints({of}).items()]"
        return {ProcessRef(pid, ticks): size for pid, ticks, size in self.worker.get(code)}

    def remembered(self) -> dict[ProcessRef, int]:
        code = "[(r.pid, r.start_ticks, s) for r, s in remembered.items()]"
        return {ProcessRef(pid, ticks): size for pid, ticks, size in self.worker.get(code)}

    def import_footprints(self, footprints: dict[ProcessRef, int]) -> None:
        items = [(ref.pid, ref.start_ticks, size) for ref, size in footprints.items()]
        self.worker.do(f"pager.import_footprints({{ProcessRef(p, t): s for p, t, s in {items}}})")

    def other_root(self, ref: ProcessRef) -> None:
        self.worker.do(f"roots.add(ProcessRef({ref.pid}, {ref.start_ticks}))")

    def patch(self, code: str) -> None:
        """Run code that changes how the pager works from now on."""
        self.patched = True
        self.worker.do(code)

    def forget(self) -> None:
        """Forget other roots and what was to be remembered, for another test."""
        self.worker.do("roots.clear(); remembered.clear()")

    def kill(self) -> None:
        self.worker.kill()

    def close(self) -> None:
        self.worker.close()

    def _call(self, call: str, target: Target, deadline_ns: int, *more: int) -> Outcome:
        self.begin(call, target, deadline_ns, *more)
        return self.finish()


def _expression(target: Target) -> str:
    return f"target_of({target.session!r}, {target.root.pid}, {target.root.start_ticks})"


def _outcome(kind: str, fields: dict[str, Any]) -> Outcome:
    if kind == "Moved":
        return Moved(**fields)
    if kind == "Lost":
        return Lost(**fields)
    return Refused(Reason(fields["reason"]), fields["detail"])


def _process(fields: dict[str, Any]) -> ProcessMemory:
    ref = ProcessRef(**fields.pop("ref"))
    return ProcessMemory(ref, Residency(fields.pop("residency")), **fields)
