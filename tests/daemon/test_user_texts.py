"""Tests that plain words exist for everything that users are told."""

from __future__ import annotations

import pytest

from kiwi_core.daemon import user_texts
from kiwi_core.gpu.ownable import OwnershipObjection
from kiwi_core.states import GateOnly, Notice, Reason

NEEDS_NO_REMEDY = {
    Notice.SUSPENDED,
    Notice.RESUMED,
    Notice.SERIALISING,
    Notice.PAGE_OUT_REFUSED,
    Notice.UNSTUCK,
}
"""These pass by themselves; all others say what to do."""


@pytest.mark.parametrize("notice", list(Notice))
def test_every_notice_is_a_sentence_with_a_remedy(notice: Notice) -> None:
    text, remedy = user_texts.sentence(notice)
    assert text[0].isupper()
    assert text.endswith(".")
    assert bool(remedy) == (notice not in NEEDS_NO_REMEDY)
    assert not remedy or (remedy[0].isupper() or remedy[0] == "`")
    assert "-" not in notice.value or notice.value not in text, "no names of ours"
    with_detail, _ = user_texts.sentence(notice, "so many bytes")
    assert with_detail == f"{text[:-1]} (so many bytes)."


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (Reason.NO_ROOM, "outside Kiwi"),
        (Reason.STOPPED, "kill -CONT"),
        (Reason.NOT_PERMITTED, "kiwi doctor"),
        (Reason.DRIVER, "daemon's log"),
    ],
)
def test_what_to_do_about_memory_that_does_not_come_back_depends_on_why(
    reason: Reason, word: str
) -> None:
    _, remedy = user_texts.sentence(Notice.PAGE_IN_REFUSED, f"{reason.value}: x")
    assert word in remedy


@pytest.mark.parametrize("why", [why for why in GateOnly if why is not GateOnly.NOT_ASKED])
def test_every_reason_against_the_library_says_what_to_do(why: GateOnly) -> None:
    text = user_texts.moved_by_driver(OwnershipObjection(why))
    assert text.count(". ") >= 1
    assert text.endswith(".")
    assert why.value not in text or "-" not in why.value, "no names of ours"
    assert "(/dev/x)" in user_texts.moved_by_driver(OwnershipObjection(why, "/dev/x"))


def test_who_asks_for_nothing_needs_no_reason() -> None:
    assert user_texts.moved_by_driver(None) == ""
    assert user_texts.moved_by_driver(OwnershipObjection(GateOnly.NOT_ASKED)) == ""


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    assert user_texts.reason(reason)
    assert user_texts.reason(reason, "why").endswith(": why")
