"""Tests that every handle of memory that a program passes to the driver is translated: the program
holds names in place of the driver's handles."""

from __future__ import annotations

import re

import pytest

from kiwi_core import compiled
from kiwi_core.preload import _build, _generate

HANDLE = "CUmemGenericAllocationHandle"
MAKE_HANDLES = {
    "cuMemCreate",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMulticastCreate",
}
"""Calls that return a handle through a pointer, and read none."""
NEVER_A_NAME = "mcHandle"
"""The header's name for handles of multicast objects, which are the driver's own."""
TRANSLATE = re.compile(r"\bkp_vmm_\w+\(|\bmap_arrays\(")


def header_with(directory, more):
    (directory / "cuda.h").write_text(f'#include "{_build.find_header()}"\n{more}\n')
    compiler = compiled.find_compiler()
    return _generate._preprocessed(compiler, directory / "cuda.h", "-D__CUDA_API_VERSION_INTERNAL")


def statements(text):
    """Return the statements of the header: what ends with a semicolon outside of all braces."""
    found, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == ";" and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    return found


def types_with_a_handle(text):
    """Return the names of types that are a handle, or contain one at any depth."""
    structs = re.compile(r"typedef (struct|union)\b|typedef[^(]*$")  # no pointers to functions
    defined = [one for one in statements(text) if structs.match(one)]
    found = {f"{HANDLE}_v1"}
    while True:
        more = set(found)
        for one in defined:
            words = re.findall(r"\w+", one)
            tag = words[2:3] if words[1] in ("struct", "union") else []
            if more & set(words[1:-1]):
                more |= {words[-1], *tag}
        if more == found:
            return found
        found = more


def untranslated(text, hooks):
    """Return the functions that are passed a handle, or a struct with one, and do not translate
    it."""
    holding = types_with_a_handle(text)
    found = []
    for name, arguments in _generate._PROTOTYPE.findall(text):
        for argument in arguments.split(","):
            words = re.findall(r"\w+", argument)
            if not holding & set(words) or words[-1] == NEVER_A_NAME:
                continue
            made = "*" in argument and HANDLE in words and name in MAKE_HANDLES
            if not made and not TRANSLATE.search(hooks.get(name, "")):
                found.append(f"{name}: {argument.strip()}")
    return found


NEW_STRUCT = """
typedef struct CUnew_st { void (*f)(int); union { CUarrayMapInfo one; int b; } u; } CUnew;
CUresult CUDAAPI cuBrandNew(CUnew *p);
"""


@pytest.fixture(scope="module")
def hooks():
    """Return the text of each wrapper by hand for these calls, by the function's name."""
    text = (_build.SOURCES / "hooks" / "hooks_vmm.c").read_text()
    parts = re.split(r"^(?:HOOK\(\w+, |KP_API CUresult )(?=\w)", text, flags=re.MULTILINE)[1:]
    return {re.match(r"\w+", part)[0]: part for part in parts}


def test_every_handle_of_the_header_is_translated(tmp_path, hooks):
    text = header_with(tmp_path, "")
    assert {HANDLE, "CUarrayMapInfo", "CUarrayMapInfo_v1"} <= types_with_a_handle(text)
    assert untranslated(text, hooks) == []


def test_the_wrappers_are_those_of_the_list(hooks):
    hooked = {form for call in _generate.read_calls().values() for form in call.hooks}
    assert {re.sub("_ptsz$", "", name) for name in hooks} <= hooked


@pytest.mark.parametrize(
    "new",
    [
        "CUresult CUDAAPI cuBrandNew(int a, CUmemGenericAllocationHandle memHandle);",
        "CUresult CUDAAPI cuBrandNew(CUmemGenericAllocationHandle *handles, int count);",
        "CUresult CUDAAPI cuBrandNew(const CUarrayMapInfo *list);",
        NEW_STRUCT,
    ],
)
def test_a_new_call_with_a_handle_is_found(tmp_path, hooks, new):
    (found,) = untranslated(header_with(tmp_path, new), hooks)
    assert found.startswith("cuBrandNew: ")


def test_a_wrapper_that_forgets_to_translate_is_found(tmp_path, hooks):
    text = header_with(tmp_path, "")
    for name in ("cuMemMap", "cuMulticastBindMem_v2", "cuMemMapArrayAsync_ptsz"):
        found = untranslated(text, {**hooks, name: "real(handle)"})
        assert [one.partition(":")[0] for one in found] == [name]
