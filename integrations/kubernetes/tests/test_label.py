"""Tests of the feature file that makes the node's label, with a test's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from made_up_status import gpu

from kiwi_core.errors import CallerError
from kiwi_kubernetes.label import EXPIRES_S, RENEW_S, Label, noticeable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("told_s", "wait_s", "differs"),
    [
        (0, 0, False), (0, 1, True), (1, 0, True), (10, 14, False), (10, 15, True),
        (100, 119, False), (100, 120, True), (100, 80, True), (100, 81, False),
    ],
)  # fmt: skip
def test_what_is_noticeable(told_s: int, wait_s: int, differs: bool) -> None:
    assert noticeable(told_s, wait_s) is differs


def test_the_file_is_written_when_the_wait_changes_and_now_and_then(tmp_path: Path) -> None:
    now_s = 1_000_000_000.0
    label = Label(tmp_path / "features.d", lambda: now_s)
    file = tmp_path / "features.d/kiwi"
    label.update([gpu(0, wait_s=40.4), gpu(1, wait_s=None), gpu(2, wait_s=90.0)])
    first = "# +expiry-time=2001-09-09T01:51:40Z\nkiwi-jupyter/wait-s=40\n"
    assert file.read_text() == first
    assert file.stat().st_mode & 0o777 == 0o644
    now_s += RENEW_S - 1
    label.update([gpu(0, wait_s=43.0)])
    assert file.read_text() == first
    now_s += 1
    label.update([gpu(0, wait_s=43.0)])
    assert file.read_text() == first.replace("01:51:40", "01:52:40")
    label.update([gpu(0, wait_s=0.2)])
    assert "wait-s=0\n" in file.read_text()


@pytest.mark.parametrize("gpus", [[], [gpu(0, wait_s=None)]], ids=["none", "unknown"])
def test_a_wait_that_nobody_can_tell_is_no_label(tmp_path: Path, gpus: list[object]) -> None:
    label = Label(tmp_path)
    label.update([gpu(0, wait_s=1.0)])
    assert [path.name for path in tmp_path.iterdir()] == ["kiwi"]
    label.update(gpus)  # type: ignore[arg-type]
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CallerError, match=r"file/features\.d/kiwi cannot be written"):
        Label(tmp_path / "file/features.d").update([gpu(0, wait_s=1.0)])


def test_it_expires_later_than_it_is_renewed() -> None:
    assert EXPIRES_S > 2 * RENEW_S
