"""Tests that a GPU is named by its index, its UUID, or the beginning of its UUID."""

from __future__ import annotations

import pytest

from kiwi_core.errors import CallerError
from kiwi_core.gpu import choice
from kiwi_core.gpu.nvml import GpuInfo

FIRST, SECOND = "GPU-12ab0000-11", "GPU-12ab9999-22"
GPUS = [GpuInfo(i, uuid, "H100", 1, False, None, "610") for i, uuid in enumerate((FIRST, SECOND))]


@pytest.mark.parametrize("word", ["1", SECOND, "12ab9", "GPU-12ab9"])
def test_each_way_of_naming_a_gpu(word: str) -> None:
    assert choice.one(GPUS, word).uuid == SECOND


@pytest.mark.parametrize(
    ("word", "problem"), [("7", "is no GPU"), ("12", "is no GPU"), ("12ab", "means several GPUs")]
)
def test_what_names_none_or_several_is_refused_with_a_list(word: str, problem: str) -> None:
    with pytest.raises(CallerError, match=problem) as refused:
        choice.one(GPUS, word)
    assert f"0 ({FIRST}), 1 ({SECOND})" in str(refused.value)
