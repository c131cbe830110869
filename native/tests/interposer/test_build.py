"""Tests of finding the library: it is compiled once and cached, or an error explains why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kiwi_core import preload
from kiwi_core.preload import _build


def test_it_is_compiled_once(tmp_path, library, monkeypatch):
    built = []

    def build(output, compiler, header):
        built.append(output)
        output.write_bytes(library.read_bytes())

    monkeypatch.setattr(_build, "build", build)
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: preload.library(tmp_path / "cache"), range(4)))
    assert len(built) == 1
    assert [path.read_bytes() == library.read_bytes() for path in found] == [True]
    assert preload.library(tmp_path / "cache") in found


def test_a_wheels_library_comes_first(tmp_path, monkeypatch):
    shipped = tmp_path / os.uname().machine / preload.NAME
    shipped.parent.mkdir()
    shipped.write_bytes(b"a library")
    monkeypatch.setattr(_build, "SHIPPED", tmp_path)
    monkeypatch.setattr(_build, "_headers", lambda: iter(()))
    assert preload.library(tmp_path / "cache") == shipped


def test_the_named_one_comes_before_all(tmp_path, monkeypatch):
    named = tmp_path / "named.so"
    monkeypatch.setenv("KIWI_PRELOAD_LIBRARY", str(named))
    monkeypatch.setattr(_build, "_headers", lambda: iter(()))
    with pytest.raises(preload.Unavailable, match=r"named\.so, which is not") as info:
        preload.library(tmp_path / "cache")
    assert "Unset KIWI_PRELOAD_LIBRARY" in info.value.remedy
    named.write_bytes(b"a library")
    assert preload.library(tmp_path / "cache") == named
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIWI_PRELOAD_LIBRARY", "named.so")
    with pytest.raises(preload.Unavailable):  # programs are started elsewhere
        preload.library(tmp_path / "cache")


@pytest.mark.parametrize("name", ["my projects", "a:b"])
@pytest.mark.parametrize("shipped", [True, False])
def test_a_path_that_cannot_stand_in_ld_preload(tmp_path, monkeypatch, name, shipped):
    """Without the refusal, each child of the program would print "cannot be preloaded", twice."""
    odd = tmp_path / name
    machine = odd / os.uname().machine
    machine.mkdir(parents=True)
    (machine / preload.NAME).write_bytes(b"a library")
    monkeypatch.setattr(_build, "SHIPPED", odd if shipped else tmp_path / "none")
    with pytest.raises(preload.Unavailable, match="no blank and no colon") as info:
        preload.library(odd / "cache")
    assert ("environment" if shipped else "XDG_CACHE_HOME") in info.value.remedy
    assert not (odd / "cache").exists()


def test_no_header(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "_headers", lambda: iter([tmp_path / "cuda.h"]))
    with pytest.raises(preload.Unavailable) as info:
        preload.library(tmp_path)
    assert "cuda.h" in info.value.message
    assert "pip install nvidia-cuda-runtime" in info.value.remedy
    (tmp_path / "cuda.h").write_text("/* of some old Macintosh */")
    with pytest.raises(preload.Unavailable):
        preload.library(tmp_path)


def test_the_newest_header_wins(tmp_path, monkeypatch):
    paths = [tmp_path / str(version) / "cuda.h" for version in (12_080, 13_050, 13_000)]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"#define CUDA_VERSION {path.parent.name}\n")
    monkeypatch.setattr(_build, "_headers", lambda: iter(paths))
    assert _build.find_header() == paths[1]


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(preload.Unavailable) as info:
        preload.library(tmp_path)
    assert "pip install ziglang" in info.value.remedy


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'the sky is falling' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(preload.Unavailable, match="the sky is falling"):
        _build.build(tmp_path / "out.so", [str(broken)])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "/k/libkiwi_preload.so"),
        ({"LD_PRELOAD": ""}, "/k/libkiwi_preload.so"),
        ({"LD_PRELOAD": "/a.so /b.so"}, "/k/libkiwi_preload.so:/a.so:/b.so"),
        ({"LD_PRELOAD": "/a.so:/old/libkiwi_preload.so"}, "/k/libkiwi_preload.so:/a.so"),
    ],
)
def test_the_environment_keeps_what_others_preload(tmp_path, before, after):
    added = preload.environment(Path("/k/libkiwi_preload.so"), before)
    assert added.pop("ASAN_OPTIONS") == "verify_asan_link_order=0"
    assert added == {"LD_PRELOAD": after, "KIWI_PRELOAD": "1"}


def test_it_needs_nothing_that_only_glibc_has(library):
    """A musl program under the library would end with exit code 127 before it begins."""

    def read(*command: str) -> str:
        done = subprocess.run([*command, library], capture_output=True, text=True, check=True)
        return done.stdout

    strong = set(re.findall(r"\bU (\w+)", read("nm", "-D", "--undefined-only")))
    assert "dl_iterate_phdr" in strong, "the list was read"
    assert not strong & {"dlvsym", "dladdr1", "dlmopen", "__register_atfork", "__tls_get_addr"}
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", read("readelf", "-d")))
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}


def test_importing_it_needs_nothing_but_the_standard_library():
    code = (
        "import sys; import kiwi_core.preload\n"
        "print(*(m for m in sys.modules if m.startswith(('kiwi', 'msgspec', 'cuda'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    names = done.stdout.split()
    known = ("kiwi_core", "kiwi_core.compiled")
    assert all(n in known or n.startswith("kiwi_core.preload") for n in names), names


@pytest.mark.wheels
@pytest.mark.timeout(400)
@pytest.mark.parametrize("machine", sorted(_build.TARGETS))
def test_it_builds_for_an_old_glibc(tmp_path, machine):
    _build.cross(machine, tmp_path / machine / preload.NAME)
    for name in (preload.NAME, _build.GATE_NAME, _build.ALIAS_NAME):
        done = subprocess.run(
            ["readelf", "-VhdW", tmp_path / machine / name],
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.findall(r"GLIBC_([\d.]+)", done.stdout)
        assert max((tuple(map(int, v.split("."))) for v in found), default=(0,)) <= (2, 17)
        assert {"x86_64": "X86-64", "aarch64": "AArch64"}[machine] in done.stdout
        soname = {preload.NAME: preload.NAME, _build.GATE_NAME: "libcuda.so.1"}
        assert f"[{soname.get(name, 'libcuda.so')}]" in done.stdout
