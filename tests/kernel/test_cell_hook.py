"""Tests of cells in a plain kernel that take the lease, wait for it, or run at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kiwi_core.states import Notice
from kiwi_core.wire.messages import (
    Acquire,
    EndBurst,
    Granted,
    Hello,
    UserNotice,
    Waiting,
    Withdraw,
)
from kiwi_core.wire.words import DAEMON_ENDED

if TYPE_CHECKING:
    from tests.client.scripted_daemon import ScriptedDaemon
    from tests.support.kernels import Kernel


@pytest.fixture
def gpu_kernel(kernel: Kernel, daemon: ScriptedDaemon) -> Kernel:
    """Return a kernel that has already used the GPU library."""
    kernel.check("import tripgpu, sys, time, os\ntripgpu.use()")
    daemon.await_received(EndBurst)
    kernel.check("%%kiwi cpu\ntripgpu.uses.clear()")
    return kernel


def held(daemon: ScriptedDaemon) -> tuple[int, int]:
    """Return how many bursts were requested, and how many ended."""
    return len(daemon.received(Acquire)), len(daemon.received(EndBurst))


def grant(daemon: ScriptedDaemon) -> None:
    """Grant the latest request."""
    daemon.peer.say(Granted(burst=daemon.received(Acquire)[-1].burst, quantum_s=30.0))


def test_the_lease_is_taken_for_the_gpu_cell_only(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("x = 1")
    assert daemon.peers == []
    kernel.check("import tripgpu")
    assert daemon.received(Acquire) == []
    assert kernel.check("print(tripgpu.use())").text == "use\n"
    kernel.check("x + 1")
    daemon.await_received(EndBurst)
    assert len(daemon.received(Acquire)) == 1
    (hello,) = daemon.received(Hello)
    assert hello.name == f"kernel {kernel.pid}"
    assert hello.kernel_id == "t"


def test_cpu_statements_ahead_run_first(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    daemon.grants = False
    cell = gpu_kernel.send("print('before')\nx = 2\ntripgpu.use()\nprint('after')")
    gpu_kernel.until(lambda: cell.text == "before\n", "the CPU statement")
    daemon.await_received(Acquire, 2)
    gpu_kernel.until(lambda: any(cell.displays()), "the waiting line")
    assert cell.text == "before\n"
    grant(daemon)
    gpu_kernel.finish(cell)
    assert cell.text == "before\nafter\n"


def test_the_waiting_line_tells_and_leaves_nothing(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    daemon.grants = False
    cell = gpu_kernel.send("print('kept')\ntripgpu.use()")
    burst = daemon.await_received(Acquire, 2)[-1].burst
    gpu_kernel.until(lambda: "other.ipynb" in " ".join(cell.displays()), "the first line")
    daemon.peer.say(
        Waiting(burst=burst, position=2, ahead=1, holder="<b>x</b>.ipynb", expected_wait_s=12.0)
    )
    gpu_kernel.until(lambda: "2nd in line" in cell.displays()[-1], "the second line")
    shown = cell.of_type("comm_msg")[-1]["content"]["data"]
    assert shown["text"] == ("Waiting for the GPU: 2nd in line, <b>x</b>.ipynb has it, about 12 s")
    assert 'role="status"' in shown["html"]
    assert "Is this CPU work?" in shown["html"]
    assert "%%kiwi cpu" in shown["html"]
    assert "<b>" not in shown["html"]
    grant(daemon)
    gpu_kernel.finish(cell)
    outputs = cell.outputs()
    assert [o["output_type"] for o in outputs] == ["stream", "execute_result"]
    assert outputs[0]["text"] == "kept\n"
    assert not cell.of_type("clear_output")


@pytest.mark.parametrize(
    ("allow_stdin", "metadata"),
    [(True, {}), (False, {}), (True, {"cellId": "c1"})],
    ids=["a server, an agent or a console", "nbclient", "JupyterLab"],
)
def test_a_wait_is_no_output_whoever_runs_the_cell(
    gpu_kernel: Kernel, daemon: ScriptedDaemon, allow_stdin: bool, metadata: dict[str, str]
) -> None:
    """Tools differ in what they save: some keep updates of displays that they do not know."""
    daemon.grants = False
    cell = gpu_kernel.send("x = tripgpu.use()", allow_stdin=allow_stdin, metadata=metadata)
    gpu_kernel.until(lambda: any(cell.displays()), "the waiting line")
    daemon.await_received(Acquire, 2)
    grant(daemon)
    gpu_kernel.finish(cell)
    assert {m["msg_type"] for m in cell.messages} == {"status", "execute_input", "comm_msg"}
    assert not cell.displays()[-1], "the waiting line is gone"
    assert {m["content"]["data"]["cell"] for m in cell.of_type("comm_msg")} == {
        metadata.get("cellId")
    }


def test_a_short_wait_shows_nothing(daemon: ScriptedDaemon, make_kernel) -> None:  # type: ignore[no-untyped-def]
    """Every wait is short here: on a busy machine a daemon may take a second to grant."""
    with make_kernel(config="c.Kiwi.waiting_line_delay_s = 600.0") as kernel:
        kernel.check("import tripgpu")
        assert kernel.check("tripgpu.use()").displays() == []
    assert len(daemon.received(Acquire)) == 1


def test_interrupt_while_waiting(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    daemon.grants = False
    cell = gpu_kernel.send("print('before')\ntripgpu.use('never')")
    queued = gpu_kernel.send("print('queued')")
    daemon.await_received(Acquire, 2)
    gpu_kernel.until(lambda: any(cell.displays()), "the waiting line")
    gpu_kernel.interrupt()
    gpu_kernel.finish(cell)
    assert (cell.status, cell.error) == ("error", "KeyboardInterrupt")
    assert "while waiting for the GPU" in cell.traceback
    assert cell.traceback.count("\n") == 0
    assert gpu_kernel.finish(queued).status == "aborted"
    assert daemon.await_received(Withdraw)
    daemon.grants = True
    assert gpu_kernel.check("tripgpu.uses").result == "[]"


def test_interrupt_of_an_async_cell_while_waiting(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    daemon.grants = False
    cell = gpu_kernel.send("import asyncio\nawait asyncio.sleep(0)\ntripgpu.use('never')")
    daemon.await_received(Acquire, 2)
    gpu_kernel.until(lambda: any(cell.displays()), "the waiting line")
    gpu_kernel.interrupt()
    gpu_kernel.finish(cell)
    assert (cell.status, cell.error) == ("error", "KeyboardInterrupt")
    assert daemon.await_received(Withdraw)
    daemon.grants = True
    assert gpu_kernel.check("await asyncio.sleep(0, tripgpu.uses)").result == "[]"


def test_an_async_cell_does_not_hold_up_the_loop(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    ticked = gpu_kernel.directory / "ticked"
    gpu_kernel.check("import asyncio, pathlib")
    daemon.grants = False
    cell = gpu_kernel.send(
        "async def tick():\n"
        "    while True:\n"
        f"        pathlib.Path({str(ticked)!r}).touch()\n"
        "        await asyncio.sleep(0.02)\n"
        "ticker = asyncio.create_task(tick())\n"
        "await asyncio.sleep(0)\n"
        "tripgpu.use()\n"
        "ticker.cancel()"
    )
    daemon.await_received(Acquire, 2)
    gpu_kernel.until(lambda: any(cell.displays()), "the waiting line")
    for _ in range(3):
        ticked.unlink(missing_ok=True)
        gpu_kernel.until(ticked.exists, "the loop goes on")
    grant(daemon)
    gpu_kernel.finish(cell)
    assert cell.status == "ok", cell.traceback
    daemon.await_received(EndBurst, 2)


GPU_CELLS = (
    "%time tripgpu.use()",
    "%%time\ntripgpu.use()",
    "%timeit -n 3 -r 2 tripgpu.use()",
    "%%timeit -n 3 -r 2\ntripgpu.use()",
    "%%capture out\ntripgpu.use()",
    "%run script.py",
    "%%kiwi gpu\n1 + 1",
    "%%kiwi gpu\n%%time\n1 + 1",
    "1/0 if tripgpu.use() else 0",
    "tripgpu.use()\nsys.exit()",
    "for i in range(3):\n    tripgpu.use(i)",
    "from __future__ import annotations\ntripgpu.use()",
    "'''doc'''\ntripgpu.use()",
)


def test_one_burst_around_everything(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    (gpu_kernel.directory / "script.py").write_text("import tripgpu\ntripgpu.use('script')\n")
    for bursts, code in enumerate(GPU_CELLS, start=2):
        gpu_kernel.run(code)
        daemon.await_received(EndBurst, bursts)
        gpu_kernel.check("x = 1")
        assert held(daemon) == (bursts, bursts), code


CPU_CELLS = (
    "",
    "   \n",
    "# only a comment",
    "x = 1",
    "!ls",
    "!python -m calendar",
    "%%bash\npython -m calendar",
    "%time sum(range(10))",
    "%%time\nx = 1",
    "%%capture\nprint(1)",
    "%pwd",
    "%%kiwi cpu\ntripgpu.use()",
    "this is not python",
    "get_ipython().run_line_magic('pwd', '')",
    "import asyncio\nawait asyncio.sleep(0)",
    "1/0",
    "%kiwi status",
    "%kiwi why tripgpu.use()",
    "import tripgpu",
    "def f():\n    return tripgpu.use()",
)


def test_cpu_cells_do_not_ask(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    daemon.grants = False
    for code in CPU_CELLS:
        gpu_kernel.run(code)
        assert held(daemon) == (1, 1), code


CLOCK = """%%kiwi cpu
import types
import IPython.core.magics.execution as execution
execution.time = types.SimpleNamespace(time=lambda: float(open({!r}).read()))
"""
"""A clock for ``%%time`` that shows what is in a file."""


def test_magics_do_not_count_the_wait(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    shown = gpu_kernel.directory / "clock"
    shown.write_text("0")
    gpu_kernel.check(CLOCK.format(str(shown)))
    daemon.grants = False
    cell = gpu_kernel.send("%%time\ntripgpu.use()")
    daemon.await_received(Acquire, 2)
    gpu_kernel.until(lambda: any(cell.displays()), "the waiting line")
    assert "Wall time" not in cell.text
    shown.write_text("600")
    grant(daemon)
    gpu_kernel.finish(cell)
    assert "Wall time: 0 ns\n" in cell.text


def test_results_and_line_numbers_are_those_of_the_cell(gpu_kernel: Kernel) -> None:
    assert gpu_kernel.check("%%kiwi gpu\n40 + 2").result == "42"
    assert gpu_kernel.check("%%kiwi gpu\nimport asyncio\nawait asyncio.sleep(0, 7)").result == "7"
    assert "Wall time" in gpu_kernel.check("%%kiwi gpu\n%%time\nx = 3").text
    cell = gpu_kernel.run("%%kiwi gpu\ny = 1\n1/0")
    assert "----> 3 " in _plain(cell.traceback)


def test_reset_keeps_the_cell_hook(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    gpu_kernel.check("%reset -f")
    gpu_kernel.check("import tripgpu\ntripgpu.use()")
    assert len(daemon.await_received(EndBurst, 2)) == 2


def test_silent_and_unstored_cells(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    gpu_kernel.check("tripgpu.use()", silent=True, store_history=False)
    daemon.await_received(EndBurst, 2)
    gpu_kernel.check("tripgpu.use()", store_history=False)
    daemon.await_received(EndBurst, 3)
    assert held(daemon) == (3, 3)


def test_input_requests(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    cell = gpu_kernel.send("tripgpu.use()\nprint(input('?'))", allow_stdin=True)
    gpu_kernel.until(lambda: cell.of_type("input_request"), "the question")
    gpu_kernel.client.input("answer")
    assert gpu_kernel.finish(cell).text == "answer\n"
    daemon.await_received(EndBurst, 2)


def test_threads_that_live_on_linger(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    gpu_kernel.check(
        "import threading\nstop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait)\nthread.start()\ntripgpu.use()"
    )
    lingering = daemon.await_received(EndBurst, 2)[-1]
    assert lingering.lingering
    gpu_kernel.check("%%kiwi cpu\nstop.set()")
    ended = daemon.await_received(EndBurst, 3)[-1]
    assert (ended.burst, ended.lingering) == (lingering.burst, False)


def test_asyncio_tasks_that_live_on_linger(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    go_on = gpu_kernel.directory / "go-on"
    gpu_kernel.check(
        "import asyncio, os\nasync def go():\n"
        f"    while not os.path.exists({str(go_on)!r}): await asyncio.sleep(0.02)\n"
        "    tripgpu.use('task')\n"
        "task = asyncio.create_task(go())\nawait asyncio.sleep(0)"
    )
    assert daemon.await_received(EndBurst, 2)[-1].lingering
    go_on.touch()
    assert not daemon.await_received(EndBurst, 3)[-1].lingering
    assert gpu_kernel.check("tripgpu.uses").result == "['task']"


def test_a_new_burst_while_the_last_one_lingers(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    gpu_kernel.check(
        "import threading\nstop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait)\nthread.start()\ntripgpu.use()"
    )
    first = daemon.await_received(EndBurst, 2)[-1]
    gpu_kernel.check("tripgpu.use()")
    second = daemon.await_received(EndBurst, 3)[-1]
    assert second.burst == first.burst + 1
    assert second.lingering
    gpu_kernel.check("%%kiwi cpu\nstop.set()")
    assert not daemon.await_received(EndBurst, 4)[-1].lingering


def test_a_forked_child_has_nothing_to_do_with_the_lease(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    cell = gpu_kernel.check(
        "tripgpu.use()\n"
        "import warnings\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('ignore')\n"
        "    pid = os.fork()\n"
        "if pid == 0:\n"
        "    __kiwi_wait__(1)\n"
        "    os._exit(7)\n"
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    )
    assert cell.result == "7"
    daemon.await_received(EndBurst, 2)
    assert not daemon.peer.ended
    gpu_kernel.check("tripgpu.use()")
    daemon.await_received(EndBurst, 3)


def test_subshells_share_one_lease(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    info = gpu_kernel.ask("kernel_info_request", {})["content"]
    if "kernel subshells" not in info.get("supported_features", []):
        pytest.skip("this ipykernel has no subshells")
    made = gpu_kernel.ask("create_subshell_request", {}, control=True)
    subshell = made["content"]["subshell_id"]
    daemon.grants = False
    main = gpu_kernel.send("tripgpu.use('main')")
    daemon.await_received(Acquire, 2)
    other = gpu_kernel.send("tripgpu.use('subshell')", subshell=subshell)
    gpu_kernel.until(lambda: any(main.displays()) and any(other.displays()), "both lines")
    gpu_kernel.interrupt()
    gpu_kernel.finish(main)
    assert main.error == "KeyboardInterrupt"
    assert not gpu_kernel.finished(other)
    assert daemon.received(Withdraw) == []
    grant(daemon)
    assert gpu_kernel.finish(other).result == "'subshell'"
    daemon.await_received(EndBurst, 2)
    assert held(daemon) == (2, 2)


def test_completion_while_a_subshell_waits_is_not_held_up(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    info = gpu_kernel.ask("kernel_info_request", {})["content"]
    if "kernel subshells" not in info.get("supported_features", []):
        pytest.skip("this ipykernel has no subshells")
    made = gpu_kernel.ask("create_subshell_request", {}, control=True)
    daemon.grants = False
    cell = gpu_kernel.send("tripgpu.use()", subshell=made["content"]["subshell_id"])
    daemon.await_received(Acquire, 2)
    reply = gpu_kernel.ask("complete_request", {"code": "tripgpu.us", "cursor_pos": 10})
    assert reply["content"]["matches"]
    grant(daemon)
    gpu_kernel.finish(cell)


def test_a_daemon_that_goes_away_lets_the_cell_run(daemon: ScriptedDaemon, make_kernel) -> None:  # type: ignore[no-untyped-def]
    with make_kernel() as kernel:
        kernel.check("import tripgpu\ntripgpu.use()")
        kernel.set_daemon_grace(0.5)
        daemon.grants = False
        cell = kernel.send("tripgpu.use()")
        daemon.await_received(Acquire, 2)
        kernel.until(lambda: any(cell.displays()), "the waiting line")
        daemon.stop()
        kernel.finish(cell)
        assert cell.result == "'use'"
        assert "runs without waiting" in cell.stream("stderr")
        daemon.grants = True
        daemon.start()


def test_memory_that_a_daemon_left_out_comes_back_with_the_next(  # type: ignore[no-untyped-def]
    daemon: ScriptedDaemon, make_kernel
) -> None:
    """Until then its calls wait, so a cell is not said to run without waiting."""
    left_out = UserNotice(notice=Notice.PAGE_IN_REFUSED, text=f"{DAEMON_ENDED} there.", remedy="")
    with make_kernel() as kernel:
        kernel.check("import tripgpu\ntripgpu.use()")
        daemon.peer.say(left_out)
        assert DAEMON_ENDED in kernel.check("tripgpu.use()").stream("stderr")
        for told in (False, True):
            kernel.set_daemon_grace(0.5)
            daemon.stop()
            cell = kernel.check("tripgpu.use()")
            assert ("runs without waiting" in cell.stream("stderr")) is told
            kernel.set_daemon_grace(60.0)
            daemon.start()
            assert not kernel.check("tripgpu.use()").stream("stderr")


def test_death_while_waiting_frees_the_place(gpu_kernel: Kernel, daemon: ScriptedDaemon) -> None:
    daemon.grants = False
    gpu_kernel.send("tripgpu.use()")
    daemon.await_received(Acquire, 2)
    gpu_kernel.kill()
    gpu_kernel.until(lambda: daemon.peers[0].ended, "the end of the connection")


def _plain(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_same_text_again_is_judged_by_what_its_names_mean_now(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    gpu_kernel.check("z = 1")
    gpu_kernel.check("str(z)")
    gpu_kernel.check("str(z)")
    asked = len(daemon.received(Acquire))
    gpu_kernel.check("z = tripgpu.Tensor()")
    gpu_kernel.check("str(z)")
    daemon.await_received(Acquire, asked + 2)


SWAPS = """
import ast
class Swaps(ast.NodeTransformer):
    def visit_Constant(self, node):
        made = ast.parse("tripgpu.use()", mode="eval").body
        return made if node.value == "swap" else node
get_ipython().ast_transformers.insert(0, Swaps())
"""


def test_what_another_transformer_made_of_the_same_text_is_looked_at(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    gpu_kernel.check("a = 'swap'")
    gpu_kernel.check("a = 'swap'")
    gpu_kernel.check(SWAPS)
    asked = len(daemon.received(Acquire))
    assert gpu_kernel.check("a = 'swap'\nprint(a)").text == "use\n"
    gpu_kernel.check("a = 'swap'")
    daemon.await_received(Acquire, asked + 2)


def test_a_transformer_that_changes_a_cell_and_then_fails_does_not_go_unseen(
    gpu_kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    gpu_kernel.check("a = 'swap'")
    fails = """
class Fails(Swaps):
    def visit(self, node):
        changed = super().visit(node)
        if isinstance(node, ast.Module):
            raise ValueError("after the change")
        return changed
get_ipython().ast_transformers[:1] = [Fails()]
"""
    gpu_kernel.check(SWAPS + fails)
    asked = len(daemon.received(Acquire))
    gpu_kernel.check("a = 'swap'")
    daemon.await_received(Acquire, asked + 1)
