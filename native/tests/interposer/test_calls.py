"""Tests of calls.def against the driver's header: unnamed calls are gated, named ones exist."""

from __future__ import annotations

import fnmatch
import re
import subprocess

import pytest

from kiwi_core import compiled
from kiwi_core.preload import _build, _generate, _paths


@pytest.fixture(scope="module")
def calls():
    return _generate.read_calls()


@pytest.fixture(scope="module")
def header():
    return _generate.read_header(compiled.find_compiler(), _build.find_header())


def header_with(tmp_path, text):
    """Return the header with ``text`` added."""
    (tmp_path / "cuda.h").write_text(f'#include "{_build.find_header()}"\n{text}\n')
    return _generate.read_header(compiled.find_compiler(), tmp_path / "cuda.h")


def test_the_header_is_the_one_that_the_tests_are_pinned_to(header):
    assert header.version >= 13_040, "an older header would prove less"
    assert len(header.words) > 600


def test_every_name_of_the_list_is_in_the_header(calls, header):
    known = {_generate.base_name(symbol) for symbol in header.words}
    assert [name for name in calls if not fnmatch.filter(known, name)] == []


def test_each_pattern_stands_for_something_that_is_not_named_itself(calls, header):
    rest = {_generate.base_name(symbol) for symbol in header.words} - set(calls)
    for pattern in (name for name in calls if "*" in name):
        assert fnmatch.filter(rest, pattern), pattern


def test_a_function_that_is_new_is_gated(calls, tmp_path):
    new = header_with(tmp_path, "CUresult CUDAAPI cuBrandNew_v2_ptsz(int a, void (*f)(int, int));")
    (found,) = (s for s in _generate.symbols(calls, new) if s.call.name == "cuBrandNew")
    assert (found.name, found.gate_class, found.words) == ("cuBrandNew_v2_ptsz", "KP_GATED", 2)


def test_a_name_counts_more_than_a_pattern(calls):
    assert _generate.call_of(calls, "cuStreamGetFlags").kind == "never"
    assert _generate.call_of(calls, "cuModuleGetFunction").kind == "gated"


@pytest.mark.parametrize(
    "name",
    ["cuLaunchKernel", "cuGraphLaunch", "cuMemAlloc", "cuMemAllocAsync", "cuMemcpyDtoHAsync"],
)
def test_calls_that_use_memory_are_gated(calls, name):
    assert _generate.call_of(calls, name).kind == "gated"


@pytest.mark.parametrize("name", ["cuMemFree", "cuStreamSynchronize", "cuEventQuery", "cuInit"])
def test_calls_that_free_wait_or_query_are_not_gated(calls, name):
    assert _generate.call_of(calls, name).kind != "gated"


def test_every_form_of_every_call_has_a_wrapper(calls, header):
    """This includes the oldest forms, and those for the per-thread default stream."""
    assert {symbol.name for symbol in _generate.symbols(calls, header)} == set(header.words)


def test_wrappers_by_hand_are_for_functions_that_exist(calls, header):
    for call in calls.values():
        for form in call.hooks:
            assert form in header.words, form


def test_the_library_exports_none_of_the_drivers_names(library):
    """They would hide functions and variables of such names in the program's own libraries."""
    exported = _exported(library)
    assert "dlsym" in exported
    assert all(name.startswith("kiwi_") for name in exported - {"dlsym"}), sorted(exported)


def test_under_the_drivers_name_it_exports_what_it_wraps(header, library):
    exported = _exported(library.with_name(_paths.GATE_NAME))
    assert set(header.words) <= exported
    assert all(name.startswith("kiwi_") for name in exported - set(header.words)), sorted(exported)


def _exported(library):
    done = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    return {line.split()[2] for line in done.stdout.splitlines()}


def test_calls_with_floats_or_large_structs_have_typed_wrappers(calls, header):
    """Floats, and large structs, are passed in other registers than words: such calls have a typed
    wrapper."""
    text = _generate._preprocessed(
        compiled.find_compiler(), _build.find_header(), "-D__CUDA_API_VERSION_INTERNAL"
    )
    by_value = re.compile(
        r"(?:^|,)\s*(?:float|double|CUipc\w+|CUuuid|CUmemFabricHandle)\s+\w+\s*(?=,|$)"
    )
    odd = {name for name, args in _generate._PROTOTYPE.findall(text) if by_value.search(args)}
    assert {"cuParamSetf", "cuIpcOpenMemHandle_v2"} <= odd
    typeless = {s.name for s in _generate.symbols(calls, header) if not s.hooked}
    assert odd & typeless == set()


@pytest.mark.parametrize(
    "line",
    [
        "submitt cuLaunchKernel",
        "gated cuLaunchKernel\nwait cuLaunchKernel",
        "gated cuLaunchKernel hook:cuMemAlloc@1",
        "gated cuLaunchKernel hook:cuLaunchKernel",
        "gated cuLaunchKernel foreign:cheese",
    ],
)
def test_mistakes_in_the_list_are_named(tmp_path, line):
    (tmp_path / "calls.def").write_text(f"# the list\n{line}\n")
    with pytest.raises(_generate.CallsError, match=r"calls\.def:[23]: "):
        _generate.read_calls(tmp_path / "calls.def")


@pytest.mark.parametrize(
    ("arguments", "count"),
    [("", 0), ("void", 0), ("int a", 1), ("int a, void (*f)(int, int), int b", 3)],
)
def test_arguments_are_counted(arguments, count):
    assert _generate._count(arguments) == count
