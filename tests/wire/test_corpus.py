"""Replay the fuzzer's corpus through the daemon's side of the wire."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from tests.wire import fuzz_wire

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = sorted(fuzz_wire.CORPUS.iterdir())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


def test_the_seeds() -> None:
    """The seeds contain every message of a client."""
    seeds = fuzz_wire.seeds()
    text = b"".join(seeds)
    for kind in fuzz_wire.CLIENT_TYPES:
        assert b'"type":"%s"' % kind.encode() in text, kind
    for seed in seeds:
        fuzz_wire.one_input(seed)


def test_there_is_a_corpus() -> None:
    assert len(CASES) > 20


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name[:12])
def test_the_corpus(path: Path) -> None:
    fuzz_wire.one_input(path.read_bytes())


def test_the_target_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target finds a handler that fails on a message."""

    def stumble(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fuzz_wire.Recorder, "hello", stumble)
    hello = b'\0{"type":"hello","protocol":1,"role":"session","client":"f"}\n'
    with pytest.raises(AssertionError, match="not handled"):
        fuzz_wire.one_input(hello)
