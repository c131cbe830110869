"""Tests of ``kiwi doctor``: each check on made-up machines, and all of it on this one."""

from __future__ import annotations

import ast
import errno
import inspect
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from scripted_daemon import status_of

from kiwi_core import config
from kiwi_core.cli import doctor
from kiwi_core.cli.checks import finding as finding_module
from kiwi_core.cli.checks import (
    gpu,
    jupyter,
    killers,
    kubernetes,
    machine,
    memory,
    notebook,
    preload,
)
from kiwi_core.cli.checks import sockets as socket_checks
from kiwi_core.cli.checks.finding import Finding, Level, fail, ok
from kiwi_core.cli.terminal import Style
from kiwi_core.errors import CallerError, GpuError
from kiwi_core.gpu.driver import DriverInfo
from kiwi_core.gpu.nvml import GpuInfo
from kiwi_core.preload import Unavailable
from kiwi_core.units import GIB, MIB
from kiwi_core.wire.messages import GetStatus, Hello, OutsideProgram, StatusReport
from kiwi_core.wire.words import LEFT_REMEDY

PTRACE = machine.CAP_SYS_PTRACE
CHECKS = Path(inspect.getfile(finding_module)).parent


@pytest.fixture(scope="module", autouse=True)
def every_row_has_a_planted_fault(request):
    """Fail if a row of the doctor that is not OK is made in no test of this module. Nothing is said
    where only some of the tests run."""
    made: set[tuple[str, int]] = set()
    really = Finding.__init__

    def record(self, *args, **kwargs):
        really(self, *args, **kwargs)
        frame = sys._getframe(2)
        made.add((Path(frame.f_code.co_filename).name, frame.f_lineno))

    Finding.__init__ = record
    yield
    Finding.__init__ = really
    tests = {name for name in vars(request.module) if name.startswith("test_")}
    ran = {
        item.function.__name__ for item in request.session.items if item.module is request.module
    }
    if tests <= ran:
        unplanted = [row for row in rows() if not any(row_is_made(row, one) for one in made)]
        assert unplanted == []


def rows():
    """Return the file, the first and the last line of each call of ``warn`` and ``fail``."""
    return [
        (path.name, node.lineno, node.end_lineno)
        for path in sorted(CHECKS.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("warn", "fail")
    ]


def row_is_made(row, made):
    name, first, last = row
    return made[0] == name and first <= made[1] <= last


def write(root, path: str, text: str):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def a_gpu(**changes) -> GpuInfo:
    fields = {
        "index": 0,
        "uuid": "GPU-1",
        "name": "NVIDIA H100",
        "total_bytes": 80 * GIB,
        "mig": False,
        "persistence": True,
        "driver_version": "580.1",
    }
    return GpuInfo(**{**fields, **changes})


def only(findings) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("name", "release", "level"),
    [
        ("linux", "6.8.0-45-generic", Level.OK),
        ("linux", "5.3", Level.OK),
        ("linux", "4.18.0-553.el8", Level.FAIL),
        ("darwin", "24.1", Level.FAIL),
    ],
)
def test_system(name, release, level):
    assert machine.system(name, release).level is level


def test_python():
    assert machine.python((3, 10)).level is Level.OK
    assert machine.python((3, 9)).level is Level.FAIL


@pytest.mark.parametrize(
    ("uid", "capabilities", "level", "words"),
    [
        (0, PTRACE, Level.OK, "every user"),
        (1000, PTRACE, Level.OK, "every user"),
        (1000, 0, Level.OK, "this user's notebooks only"),
        (0, 0, Level.WARN, "without CAP_SYS_PTRACE"),
    ],
)
def test_rights(uid, capabilities, level, words):
    finding = machine.rights(uid, capabilities)
    assert finding.level is level
    assert words in finding.text


def test_capabilities_are_read_from_proc(tmp_path):
    write(tmp_path, "proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\n")
    assert machine.effective_capabilities(tmp_path) == PTRACE
    assert machine.effective_capabilities(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("scope", "privileged", "level"),
    [
        (None, False, Level.OK),
        ("0", False, Level.OK),
        ("1", False, Level.WARN),
        ("1", True, Level.OK),
        ("3", True, Level.WARN),
    ],
)
def test_ptrace_scope(tmp_path, scope, privileged, level):
    if scope is not None:
        write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", scope + "\n")
    finding = only(machine.yama(tmp_path, privileged=privileged))
    assert finding.level is level
    assert bool(finding.remedy) == (level is not Level.OK)


def test_a_pid_namespace_of_its_own_is_told(tmp_path):
    write(tmp_path, "proc/self/ns/pid", "")  # not the host's inode
    finding = only(machine.pid_namespace(tmp_path))
    assert finding.level is Level.WARN
    assert "--pid=host" in finding.remedy


NO_DRIVER = GpuError("no-driver", "No CUDA driver could be loaded.", "Install it.")


def test_no_gpu_at_all_is_a_clear_statement_and_no_failure():
    finding = gpu.no_driver(NO_DRIVER, hardware=False)
    assert finding.level is Level.WARN
    assert "no NVIDIA GPU" in finding.text
    assert "--emulate" in finding.remedy


def test_a_gpu_without_a_working_driver_is_a_failure():
    finding = gpu.no_driver(NO_DRIVER, hardware=True)
    assert finding.level is Level.FAIL
    assert finding.remedy == "Install it."


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_hardware_is_seen_on_the_bus(tmp_path, vendor, kind, found):
    device = "sys/bus/pci/devices/0000:01:00.0"
    write(tmp_path, f"{device}/vendor", vendor + "\n")
    write(tmp_path, f"{device}/class", kind + "\n")
    assert gpu.has_nvidia_hardware(tmp_path) == found


def test_a_driver_that_cannot_checkpoint_is_a_failure():
    assert gpu.checkpoint(DriverInfo((13, 0), "lib", True)).level is Level.OK
    finding = gpu.checkpoint(DriverInfo((12, 4), "lib", False, "Too old."))
    assert finding.level is Level.FAIL
    assert "Too old." in finding.text
    assert "570" in finding.remedy


def test_the_emulated_driver_is_told_apart_from_a_real_one(tmp_path):
    import kiwi_emulator as emulator

    assert gpu.is_emulated(str(emulator.build().libcuda))
    other = tmp_path / "libcuda.so.1"
    other.write_bytes(b"\x7fELF")
    assert not gpu.is_emulated(str(other))
    assert gpu.library(str(other)).level is Level.OK
    emulated = gpu.library(str(emulator.build().libcuda))
    assert emulated.level is Level.WARN
    assert "LD_LIBRARY_PATH" in emulated.remedy


@pytest.mark.parametrize(
    ("changes", "level", "remedy"),
    [
        ({}, None, ""),
        ({"persistence": None}, None, ""),
        ({"mig": True}, Level.FAIL, "-mig 0"),
        ({"persistence": False}, Level.WARN, "-pm 1"),
    ],
)
def test_each_gpu(changes, level, remedy):
    first, *others = gpu.one(a_gpu(**changes))
    assert first.level is Level.OK
    assert [finding.level for finding in others] == ([level] if level else [])
    assert all(remedy in finding.remedy for finding in others)


def test_mps_is_found_by_its_process_or_its_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    write(tmp_path, "proc/12/comm", "python\n")
    assert list(gpu.mps(tmp_path)) == []
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert only(gpu.mps(tmp_path)).level is Level.WARN
    write(tmp_path, "proc/13/comm", "nvidia-cuda-mps\n")
    assert only(gpu.mps(tmp_path)).level is Level.FAIL


def test_ram_smaller_than_a_gpu_is_told():
    assert memory.budget(300 * GIB, 290 * GIB, [a_gpu()]).level is Level.OK
    assert memory.budget(32 * GIB, 30 * GIB, []).level is Level.OK
    finding = memory.budget(32 * GIB, 30 * GIB, [a_gpu()])
    assert finding.level is Level.WARN
    assert "80 GiB" in finding.text


def test_disk_room(tmp_path):
    assert memory.disk(tmp_path, memory.DISK_MIN_BYTES).level is Level.OK
    assert "journals" in memory.disk(tmp_path, 50 * MIB).text
    assert memory.disk(tmp_path, 0).level is Level.FAIL
    assert memory.existing(tmp_path / "not" / "yet") == tmp_path


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("[always] madvise never\n", "always; Kiwi's library and the driver get them"),
        ("always [madvise] never\n", "madvise; Kiwi's library asks for them"),
        ("always madvise [never]\n", "never; neither"),
        (None, "not known; it is not known who gets them here"),
    ],
)
def test_huge_pages_are_told_without_advice(tmp_path, setting, words):
    """What they do for a real driver is not measured yet."""
    file = tmp_path / memory.TRANSPARENT_HUGE_PAGES
    file.parent.mkdir(parents=True)
    if setting is not None:
        file.write_text(setting)
    found = memory.huge_pages(tmp_path)
    assert (found.level, found.remedy) == (Level.OK, "")
    assert words in found.text


def test_shared_memory_is_no_disk_for_journals(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    (found,) = [one for one in memory.check([], [tmp_path.parent]) if str(tmp_path) in one.text]
    assert (found.area, found.level) == ("/dev/shm", Level.OK)
    full = memory.shared_memory(memory.SHARED_MEMORY_MIN_BYTES - 1)
    assert (full.area, full.level) == ("/dev/shm", Level.WARN)
    assert "journals" not in full.text
    assert "--shm-size" in full.remedy
    assert "--state-dir" not in full.remedy
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "none")
    assert "/dev/shm" not in [one.area for one in memory.check([], [tmp_path])]


def ownership(path) -> Finding:
    return socket_checks.ownership(path, path.lstat())


def test_the_socket_directory_is_ours_alone(tmp_path, monkeypatch):
    directory = tmp_path / "sockets"
    directory.mkdir(mode=0o700)
    assert ownership(directory).level is Level.OK
    directory.chmod(0o777)
    assert "chmod go-w" in ownership(directory).remedy
    directory.chmod(0o1777)
    assert ownership(directory).level is Level.FAIL
    link = tmp_path / "link"
    link.symlink_to(directory)
    assert ownership(link).level is Level.FAIL
    directory.chmod(0o700)
    us = os.getuid()
    if us == 0:
        os.chown(directory, 12345, 12345)
    else:  # only root can give a directory away
        monkeypatch.setattr(os, "getuid", lambda: us + 1)
    assert "another user" in ownership(directory).text


@pytest.mark.parametrize(
    ("error", "words", "remedy"),
    [
        (errno.ENOLCK, "cannot be locked", "no locks"),
        (errno.EOPNOTSUPP, "cannot be locked", "no locks"),
        (errno.ENOSPC, "No space left", "Make room"),
        (errno.EROFS, "mounted read-only", "can be written"),
        (errno.EACCES, "Permission denied", "of your own"),
    ],
)
def test_a_file_system_on_which_no_daemon_can_start(tmp_path, monkeypatch, error, words, remedy):
    assert [one.level for one in socket_checks.locks(tmp_path)] == []
    assert list(tmp_path.iterdir()) == []

    def refuse(*_args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(socket_checks.fcntl, "flock", refuse)
    finding = only(socket_checks.locks(tmp_path))
    assert finding.level is Level.FAIL
    assert words in finding.text
    assert remedy in finding.remedy


def test_a_socket_directory_that_cannot_be_looked_at(tmp_path, monkeypatch):
    def refuse(_path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "lstat", refuse)
    finding = only(socket_checks.directory(Path("/run/kiwi")))
    assert "cannot be read" in finding.text
    assert "permissions" in finding.remedy


def test_a_socket_of_a_gpu_that_nobody_may_use_is_told(tmp_path, monkeypatch):
    def refuse(*_args):
        raise CallerError("no-gpu", "No such GPU.", "Look at kiwi status.")

    monkeypatch.setattr("kiwi_core.client.discover", refuse)
    assert only(socket_checks.daemons(tmp_path)) == fail(
        "daemon", "No such GPU.", "Look at kiwi status."
    )


def test_kiwi_is_not_installed_where_the_notebooks_run(monkeypatch, tmp_path):
    monkeypatch.setattr(notebook, "find_spec", lambda _name: None)
    finding = only(notebook.check(tmp_path))
    assert (finding.level, finding.area) == (Level.FAIL, "notebook")


def test_an_nvml_that_fails_beside_hardware_is_a_failure(tmp_path, monkeypatch):
    def fails():
        raise GpuError("nvml-no-driver", "NVML fails.", "Mend it.")

    monkeypatch.setattr(gpu.nvml, "survey", fails)
    assert gpu.gpus(tmp_path) == ([], [])
    write(tmp_path, "dev/nvidiactl", "")
    assert gpu.gpus(tmp_path) == ([], [fail("NVML", "NVML fails.", "Mend it.")])


def test_a_gpu_that_cannot_be_read_is_named_and_hides_no_other(tmp_path, monkeypatch):
    lost = GpuError("nvml-gpu-lost", "The GPU has fallen off the bus.", "Reboot.")
    monkeypatch.setattr(gpu.nvml, "survey", lambda: ((), {1: lost}))
    finding = fail("GPU 1", "The GPU has fallen off the bus.", "Reboot.")
    assert gpu.gpus(tmp_path) == ([], [finding])


def test_another_device_plugin_on_a_node_is_told(monkeypatch, tmp_path):
    write(tmp_path, "kiwi-shared.sock", "")
    monkeypatch.setattr(kubernetes.others, "served", lambda _path: True)
    monkeypatch.setattr(kubernetes.others, "of_nvidia", lambda _directory: ["nvidia-gpu.sock"])
    finding = only(kubernetes.check(tmp_path))
    assert "nvidia-gpu.sock" in finding.text
    assert "Remove it" in finding.remedy


def test_bindings_with_a_gap_and_no_compiler_are_told(monkeypatch):
    finding = gpu.bindings("cuda-bindings 1.0 lacks a call.")
    assert (finding.level, bool(finding.remedy)) == (Level.FAIL, True)
    monkeypatch.setattr(gpu.shutil, "which", lambda _name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "ziglang" in gpu.compiler().remedy


def test_a_path_too_long_for_a_socket_is_told(tmp_path):
    deep = tmp_path / ("x" * 80)
    levels = [finding.level for finding in socket_checks.directory(deep)]
    assert levels == [Level.FAIL, Level.OK]  # too long; and it does not exist yet
    assert only(socket_checks.directory(Path("/run/kiwi-none"))).level is Level.OK


def test_daemons_are_asked(scripted, sockets):
    assert only(socket_checks.daemons(sockets)).level is Level.OK
    alive = scripted("GPU-1")
    finding = only(socket_checks.daemons(sockets))
    assert finding.level is Level.OK
    assert "protocol 1" in finding.text
    alive.stop()
    finding = only(socket_checks.daemons(sockets))
    assert finding.level is Level.FAIL
    assert str(alive.path) in finding.text


def test_a_daemon_of_another_version_or_in_trouble_is_told(daemon, sockets):
    import msgspec

    trouble = msgspec.structs.replace(status_of(), daemon_version="9.9", errors=["Disk full."])
    daemon.script = lambda peer, message: (
        peer.say(StatusReport(gpu=trouble))
        if isinstance(message, GetStatus)
        else daemon.obey(peer, message)
    )
    texts = [(f.level, f.text) for f in socket_checks.daemons(sockets)]
    assert texts[0][0] is Level.WARN
    assert "9.9" in texts[0][1]
    assert texts[1] == (Level.WARN, "Disk full.")


def test_memory_that_a_dead_program_left_is_told_with_what_frees_it(daemon, sockets):
    import msgspec

    kept = OutsideProgram(pid=12, owner="ada", name="python, left by …", used_bytes=MIB, left=True)
    status = msgspec.structs.replace(status_of(), outside=[kept])
    daemon.script = lambda peer, message: (
        peer.say(StatusReport(gpu=status))
        if isinstance(message, GetStatus)
        else daemon.obey(peer, message)
    )
    _, finding = socket_checks.daemons(sockets)
    assert "python, left by … (pid 12)" in finding.text
    assert finding.remedy == LEFT_REMEDY


def test_a_daemon_of_another_protocol_is_a_failure(daemon, sockets):
    daemon.script = lambda peer, message: (
        peer.say(daemon.welcome(protocol=99)) if isinstance(message, Hello) else None
    )
    assert only(socket_checks.daemons(sockets)).level is Level.FAIL


def test_the_shipped_configuration_is_looked_for(tmp_path):
    path = tmp_path / notebook.CONFIG_NAME
    finding = notebook.configuration(path, for_one_user=False)
    assert finding.level is Level.WARN
    assert "pip install --force-reinstall" in finding.remedy
    path.write_text("c.InteractiveShellApp.extra_extensions.append('kiwi_jupyter.kernel')")
    assert notebook.configuration(path).level is Level.OK


def test_an_installation_for_one_user_is_not_told_to_be_another_one(tmp_path, monkeypatch):
    """Who installs with --user often may not write anywhere else."""
    base = tmp_path / "base"
    monkeypatch.setattr(notebook.site, "getusersitepackages", lambda: str(base))
    assert not notebook.installed_for_one_user()
    own = ModuleSpec("kiwi_jupyter", None, origin=str(base / "kiwi_jupyter/__init__.py"))
    monkeypatch.setattr(notebook, "find_spec", lambda _name: own)
    assert notebook.installed_for_one_user()
    finding = notebook.configuration(tmp_path / notebook.CONFIG_NAME)
    assert "for you alone" in finding.text
    assert "--user" not in finding.remedy
    assert "extra_extensions.append('kiwi_jupyter.kernel')" in finding.remedy


def test_the_remedy_of_an_installation_for_one_user_works(tmp_path, monkeypatch):
    finding = notebook.configuration(tmp_path / notebook.CONFIG_NAME, for_one_user=True)
    line = re.search(r"Write (.*\)) into", finding.remedy)
    assert line is not None
    profile = tmp_path / "profile_default"
    profile.mkdir()
    (profile / notebook.CONFIG_NAME).write_text(f"c = get_config()\n{line[1]}\n")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert notebook.EXTENSION in notebook.effective_extensions()


def test_a_configuration_that_cannot_be_read_is_told(tmp_path):
    path = tmp_path / notebook.CONFIG_NAME
    path.mkdir()  # root may read any file, but no directory as one
    finding = notebook.configuration(path)
    assert "cannot be read" in finding.text
    assert "readable" in finding.remedy


@pytest.mark.parametrize(
    ("extensions", "level"),
    [
        ([], Level.WARN),
        (["mine"], Level.WARN),
        (["x", notebook.EXTENSION], Level.OK),
    ],
)
def test_the_extensions_that_a_kernel_loads_are_judged(extensions, level):
    assert notebook.loaded(extensions).level is level


def test_ipython_itself_says_what_a_kernel_loads(tmp_path, monkeypatch):
    """The shipped configuration works in this environment, and a user's own list replaces it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert notebook.EXTENSION in notebook.effective_extensions()
    profile = tmp_path / "profile_default"
    profile.mkdir()
    own = "c = get_config()\nc.InteractiveShellApp.extra_extensions = ['autoreload']\n"
    (profile / "ipython_kernel_config.py").write_text(own)
    assert notebook.effective_extensions() == ["autoreload"]


SERVER = {"enabled": True, "error": "", "lab": {"installed": True, "disabled": []}}


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, Level.OK, "loads"),
        ({"enabled": None}, Level.WARN, "pip install --force-reinstall"),
        ({"enabled": False}, Level.WARN, "jupyter server extension enable kiwi_jupyter"),
        ({"error": "ImportError: no tornado"}, Level.WARN, "no tornado"),
    ],
)
def test_the_server_extension(changes, level, words):
    finding = jupyter.server(SERVER | changes)
    assert finding.level is level
    assert words in f"{finding.text} {finding.remedy}"


@pytest.mark.parametrize(
    ("installed", "disabled", "level", "words"),
    [
        (True, [], Level.OK, "sidebar"),
        (False, [], Level.WARN, "pip install"),
        (True, ["kiwi-jupyter:panel"], Level.WARN, "labextension enable kiwi-jupyter:panel"),
    ],
)
def test_the_sidebar(installed, disabled, level, words):
    finding = jupyter.sidebar({"installed": installed, "disabled": disabled})
    assert finding.level is level
    assert words in f"{finding.text} {finding.remedy}"


def test_kernels_of_environments_without_kiwi(tmp_path):
    python = tmp_path / "bin/python"
    write(tmp_path, "bin/python", "")
    python.chmod(0o755)
    finding = only(jupyter.kernels({"python3": sys.executable, "old": str(python)}))
    assert finding.level is Level.WARN
    assert "'old' has no Kiwi" in finding.text
    assert str(python) in finding.remedy
    assert only(jupyter.kernels({"python3": sys.executable, "c": "conda"})).level is Level.OK
    assert "python3" in jupyter.ask()["kernels"]


def test_jupyter_itself_says_what_is_enabled(tmp_path, monkeypatch):
    """The files are in directories that precede those of this environment."""
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path / "etc"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    build = {"load": "static/entry.js", "extension": "./extension"}
    lab = {"name": "kiwi-jupyter", "version": "1", "jupyterlab": {"_build": build}}
    write(tmp_path, "share/labextensions/kiwi-jupyter/package.json", json.dumps(lab))
    said = jupyter.ask()
    assert said["error"] == ""
    assert said["lab"] == {"installed": True, "disabled": []}

    enabled = {"ServerApp": {"jpserver_extensions": {"kiwi_jupyter": False}}}
    write(tmp_path, "etc/jupyter_server_config.json", json.dumps(enabled))
    page = {"disabledExtensions": {"kiwi-jupyter": True, "kiwi-jupyter:tab": False}}
    write(tmp_path, "etc/labconfig/page_config.json", json.dumps(page))
    said = jupyter.ask()
    assert said["enabled"] is False
    assert said["lab"] == {"installed": True, "disabled": ["kiwi-jupyter"]}


UNANSWERED = [
    ("raise SystemExit(1)", "without a word", "Mend"),
    ("raise ValueError('bad traits')", "ValueError: bad traits", "Mend what this says"),
    ("import no_such_package", "no_such_package is not installed", "pip install no_such_package"),
    ("raise PermissionError('/opt/x')", "PermissionError: /opt/x", "readable"),
    ("print('hello')", "cannot be read", "writes to the output"),
    ("import time; time.sleep(1000)", "no answer within", "less busy"),
]
"""Programs that do not answer, why, and what to do."""


@pytest.mark.parametrize(("program", "why", "remedy"), UNANSWERED)
def test_a_python_that_does_not_answer_is_told_with_its_own_cause(
    monkeypatch, tmp_path, program, why, remedy
):
    if "time" in program:
        monkeypatch.setattr(finding_module, "PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(jupyter, "_PROBE", program)
    monkeypatch.setattr(notebook, "_PROBE", program)
    server = only(jupyter.check())
    kernel = next(one for one in notebook.check(tmp_path) if one.area == "kernel")
    for finding in (server, kernel):
        assert finding.level is Level.WARN
        assert why in finding.text
        assert remedy in finding.remedy


def test_a_python_that_cannot_be_started_is_told(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/no/such/shell\n")
    python.chmod(0o600)
    monkeypatch.setattr(sys, "executable", str(python))
    server = only(jupyter.check())
    assert f"{python} cannot be started: Permission denied" in server.text
    assert "readable" in server.remedy
    assert "cannot be started" in preload.loaded(tmp_path / "libkiwi_preload.so").text


def test_without_jupyter_server_there_is_nothing_to_enable(monkeypatch):
    monkeypatch.setattr(jupyter, "find_spec", lambda name: None)
    assert only(jupyter.check()).level is Level.OK


def test_disabled_by_the_environment_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(notebook, "effective_extensions", lambda: [notebook.EXTENSION])
    monkeypatch.setenv(config.ENV_DISABLE, "1")
    assert "unset KIWI_DISABLE" in [finding.remedy for finding in notebook.check(tmp_path)]


def test_an_area_that_breaks_or_hangs_is_a_line_and_not_the_end(monkeypatch):
    import threading

    def broken():
        yield ok("x", "fine so far")
        raise ValueError("surprise")

    assert [finding.level for finding in doctor._within("x", broken)] == [Level.OK, Level.FAIL]
    release = threading.Event()
    monkeypatch.setattr(doctor, "AREA_TIMEOUT_S", 0.05)
    finding = only(doctor._within("driver", lambda: release.wait(60) and []))
    release.set()
    assert finding.level is Level.FAIL
    assert "No answer" in finding.text
    assert "driver hangs" in finding.remedy


def test_what_hangs_or_cannot_be_looked_at_is_not_always_the_driver(monkeypatch):
    import threading

    release = threading.Event()
    monkeypatch.setattr(doctor, "AREA_TIMEOUT_S", 0.05)
    finding = only(doctor._within("memory", lambda: release.wait(60) and []))
    release.set()
    assert "driver" not in finding.remedy
    assert "network mounts" in finding.remedy

    def unreadable():
        raise PermissionError(errno.EACCES, "Permission denied", "/home/ada/.kiwi")

    finding = only(doctor._within("memory", unreadable))
    assert finding.text == "/home/ada/.kiwi cannot be looked at: Permission denied."
    assert "report" not in finding.remedy


def test_lines_have_level_area_text_and_remedy():
    assert doctor.lines_of(fail("GPU 0", "Bad.", "Mend."), Style(False)) == [
        "FAIL  GPU 0       Bad.",
        "                  → Mend.",
    ]


def test_doctor_reports_every_area_on_this_machine(kiwi, sockets):
    """On any machine, every area prints something, and the exit code matches the lines."""
    result = kiwi("doctor", "--json")
    report = json.loads(result.out)
    areas = {finding["area"] for finding in report["findings"]}
    assert {"system", "python", "rights", "driver", "system RAM", "sockets", "emulator"} <= areas
    failed = any(finding["level"] == "fail" for finding in report["findings"])
    assert report["fit"] == (not failed)
    assert result.code == (1 if failed else 0)
    assert all(f["remedy"] for f in report["findings"] if f["level"] != "ok")


def test_text_ends_with_a_verdict(kiwi, monkeypatch):
    for findings, code, word in (
        ([ok("a", "b")], 0, "Fit."),
        ([Finding(Level.WARN, "a", "b", "c")], 0, "Fit, with 1"),
        ([fail("a", "b", "c")], 1, "Not fit yet: 1"),
    ):
        monkeypatch.setattr(doctor, "examine", lambda _directory, found=findings: iter(found))
        result = kiwi("doctor")
        assert result.code == code
        assert word in result.out.splitlines()[-1]


def test_this_python_is_the_one_named():
    assert sys.executable in machine.python(sys.version_info[:2]).text


# --- Kiwi's own pager -----------------------------------------------------------------------------


def test_the_pager_can_be_loaded_here():
    (finding,) = preload.check()
    assert finding.level is Level.OK, finding
    assert "libkiwi_preload.so" in finding.text


def test_no_pager_is_no_failure(monkeypatch):
    def none():
        raise Unavailable("There is no C compiler here.", "Install gcc.")

    monkeypatch.setattr(preload.preload, "library", none)
    finding = only(preload.check())
    assert (finding.level, finding.remedy) == (Level.WARN, "Install gcc.")
    assert "unguarded" in finding.text


def test_a_library_for_another_machine(tmp_path):
    library = tmp_path / "libkiwi_preload.so"
    library.write_bytes(b"\x7fELF\x01 of another architecture")
    finding = preload.loaded(library)
    assert finding.level is Level.WARN
    assert "another architecture" in finding.remedy


@pytest.mark.parametrize(("value", "said"), [("", 0), ("inprocess", 0), ("in-process", 1)])
def test_a_pager_that_nobody_knows(value, said):
    assert len(list(preload.chosen(value))) == said


def test_another_library_that_replaces_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(preload.ctypes, "CDLL", lambda name: FakeLibrary("gpu" in name))
    words = [finding.text for finding in preload.beside("/usr/lib/libgpu.so:/x/libjemalloc.so")]
    assert len(words) == 1
    assert "/usr/lib/libgpu.so" in words[0]


class FakeLibrary:
    def __init__(self, exports: bool) -> None:
        if exports:
            self.cuMemAlloc_v2 = object()


# --- what kills programs that are moved -----------------------------------------------------------

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Aug 14 2026\nGCC 13.3.0\n"


def killed_by(tmp_path, version: str, **more) -> dict[str, Finding]:
    write(tmp_path, "proc/driver/nvidia/version", version)
    findings = killers.check(tmp_path, **{"machine": "x86_64", "environment": {}, **more})
    return {finding.area: finding for finding in findings}


def warned(findings) -> set[str]:
    return {area for area, finding in findings.items() if finding.level is Level.WARN}


def test_without_the_kernel_module_nothing_is_said(tmp_path):
    assert list(killers.check(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        (PROPRIETARY, "580.178.04", set()),
        (OPEN, "580.95.05", set()),
        (PROPRIETARY, "595.84", {"NCCL"}),
        (OPEN, "595.71.05", {"NCCL", "module"}),
        (PROPRIETARY, "610.57.04", {"NCCL", "NVML use"}),
        (OPEN, "610.57.04", {"NCCL", "NVML use", "module"}),
    ],
)
def test_known_killers_by_driver(tmp_path, text, number, expected):
    findings = killed_by(tmp_path, text.format(number))
    assert warned(findings) == expected
    assert number in findings["module"].text
    assert all(findings[area].remedy for area in expected)


def test_a_version_that_cannot_be_told_is_no_crash(tmp_path):
    assert warned(killed_by(tmp_path, "NVRM version: something else\n")) == set()


def test_arm64_is_warned_of_checkpoints_that_are_not_supported(tmp_path):
    findings = killed_by(tmp_path, PROPRIETARY.format("580.142"), machine="aarch64")
    assert warned(findings) == {"arm64"}
    assert "kiwi bench" in findings["arm64"].remedy


def test_profilers(tmp_path):
    version = PROPRIETARY.format("580.178.04")
    found = killed_by(tmp_path, version, environment={"CUDA_INJECTION64_PATH": "/opt/libx.so"})
    assert warned(found) == {"profilers"}
    write(tmp_path, "proc/77/comm", "nsys\n")
    found = killed_by(tmp_path, version)
    assert warned(found) == {"profilers"}
    assert "KIWI_DISABLE" in found["profilers"].remedy


@pytest.mark.parametrize(
    ("name", "words"), [("systemd", "ExecStart="), ("grafana", '"panels"'), ("cdi", '"cdiVersion"')]
)
def test_prints_the_files_that_administrators_install(kiwi, name, words):
    result = kiwi("doctor", "--print", name)
    assert result.code == 0
    assert words in result.out
    assert "\nFit" not in result.out  # nothing was checked
    assert "\nNot fit" not in result.out
