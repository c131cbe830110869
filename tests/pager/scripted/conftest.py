from __future__ import annotations

import pytest
from scripted_machine import Machine, new_pager

from kiwi_core.gpu import processes
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.pager import driver_steps, ending
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.units import MIB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(p1=10 * MIB, p2=20 * MIB)
    living = machine.states

    def tree(root: ProcessRef, _without: object = ()) -> tuple[ProcessRef, ...]:
        return tuple(ProcessRef(pid, 0) for pid in living) if root.pid in living else ()

    monkeypatch.setattr(processes, "tree", tree)
    monkeypatch.setattr(processes, "alive", lambda ref: ref.pid in living)
    monkeypatch.setattr(processes, "ref_of", lambda _pid: None)
    monkeypatch.setattr(ending, "may_control", lambda _pid: True)
    monkeypatch.setattr(driver_steps, "may_control", lambda _pid: True)
    return machine


@pytest.fixture
def pager(machine: Machine) -> SessionPager:
    return new_pager(machine)
