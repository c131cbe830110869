"""Tests of which daemon a kernel connects to, when, and of kernels without a daemon."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import kiwi_emulator as emulator
from kiwi_core.states import Notice
from kiwi_core.wire.messages import (
    PROTOCOL,
    Acquire,
    Emulation,
    EndBurst,
    Error,
    Goodbye,
    Granted,
    Hello,
    Release,
    UserNotice,
    Welcome,
)
from tests.client.scripted_daemon import ScriptedDaemon
from tests.support.kernels import KERNEL_PYTHON

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kiwi_core.wire.messages import ClientMessage
    from tests.client.scripted_daemon import Peer
    from tests.support.kernels import Kernel


def test_without_gpu_and_daemon_nothing_happens(make_kernel: Any) -> None:
    with make_kernel() as kernel:
        cell = kernel.check("import tripgpu\ntripgpu.use()")
        assert cell.stream("stderr") == ""
        assert "No Kiwi daemon" in (kernel.check("%kiwi status").result or "")
        assert "not looked at a cell" in kernel.check("%kiwi why").text
        assert "%kiwi release" in kernel.check("%kiwi help").text
        assert "nothing to release" in kernel.check("%kiwi release").text
        assert "kiwi" not in kernel.log().lower()


def test_switched_off_by_the_environment(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    with make_kernel(KIWI_DISABLE="1") as kernel:
        kernel.check("import tripgpu\ntripgpu.use()")
        assert daemon.peers == []
        assert "off in this kernel" in (kernel.check("%kiwi status").result or "")


def test_switched_off_by_a_trait(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    with make_kernel(config="c.Kiwi.enabled = False") as kernel:
        kernel.check("import tripgpu\ntripgpu.use()")
        assert daemon.peers == []


XLA = "import os; os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE')"


def test_frameworks_take_memory_as_they_need_it(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    with make_kernel() as kernel:
        assert kernel.check(XLA).result == "'false'"
        kernel.check("import tripgpu\ntripgpu.use()")
        assert "as they need it" in (kernel.check("%kiwi status").result or "")
    with make_kernel(KIWI_PREALLOCATE="1") as kernel:
        assert kernel.check(XLA).result is None
        kernel.check("import tripgpu\ntripgpu.use()")
        assert "as they need it" not in (kernel.check("%kiwi status").result or "")
    with make_kernel(KIWI_DISABLE="1") as kernel:
        assert kernel.check(XLA).result is None


def test_a_daemon_that_cannot_be_started_is_said_once(make_kernel: Any) -> None:
    with make_kernel(KIWI_DAEMON_ARGS="--no-such-option") as kernel:
        cell = kernel.check("import tripgpu\ntripgpu.use()")
        assert cell.result == "'use'"
        assert "runs without Kiwi" in cell.stream("stderr")
        assert kernel.check("tripgpu.use()").stream("stderr") == ""


@pytest.mark.parametrize("cell", ["tripgpu.use()", "await asyncio.sleep(0); tripgpu.use()"])
def test_a_full_daemon_is_waited_for_and_never_done_without(
    daemon: ScriptedDaemon, make_kernel: Any, cell: str
) -> None:
    turned_away = 0

    def full_at_first(peer: Peer, message: ClientMessage) -> None:
        nonlocal turned_away
        if isinstance(message, Hello) and turned_away < 2:
            turned_away += 1
            peer.say(Error(code="too-many-sessions", message="It is full.", fatal=True))
            peer.drop()
        else:
            daemon.obey(peer, message)

    daemon.script = full_at_first
    with make_kernel() as kernel:
        ran = kernel.check(f"import asyncio, tripgpu\n{cell}")
        assert "'use'" in (ran.result or "")
        assert "It is full." in ran.stream("stderr")
        assert "without" not in ran.stream("stderr")
    assert turned_away == 2
    assert daemon.received(Acquire), "it ran with the lease"


def test_a_dead_socket_lets_the_cell_run(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    daemon.stop()
    with make_kernel() as kernel:
        cell = kernel.check("import tripgpu\ntripgpu.use()")
        assert cell.result == "'use'"
        assert "Kiwi:" in cell.stream("stderr")
    daemon.start()


def test_names(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    with make_kernel(JPY_SESSION_NAME="/home/me/deep/train.ipynb") as kernel:
        kernel.check("import tripgpu")
    with make_kernel() as kernel:
        kernel.check("__vsc_ipynb_file__ = '/x/vs code.ipynb'")
        kernel.check("import tripgpu")
    # For a session without a name, the server gives the folder.
    with make_kernel(JPY_SESSION_NAME="/home/me/deep/") as unnamed:
        unnamed.check("import tripgpu")
    assert [(hello.name, hello.folder) for hello in daemon.received(Hello)] == [
        ("train.ipynb", "/home/me/deep"),
        ("vs code.ipynb", "/x"),
        (f"kernel {unnamed.pid}", ""),
    ]


class OneOfTwo(ScriptedDaemon):
    """A scripted daemon of the GPU that its socket is named after."""

    def welcome(self, protocol: int = PROTOCOL) -> Welcome:
        return msgspec.structs.replace(super().welcome(protocol), gpu_uuid=self.path.stem)


@pytest.fixture
def two_daemons(sockets: Path) -> Iterator[list[ScriptedDaemon]]:
    daemons = [OneOfTwo(sockets / f"{name}.sock") for name in ("GPU-1", "GPU-2")]
    for daemon in daemons:
        daemon.start()
    yield [*daemons]
    for daemon in daemons:
        daemon.stop()
        assert daemon.faults == []


@pytest.mark.parametrize(
    ("visible", "kiwi_gpu", "trait", "leased", "seen"),
    [
        (None, "", "", "GPU-1", "GPU-1"),  # Kiwi's choice
        ("GPU-2", "", "", "GPU-2", "GPU-2"),  # the user's choice, or the server's placement
        ("GPU-1", "GPU-2", "", "GPU-2", "GPU-2"),  # placed, but the user named another GPU for Kiwi
        ("GPU-1", "", "GPU-2", "GPU-2", "GPU-2"),
        (None, "GPU-2", "", "GPU-2", "GPU-2"),
        ("0,1", "GPU-2", "", "GPU-2", "0,1"),  # Kiwi leaves a list alone
        ("", "", "", "GPU-1", ""),
    ],
)
def test_cuda_sees_the_gpu_that_is_leased(
    two_daemons: list[ScriptedDaemon], make_kernel: Any, visible: str | None, kiwi_gpu: str,
    trait: str, leased: str, seen: str,
) -> None:  # fmt: skip
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if kiwi_gpu:
        env["KIWI_GPU"] = kiwi_gpu
    config = f"c.Kiwi.gpu = {trait!r}" if trait else ""
    with make_kernel(config=config, **env) as kernel:
        kernel.check("import tripgpu\ntripgpu.use()")
        said = kernel.check("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])").text
    assert said.strip() == seen
    assert [one.path.stem for one in two_daemons if one.received(Acquire)] == [leased]


def test_a_notebook_on_a_mig_instance_is_told_once_and_runs(
    daemon: ScriptedDaemon, make_kernel: Any
) -> None:
    with make_kernel(CUDA_VISIBLE_DEVICES="MIG-1") as kernel:
        said = kernel.check("import tripgpu\ntripgpu.use()").stream("stderr")
        assert "MIG-1 is a MIG instance" in said
        assert "MIG" not in kernel.check("tripgpu.use()").stream("stderr")
    assert not daemon.received(Acquire)


def test_cuda_sees_only_the_gpu_that_is_served(sockets: Path, make_kernel: Any) -> None:
    """The machine may have other GPUs, and CUDA's first one may be one of them."""
    daemon = OneOfTwo(sockets / "GPU-2.sock")
    daemon.start()
    with make_kernel() as kernel:
        kernel.check("import tripgpu\ntripgpu.use()")
        said = kernel.check("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])").text
    daemon.stop()
    assert said.strip() == "GPU-2"


def test_off_leaves_and_on_comes_back(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu\ntripgpu.use()")
    kernel.check("%kiwi off")
    daemon.await_received(Goodbye)
    kernel.check("tripgpu.use()")
    assert len(daemon.received(Acquire)) == 1
    kernel.check("%kiwi on")
    kernel.check("tripgpu.use()")
    daemon.await_received(Acquire, 2)
    assert len(daemon.received(Hello)) == 2


def test_release(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu")
    assert "being moved out" in kernel.check("%kiwi release").text
    daemon.await_received(Release)


def test_status_as_text_and_html(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu")
    shown = kernel.check("%kiwi status").of_type("execute_result")[0]["content"]["data"]
    assert "Test GPU" in shown["text/plain"]
    assert "quantum 30 s" in shown["text/plain"]
    assert "policy round-robin" in shown["text/plain"]
    assert "<table" in shown["text/html"]


def test_kiwi_why_explains_a_cell(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu\nt = tripgpu.Tensor()")
    kernel.check("x = 1\nprint(t)")
    why = kernel.check("%kiwi why").text
    assert "takes its turn before it runs: line 2: `t`: it is a tripgpu.Tensor" in why
    assert "runs at once" in kernel.check("%kiwi why x + 1").text
    assert "takes its turn before it runs: line 2" in kernel.check("%kiwi why").text
    assert "Did you mean `%kiwi status`" in kernel.check("%kiwi stauts").text
    assert "Did you mean `%%kiwi gpu`" in kernel.check("%%kiwi gpuu\nx").text


def test_a_lost_session_is_told_in_the_notebook(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu")

    def lose(peer: Peer, message: ClientMessage) -> None:
        if isinstance(message, Acquire):
            peer.say(
                UserNotice(notice=Notice.LOST, text="The memory is lost.", remedy="Restart."),
                Granted(burst=message.burst, quantum_s=1.0),
            )
        else:
            daemon.obey(peer, message)

    daemon.script = lose
    cell = kernel.run("tripgpu.use()")
    assert cell.error == "GpuMemoryLost"
    assert "Kiwi: The memory is lost. Restart." in cell.stream("stderr")
    assert kernel.run("tripgpu.use()").error == "GpuMemoryLost", "again, in each cell"
    assert kernel.check("%%kiwi cpu\ntripgpu.use()").result == "'use'", "what can be saved, can be"
    assert "The memory is lost." in (kernel.check("%kiwi status").result or "")


@pytest.fixture
def fake_driver(sockets: Path) -> Path:
    """Return a shared library with the driver's name and no function that is called."""
    import sysconfig

    compiler = sysconfig.get_config_var("CC").split()[0]
    place = sockets / "libcuda.so.1"
    (sockets / "empty.c").write_text("int kiwi_test_marker(void) { return 42; }\n")
    made = subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(place),
            str(sockets / "empty.c"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no C compiler")
    return place


def _emulating(daemon: ScriptedDaemon, library: Path) -> None:
    plain = daemon.welcome

    def welcome(protocol: int = 1) -> Welcome:
        said = plain()
        emulation = Emulation(
            libcuda=str(library), libnvml=str(library), env={"KIWI_TEST_MARKER": "set"}
        )
        return Welcome(
            protocol=said.protocol,
            daemon=said.daemon,
            gpu_uuid=said.gpu_uuid,
            gpu_index=0,
            gpu_name="Emulated",
            session=said.session,
            emulation=emulation,
        )

    daemon.welcome = welcome  # type: ignore[method-assign]


def test_an_emulated_driver_is_loaded_before_the_first_call(
    kernel: Kernel, daemon: ScriptedDaemon, fake_driver: Path
) -> None:
    _emulating(daemon, fake_driver)
    # By this name, the loader finds Kiwi's gate, which loads the driver at the first call.
    cell = kernel.check(
        "import tripgpu, ctypes, os\ndriver = ctypes.CDLL('libcuda.so.1')\n"
        "driver.cuInit(0)\nhasattr(driver, 'kiwi_gate_start')"
    )
    assert cell.result == "True"
    cell_2 = kernel.check(f"ctypes.CDLL({str(fake_driver)!r}, os.RTLD_NOLOAD).kiwi_test_marker()")
    assert cell_2.result == "42"
    assert not cell.stream("stderr"), "status and sidebar say so; a cell's output is its user's"
    assert kernel.check("os.environ['KIWI_TEST_MARKER']").result == "'set'"


def test_two_drivers_do_not_mix(
    kernel: Kernel, daemon: ScriptedDaemon, fake_driver: Path, library: Path
) -> None:
    other = library / "libcuda.so.1"
    other.write_bytes(fake_driver.read_bytes())
    _emulating(daemon, fake_driver)
    kernel.check(f"%%kiwi cpu\nimport ctypes\nctypes.CDLL({str(other)!r})")
    cell = kernel.check("import tripgpu\ntripgpu.use()")
    assert cell.result == "'use'"
    assert "cannot be mixed" in cell.stream("stderr")
    assert kernel.check("tripgpu.use()").stream("stderr") == ""
    assert daemon.received(Acquire) == []


INSPECT_PATIENCE = """%%kiwi cpu
import kiwi_jupyter.kernel.shell_hooks as hooks
hooks.INSPECT_PATIENCE_S = {}
"""


def test_code_that_is_no_cell(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu\nt = tripgpu.Tensor()")
    daemon.await_received(EndBurst)
    cell = kernel.check("1", user_expressions={"a": "tripgpu.use()", "b": "1 + 1"})
    assert cell.reply is not None
    answers = cell.reply["content"]["user_expressions"]
    assert answers["a"]["data"]["text/plain"] == "'use'"
    daemon.await_received(EndBurst, 2)
    kernel.check("1", user_expressions={"b": "1 + 1"})
    assert len(daemon.received(Acquire)) == 2
    kernel.check(INSPECT_PATIENCE.format(600.0))  # the machine may be busy
    reply = kernel.ask("inspect_request", {"code": "t", "cursor_pos": 1, "detail_level": 0})
    assert "Tensor()" in reply["content"]["data"]["text/plain"]
    daemon.await_received(EndBurst, 3)
    daemon.grants = False
    kernel.check(INSPECT_PATIENCE.format(0.5))
    reply = kernel.ask("inspect_request", {"code": "t", "cursor_pos": 1, "detail_level": 0})
    assert "another notebook has the GPU" in reply["content"]["data"]["text/plain"]
    assert kernel.check("1 + 1").result == "2"


def test_widget_messages_take_the_lease_where_there_is_no_gate(
    kernel: Kernel, daemon: ScriptedDaemon
) -> None:
    driver = str(emulator.build().libcuda)
    kernel.check(
        f"import tripgpu, ctypes\nctypes.CDLL({driver!r})\ntripgpu.use()\n"
        "def opened(comm, message):\n"
        "    comm.on_msg(lambda m: tripgpu.use('comm'))\n"
        "get_ipython().kernel.comm_manager.register_target('test', opened)"
    )
    daemon.await_received(EndBurst)
    kernel.check("%%kiwi cpu\ntripgpu.uses.clear()")
    client = kernel.client
    opened = client.session.msg("comm_open", {"comm_id": "c1", "target_name": "test", "data": {}})
    client.shell_channel.send(opened)
    kernel.to_widget("c1")
    assert kernel.check("%%kiwi cpu\ntripgpu.uses").result == "['comm']"
    daemon.await_received(EndBurst, 2)
    # A callback that waits says so, below its widget.
    daemon.grants = False
    callback = kernel.to_widget("c1")
    kernel.until(lambda: callback.of_type("comm_msg"), "the line below the widget")
    daemon.peer.say(Granted(burst=daemon.received(Acquire)[-1].burst, quantum_s=30.0))
    assert kernel.check("%%kiwi cpu\ntripgpu.uses").result == "['comm', 'comm']"
    first, *_, last = [message["content"]["data"] for message in callback.of_type("comm_msg")]
    assert first["widget"] == "c1"
    assert "1st in line" in first["html"]
    assert last["html"] == ""


def test_unload_leaves_no_trace(kernel: Kernel, daemon: ScriptedDaemon) -> None:
    kernel.check("import tripgpu\ntripgpu.use()")
    kernel.check("%unload_ext kiwi_jupyter.kernel")
    kernel.check("tripgpu.use()")
    assert len(daemon.received(Acquire)) == 1
    kernel.check("%load_ext kiwi_jupyter.kernel")
    kernel.check("%load_ext kiwi_jupyter.kernel")
    kernel.check("tripgpu.use()")
    daemon.await_received(Acquire, 2)
    assert "Kiwi" in kernel.check("%kiwi help").text


def test_loading_imports_nothing_heavy(make_kernel: Any) -> None:
    """IPython and asyncio are already loaded in a kernel. (cuda-bindings 12 has a .pth file that
    imports cuda at the start of each Python.)"""
    program = (
        "import IPython.core.interactiveshell as i, ipykernel.kernelapp, sys\n"
        "shell = i.InteractiveShell.instance(); before = set(sys.modules)\n"
        "shell.extension_manager.load_extension('kiwi_jupyter.kernel')\n"
        "print([m for m in ('kiwi_core.client.client', 'msgspec', 'kiwi_emulator',"
        " 'cuda', 'pynvml', 'numpy') if m in sys.modules.keys() - before])\n"
    )
    answer = subprocess.run(
        [KERNEL_PYTHON, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "[]\n"
