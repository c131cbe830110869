"""Tests that the code can read the examples in docs/protocol.md."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import PeerError
from kiwi_core.wire.framing import CLIENT_TYPES, DAEMON_TYPES, decode_client, decode_daemon, encode
from kiwi_core.wire.legality import Conversation
from kiwi_core.wire.messages import ClientMessage, DaemonMessage

TEXT = Path(__file__).parents[2].joinpath("docs", "protocol.md").read_text()
EXAMPLES = re.findall(r'^\{"type":.*\}$', TEXT, re.MULTILINE)
TALK = re.findall(r'^([→←]) (\{"type":.*\})$', TEXT, re.MULTILINE)


def read(line: str) -> ClientMessage | DaemonMessage:
    try:
        return decode_client(line.encode())
    except PeerError:
        return decode_daemon(line.encode())


@pytest.mark.parametrize("line", EXAMPLES, ids=lambda line: line[9:30].split('"')[0])
def test_an_example_is_just_what_goes_over_the_wire(line: str) -> None:
    assert encode(read(line)).decode().strip() == line


def test_every_message_has_an_example_and_a_heading() -> None:
    shown = {msgspec.json.decode(line)["type"] for line in EXAMPLES}
    assert shown == CLIENT_TYPES | DAEMON_TYPES
    for name in shown:
        assert re.search(rf"^### .*`{name}`", TEXT, re.MULTILINE), name


def test_every_field_is_named() -> None:
    kinds = (*ClientMessage.__args__, *DaemonMessage.__args__)  # type: ignore[attr-defined]
    for kind in kinds:
        for field in kind.__struct_fields__:
            assert f"`{field}`" in TEXT or f'"{field}":' in TEXT, (kind, field)


def test_the_sample_talk_is_legal() -> None:
    talk = Conversation()
    talk.accept(decode_client(EXAMPLES[0].encode()))
    assert {arrow for arrow, _ in TALK} == {"→", "←"}
    for arrow, line in TALK:
        if arrow == "→":
            talk.accept(decode_client(line.encode()))
        else:
            decode_daemon(line.encode())


def test_the_limits_are_the_codes() -> None:
    for limit in (DEFAULTS.request_max_bytes, DEFAULTS.frame_max_bytes):
        assert f"{limit:,} bytes" in TEXT or f"{limit:,} (" in TEXT


def test_every_error_that_a_daemon_sends_is_explained() -> None:
    root = Path(__file__).parents[2] / "kiwi_core"
    base = [
        root / "daemon/base" / f"{name}.py"
        for name in ("admission", "connection", "connections", "peers")
    ]
    rooms = ("roster", "links", "engine", "sessions", "reports")
    sources = [path for room in rooms for path in (root / "daemon" / room).glob("*.py")]
    sources += [*base, root / "daemon" / "router.py"]
    sources += (root / "wire").glob("*.py")
    codes = {
        code
        for path in sources
        for code in re.findall(r'(?:Caller|Peer)Error\(\s*"([\w-]+)"', path.read_text())
    }
    assert {"malformed", "not-allowed", "superseded", "silent"} <= codes
    table = TEXT.partition("## Errors")[2]
    for code in codes:
        assert f"`{code}`" in table, code
