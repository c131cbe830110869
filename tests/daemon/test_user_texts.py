"""Tests that plain words exist for everything that users are told."""

from __future__ import annotations

import pytest

from kiwi_core.daemon import user_texts
from kiwi_core.daemon.roster.registry import SessionRecord
from kiwi_core.gpu.ownable import OwnershipObjection
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.gpu.proofs import Proof
from kiwi_core.states import GateOnly, Notice, Reason
from kiwi_core.units import SessionId

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


def test_status_says_why_there_is_no_gate_in_the_words_of_the_kernel() -> None:
    """What the kernel has started lacks the gate for the same reason."""
    kernel, child = ProcessRef(10, 1), ProcessRef(11, 2)
    record = SessionRecord(SessionId("1"), kernel, 0, ungated="It is being compiled.")
    for bare in ({kernel}, {kernel, child}, set()):
        record.bare = frozenset(bare)
        assert user_texts.unguarded(record).startswith("It is being compiled. ")
    record.bare = frozenset({child})
    assert "by process 11: started with an environment" in user_texts.unguarded(record)


UNASKED = (GateOnly.NOT_ASKED, GateOnly.UNPROVEN, GateOnly.PROOF_FAILED)


@pytest.mark.parametrize("why", [why for why in GateOnly if why not in UNASKED])
def test_every_reason_against_the_library_says_what_to_do(why: GateOnly) -> None:
    text = user_texts.moved_by_driver(OwnershipObjection(why), None)
    assert text.count(". ") >= 1
    assert text.endswith(".")
    assert why.value not in text or "-" not in why.value, "no names of ours"
    assert "(/dev/x)" in user_texts.moved_by_driver(OwnershipObjection(why, "/dev/x"), None)


@pytest.mark.parametrize("machine", [None, *UNASKED])
def test_who_asks_for_nothing_needs_no_reason_but_that_it_began_too_early(
    machine: GateOnly | None,
) -> None:
    assert user_texts.moved_by_driver(None, machine) == ""
    assert user_texts.moved_by_driver(OwnershipObjection(GateOnly.NOT_ASKED), machine) == ""
    for why in UNASKED[1:]:
        text = user_texts.moved_by_driver(OwnershipObjection(why), machine)
        assert ("Start it again" in text) == (machine is None)


PROOF = Proof(gpu="H200", driver="580", out_bytes_per_s=45.2e9, in_bytes_per_s=51e9)
FAILED = Proof(gpu="H200", driver="580", failed="A byte was lost.")


@pytest.mark.parametrize(
    ("why_not", "proof", "said"),
    [
        (None, PROOF, "own library, 45.2 GB/s out and 51.0 GB/s in (measured here)"),
        (GateOnly.UNPROVEN, None, "`kiwi doctor --prove`, as the daemon's user, does it now"),
        (GateOnly.COHERENT, PROOF, "the CPU uses GPU memory itself"),
        (GateOnly.PROOF_FAILED, FAILED, "A byte was lost."),
        (GateOnly.NOT_ASKED, PROOF, "--pager checkpoint"),
    ],
)
def test_what_moves_memory_on_this_machine_and_why(
    why_not: GateOnly | None, proof: Proof | None, said: str
) -> None:
    text = user_texts.pager_of_the_machine(why_not, proof)
    assert said in text
    assert text.startswith("by ")


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    assert user_texts.reason(reason)
    assert user_texts.reason(reason, "why").endswith(": why")
