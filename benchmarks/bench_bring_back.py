"""How much the bring-back hint shortens the wait of a cell whose memory was paged out.

Real kernels and a real daemon use an emulated GPU whose copies take as long as on a real one,
scaled down 256 times: 256 MiB at 64 MiB/s stand for 64 GiB at 16 GiB/s. The emulated driver proves
nothing about speed: the time of a page-in is injected. The benchmark measures how much of that time
is left for the cell to wait for, and the order of events.

1. *The wait saved.* A notebook's memory is out; a hint is given, and some seconds later its cell is
   run. Its time is compared with that without a hint, and with memory that was in all the time.
2. *The price of a wrong hint.* A page-in for one notebook has just begun when another one asks.
3. *In JupyterLab.* The same as 1, with a key typed into the notebook in a real browser as the hint.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from common import arguments, machine, report, table, target
from gpu_cells import PRELUDE, take
from kernels import running_kernel
from lab_load import running_browser, running_daemon, running_stage
from lab_page import LabPage

import kiwi_emulator as emulator

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from daemon import Daemon
    from kernels import Kernel
    from lab_page import NotebookPane

    from kiwi_core.client import Client

MIB = 1 << 20

SPEED = 64 * MIB
"""Bytes per second, each way."""

GPU = "1x384MiB"
FOOTPRINTS_MIB = (64, 128, 256)
LEADS_S = (0.5, 1.0, 2.0, 4.0)

SOON_S = 0.1
"""Time after a hint for one notebook when the other one asks."""

PROTECTED_S = 10.5
"""Memory that was used less long ago is not paged out for a hint (``hint_protect``)."""

CELL = "memory.step()"

Numbers = dict[str, float]


class Notebook:
    """A kernel with ``mib`` MiB in the GPU."""

    def __init__(self, daemon: Daemon, kernel: Kernel, mib: int, seed: int) -> None:
        self._daemon, self._kernel = daemon, kernel
        kernel.check(PRELUDE)
        kernel.check(take(mib, seed))
        kernel.check(CELL)
        found = daemon.session(kernel.pid)
        assert found is not None, "the kernel is no session"
        self.id = found.id

    def cell_s(self) -> float:
        """Return the time of a cell that uses the memory, including its wait."""
        began = time.monotonic()
        self._kernel.check(CELL)
        return time.monotonic() - began

    def out(self, client: Client) -> None:
        """Page the memory out, as fast as possible."""
        with quick(self._daemon):
            if self._state() != "paged-out":
                self._daemon.wait_for(lambda _: self._state() == "idle", "an idle notebook")
                client.release(self.id)
            self._daemon.wait_for(lambda _: self._state() == "paged-out", "paged out")

    def use(self) -> None:
        """Page the memory in, as fast as possible."""
        with quick(self._daemon):
            self._kernel.check(CELL)
            self._daemon.wait_for(lambda _: self._state() == "idle", "an idle notebook")

    def _state(self) -> str:
        found = self._daemon.session(self._kernel.pid)
        assert found is not None
        return found.state.value


@contextmanager
def quick(daemon: Daemon) -> Iterator[None]:
    """Make copies fast during the block, for preparations."""
    emulator.set_copy_bandwidth(daemon.state_path, 0)
    try:
        yield
    finally:
        emulator.set_copy_bandwidth(daemon.state_path, SPEED)


def notebook(stack: ExitStack, daemon: Daemon, mib: int, seed: int) -> Notebook:
    with quick(daemon):
        kernel = stack.enter_context(running_kernel(daemon.env))
        return Notebook(daemon, kernel, mib, seed)


def hint(client: Client, session: str) -> None:
    begun, why = client.bring_back(session)
    assert begun, f"the hint was not followed: {why}"


# --- 1: the wait saved --------------------------------------------------------------------------


def saved(daemon: Daemon, mib: int, leads: tuple[float, ...], rounds: int) -> dict[str, Numbers]:
    """Return median times in seconds, by what came before the cell."""
    took: dict[str, list[float]] = {}
    with ExitStack() as stack:
        client = stack.enter_context(daemon.client())
        client.connect()
        book = notebook(stack, daemon, mib, mib)
        for _ in range(rounds):
            took.setdefault("memory in the GPU", []).append(book.cell_s())
            book.out(client)
            took.setdefault("paged out, no hint", []).append(book.cell_s())
            for lead_s in leads:
                book.out(client)
                hint(client, book.id)
                time.sleep(lead_s)
                took.setdefault(f"hint {lead_s:g} s before", []).append(book.cell_s())
    return summary(took, "paged out, no hint", "memory in the GPU")


def summary(took: dict[str, list[float]], without: str, floor: str) -> dict[str, Numbers]:
    """Return medians, with the ``ratio`` of the wait (above ``floor``) to that ``without`` a
    hint."""
    least = statistics.median(took[floor])
    whole = statistics.median(took[without]) - least
    found = {}
    for name, values in took.items():
        wait_s = statistics.median(values) - least
        found[name] = {
            "n": len(values),
            "cell_s": round(statistics.median(values), 3),
            "least_s": round(min(values), 3),
            "most_s": round(max(values), 3),
            "wait_s": round(wait_s, 3),
            "ratio": round(wait_s / whole, 3),
            "saved_s": round(whole - wait_s, 3),
        }
    return found


# --- 2: the price of being wrong ----------------------------------------------------------------


def price(daemon: Daemon, mib: int, case: str, rounds: int) -> Numbers:
    """Return the time of the other notebook's cell, right after a hint for the first one and
    without a hint. ``case``: its memory is "beside" (both fit), also "out", or a "victim" of the
    hint."""
    with_s, without_s = [], []
    with ExitStack() as stack:
        client = stack.enter_context(daemon.client())
        client.connect()
        hinted = notebook(stack, daemon, mib, 1)
        other = notebook(stack, daemon, mib, 2)
        for number in range(2 * rounds):
            if case == "out":
                other.out(client)
            else:
                other.use()
            hinted.out(client)
            if case == "victim":
                time.sleep(PROTECTED_S)
            if number % 2:
                without_s.append(other.cell_s())
                hinted.use()  # so that the next hint is not a second unused one
            else:
                hint(client, hinted.id)
                time.sleep(SOON_S)
                with_s.append(other.cell_s())
                hinted.use()
    hinted_s, plain_s = statistics.median(with_s), statistics.median(without_s)
    return {
        "n": rounds,
        "one_way_s": round(mib * MIB / SPEED, 2),
        "with_hint_s": round(hinted_s, 3),
        "without_s": round(plain_s, 3),
        "price_s": round(hinted_s - plain_s, 3),
        "price_in_moves": round((hinted_s - plain_s) / (mib * MIB / SPEED), 2),
    }


# --- 3: in JupyterLab ---------------------------------------------------------------------------

USE, NOTES = 1, 2


class InLab:
    """A notebook in a browser: memory, a cell that uses it, a cell of notes to type into."""

    def __init__(self, daemon: Daemon, page: LabPage, pane: NotebookPane) -> None:
        self._daemon, self._page, self._pane = daemon, page, pane
        with quick(daemon):
            pane.run(0)
        kernel = page.lab.kernel_id(pane.path)
        found = next(s for s in daemon.status().sessions if s.kernel_id == kernel)
        self._pid, self._session = found.pid, found.id

    def cell_s(self) -> float:
        """Return the time from the click to the end that the cell itself prints."""
        began = time.time()
        self._pane.run(USE)
        return float(self._pane.outputs(USE)[-1]["text"]) - began

    def release(self) -> None:
        with quick(self._daemon), self._daemon.client() as client:
            client.connect()
            self._daemon.wait_state(self._pid, "idle")
            client.release(self._session)
            self._daemon.wait_state(self._pid, "paged-out")

    def typed_s(self, lead_s: float) -> tuple[float, float]:
        """Return the time of the cell ``lead_s`` after a key, and the time from key to daemon."""
        self._page.reload()  # the browser's own pause between two hints begins anew
        self._pane.wait_shown()
        self._pane.edit(NOTES)
        self.release()
        typed = time.monotonic()
        self._page.page.keyboard.type("x")
        self._daemon.wait_state(self._pid, "paging-in", "idle")
        begun_s = time.monotonic() - typed
        time.sleep(max(0.0, typed + lead_s - time.monotonic()))
        return self.cell_s(), begun_s


def in_lab(mib: int, leads: tuple[float, ...], rounds: int) -> dict[str, Any]:
    took: dict[str, list[float]] = {}
    ways: list[float] = []
    with ExitStack() as stack:
        browser = stack.enter_context(running_browser())
        stage = stack.enter_context(running_stage(GPU))
        cells = [
            f"import time\nfrom gpu_work import Memory\nmemory = Memory({mib}, 1)",
            "memory.step()\nprint(time.time())",
            "# notes ",
        ]
        stage.lab.write_notebook("one.ipynb", cells)
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = LabPage(context, stage.lab, "bring-back")
        page.open()
        lab = InLab(stage.daemon, page, page.open_notebook("one.ipynb"))
        emulator.set_copy_bandwidth(stage.daemon.state_path, SPEED)
        for _ in range(rounds):
            took.setdefault("memory in the GPU", []).append(lab.cell_s())
            lab.release()
            took.setdefault("paged out, nothing typed", []).append(lab.cell_s())
            for lead_s in leads:
                took_s, way_s = lab.typed_s(lead_s)
                took.setdefault(f"typed {lead_s:g} s before", []).append(took_s)
                ways.append(way_s)
        context.close()
    found: dict[str, Any] = dict(summary(took, "paged out, nothing typed", "memory in the GPU"))
    return {"waits": found, "key_to_daemon_s": round(statistics.median(ways), 3)}


# --- reporting ----------------------------------------------------------------------------------


def show(name: str, waits: dict[str, Numbers]) -> None:
    print(f"\n{name}")
    rows = [(what, *each.values()) for what, each in waits.items()]
    table(("s", "n", "cell", "least", "most", "wait", "× no hint", "saved"), rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)


def main() -> int:
    args = arguments(__doc__, options)
    rounds = 1 if args.quick else args.rounds
    footprints = FOOTPRINTS_MIB[:1] if args.quick else FOOTPRINTS_MIB
    leads = LEADS_S[1:2] if args.quick else LEADS_S
    where = machine("emulated")
    waits, prices = {}, {}
    with running_daemon(GPU) as daemon:
        emulator.set_copy_bandwidth(daemon.state_path, SPEED)
        for mib in footprints:
            waits[mib] = saved(daemon, mib, leads, rounds)
            show(f"{mib} MiB, {mib * MIB / SPEED:g} s one way", waits[mib])
        for case, mib in (("beside", 128), ("out", 256), ("victim", 256)):
            prices[case] = price(daemon, mib, case, min(rounds, 3))
        print("\nanother notebook asks just after a hint for this one began; its memory is:")
        rows = [(case, *each.values()) for case, each in prices.items()]
        table(("s", "n", "one way", "with", "without", "price", "in moves"), rows)
    lab = in_lab(128, leads, min(rounds, 3))
    show("in JupyterLab, 128 MiB, 2 s one way", lab["waits"])
    print(f"from the key to the daemon: {lab['key_to_daemon_s']} s (median)\n")
    targets = [
        target(f"wait with a hint as early as the page-in takes, {mib} MiB", each["ratio"], 0.1)
        for mib, found in waits.items()
        for name, each in found.items()
        if name == f"hint {mib * MIB / SPEED:g} s before"
    ]
    results = {"machine": where, "speed_bytes_per_s": SPEED, "targets": targets,
               "saved": waits, "price": prices, "in_jupyterlab": lab}  # fmt: skip
    report("bring_back", results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
