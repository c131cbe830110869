"""Tests of the Python side: building the libraries, the state file, loading."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_processes import Worker

import kiwi_emulator as emulator
from kiwi_core import compiled
from kiwi_core.compiled import Unavailable
from kiwi_core.preload._build import find_header
from kiwi_core.preload._generate import version
from kiwi_emulator import _build, _layout
from kiwi_emulator._faults import KINDS


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x512MiB", [512 << 20] * 2),
        ("1×8GiB", [8 << 30]),
        ("512MiB", [512 << 20]),
        ("3 x 1.5GiB", [1610612736] * 3),
        ("2X64mib", [64 << 20] * 2),
        ("4x10GB", [10**10] * 4),
    ],
)
def test_sizes_as_people_write_them(text, sizes):
    assert [gpu.total_bytes for gpu in emulator.parse_gpus(text)] == sizes


@pytest.mark.parametrize("text", ["", "x", "0x1GiB", "17x1GiB", "2x", "1KiB", "-1x1GiB", "2x1GiB!"])
def test_other_sizes_are_refused_with_the_right_form(text):
    with pytest.raises(ValueError, match="2x512MiB"):
        emulator.parse_gpus(text)


def test_uuids_follow_from_the_path_or_are_given(tmp_path):
    emulator.create_state(tmp_path / "a", emulator.parse_gpus("2x1GiB"))
    first = [gpu.uuid for gpu in emulator.books(tmp_path / "a").gpus]
    emulator.create_state(tmp_path / "a", emulator.parse_gpus("2x1GiB"))
    assert [gpu.uuid for gpu in emulator.books(tmp_path / "a").gpus] == first
    assert len(set(first)) == 2
    given = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    emulator.create_state(tmp_path / "b", [emulator.GpuSpec(1 << 30, uuid=given)])
    assert emulator.books(tmp_path / "b").gpus[0].uuid == given
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


def test_each_machine_has_uuids_of_its_own(tmp_path, monkeypatch):
    emulator.create_state(tmp_path / "a", emulator.parse_gpus("1x1GiB"))
    here = emulator.books(tmp_path / "a").gpus[0].uuid
    names = ("Linux", "another-node", "6", "1", "x86_64")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(names))
    emulator.create_state(tmp_path / "a", emulator.parse_gpus("1x1GiB"))
    assert emulator.books(tmp_path / "a").gpus[0].uuid != here


def test_a_state_for_all_users_lets_them_in_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        emulator.create_state(tmp_path / "a", emulator.parse_gpus("1x1GiB"), shared=True)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o666
    assert (tmp_path / "a.d").stat().st_mode & 0o7777 == 0o777


def test_what_is_not_a_state_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"nonsense")
    with pytest.raises(emulator.StateError, match="too short"):
        emulator.books(tmp_path / "x")
    (tmp_path / "x").write_bytes(bytes(ctypes.sizeof(_layout.DriverState)))
    with pytest.raises(emulator.StateError, match="not a state file"):
        emulator.books(tmp_path / "x")
    with pytest.raises(emulator.StateError, match="cannot be opened"):
        emulator.books(tmp_path / "missing")


def test_the_layout_in_python_is_the_one_in_c(tmp_path):
    """A compiled program prints the offsets of the C side, to compare them."""
    structs = {
        "ke_state": _layout.DriverState,
        "ke_gpu": _layout.Gpu,
        "ke_proc": _layout.Proc,
        "ke_fault": _layout.FaultSlot,
    }
    lines, expected = [], []
    for name, struct in structs.items():
        lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
        expected.append(ctypes.sizeof(struct))
        for field, *_ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
            expected.append(getattr(struct, field).offset)
    source = '#include <stdio.h>\n#include "state.h"\nint main(void){' + "".join(lines) + "}"
    (tmp_path / "offsets.c").write_text(source)
    compiler = compiled.find_compiler()
    program = str(tmp_path / "offsets")
    include = f"-I{_build.SOURCES}"
    subprocess.run([*compiler, include, "-o", program, str(tmp_path / "offsets.c")], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert [int(line) for line in printed.split()] == expected


def test_the_numbers_in_python_are_those_in_c():
    header = (_build.SOURCES / "state.h").read_text()
    quirks = re.search(r"enum ke_quirk \{(.*?)\};", header, re.DOTALL)
    faults = re.search(r"enum ke_fault_kind \{(.*?)\};", header, re.DOTALL)
    assert quirks
    assert faults
    bits = re.findall(r"= 1u << (\d+)", quirks[1])
    assert [1 << int(bit) for bit in bits] == list(emulator.QUIRKS.values())
    kinds = dict(re.findall(r"KE_FAULT_(\w+) = (\d+)", faults[1]))
    ours = {"NONE": 0} | {name.upper(): number for name, number in KINDS.items()}
    assert {name: int(number) for name, number in kinds.items()} == ours


@pytest.mark.timeout(300)
def test_two_builders_at_once_make_one_library(tmp_path):
    code = (
        "import sys; from pathlib import Path; import kiwi_emulator as emulator;"
        "print(emulator.build(Path(sys.argv[1])).libcuda)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {b.communicate(timeout=280)[0].strip() for b in builders}
    assert len(printed) == 1
    assert Path(printed.pop()).is_file()
    left = sorted(p.name for p in (tmp_path / "cache").iterdir())
    assert len(left) == 2, "one directory and the lock"


def test_no_compiler_is_told_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(compiled.Unavailable, match="pip install ziglang"):
        emulator.build(tmp_path / "cache")


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(compiled.Unavailable, match="no such target"):
        emulator.build(tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["emulator.lock"]


def test_an_unusable_cache_is_told_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(compiled.Unavailable, match="XDG_CACHE_HOME"):
        emulator.build(tmp_path / "file" / "cache")


@pytest.mark.timeout(300)
def test_the_sources_compile_without_a_warning(tmp_path):
    compiler = compiled.find_compiler()
    for output, sources in (("libcuda.so.1", _build.CUDA), ("libnvidia-ml.so.1", _build.NVML)):
        files = [str(_build.SOURCES / name) for name in (*_build.COMMON, *sources)]
        command = [*compiler, *_build.FLAGS, "-Werror", "-o", str(tmp_path / output), *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def _cuda_header():
    """Return the directory of the newest cuda.h here if it has the emulated types (13.0)."""
    try:
        header = find_header()
    except Unavailable:
        return None
    return header.parent if version(header) >= 13000 else None


def test_prototypes_numbers_and_layouts_are_those_of_the_real_header(tmp_path):
    include = _cuda_header()
    if include is None:
        pytest.skip("no cuda.h of CUDA 13.0 or newer here to compare with")
    compiler = [*compiled.find_compiler(), "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    typed = [str(_build.SOURCES / n) for n in _build.CUDA if n != "table.c"]
    real = ["-DKE_WITH_CUDA_H", f"-I{include}", "-fsyntax-only"]
    subprocess.run([*compiler, *real, *typed], check=True)
    ours = (_build.SOURCES / "cu.h").read_text()
    numbers = re.findall(r"^ +(CU\w+) = (\w+),?$", ours, re.MULTILINE)
    assert len(numbers) > 50
    structs = set(
        re.findall(r"^(?:typedef struct \w+ \{.*)?\} (CU\w+);|\{.*\} (CU\w+);$", ours, re.M)
    )
    names = sorted({a or b for a, b in structs} - {"CUresult"})
    assert "CUcheckpointRestoreArgs" in names
    (tmp_path / "s.c").write_text(
        '#include <stdio.h>\n#include "cu.h"\nint main(void){'
        + "".join(f'printf("%zu ", sizeof({n}));' for n in names)
        + "}"
    )
    sizes = []
    for number, flags in enumerate(([], real[:2])):
        program = str(tmp_path / f"s{number}")
        here = [f"-I{_build.SOURCES}", "-o", program, str(tmp_path / "s.c")]
        subprocess.run([*compiler, *flags, *here], check=True)
        sizes.append(subprocess.run([program], capture_output=True, check=True).stdout)
    assert sizes[0] == sizes[1]
    asserts = "".join(f'_Static_assert({n} == {v}, "{n}");\n' for n, v in numbers)
    (tmp_path / "n.c").write_text("#include <cuda.h>\n" + asserts)
    subprocess.run([*compiler, *real[1:], str(tmp_path / "n.c")], check=True)


def test_activate_in_this_process_and_its_children(tmp_path, libraries):
    state = tmp_path / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x64MiB"))
    worker = Worker({})
    try:
        worker.do(
            "from pathlib import Path; import kiwi_emulator as emulator; libs = emulator.build()\n"
            f"state = Path({str(state)!r}); assert emulator.loaded_libcuda() is None\n"
            "emulator.activate(state, libs); emulator.activate(state, libs); init()"
        )
        assert worker.get("str(emulator.loaded_libcuda())") == str(libraries.libcuda)
        assert emulator.books(state).process(worker.pid) is not None
        worker.do(
            "import subprocess; done = subprocess.run([sys.executable, '-c', "
            "'from cuda.bindings import driver as d; print(int(d.cuInit(0)[0]))'], "
            "capture_output=True, text=True)"
        )
        assert worker.get("done.stdout.strip()") == "0"
        assert "cannot change" in worker.fails("emulator.activate(state.with_name('b'), libs)")
    finally:
        worker.close()


def test_activate_refuses_to_mix_drivers(tmp_path, libraries):
    other = tmp_path / "libcuda.so.1"
    other.write_bytes(libraries.libcuda.read_bytes())
    worker = Worker({})
    try:
        worker.do(
            f"import ctypes; ctypes.CDLL({str(other)!r}); from pathlib import Path\n"
            "import kiwi_emulator as emulator"
        )
        said = worker.fails(f"emulator.activate(Path({str(tmp_path / 's')!r}), emulator.build())")
        assert str(other) in said
        assert "cannot be mixed" in said
    finally:
        worker.close()


def test_environment_puts_the_emulator_first_and_keeps_the_rest(tmp_path, libraries, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/x")
    added = emulator.environment(tmp_path / "s", libraries)
    assert added == {
        emulator.ENV_STATE: str(tmp_path / "s"),
        "LD_LIBRARY_PATH": f"{libraries.directory}:/opt/x",
    }
    assert emulator.ENV_STATE not in os.environ


def test_long_paths_are_no_problem_for_control_sockets(boot, tmp_path, libraries):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    emulator.create_state(deep / "gpus", emulator.parse_gpus("1x64MiB"))
    worker = Worker(emulator.environment(deep / "gpus", libraries))
    try:
        worker.do("init(); p = alloc(MIB); suspend(os.getpid()); resume(os.getpid())")
    finally:
        worker.close()
