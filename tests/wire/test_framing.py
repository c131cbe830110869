"""Tests of framing: arbitrary bytes come in, lines and messages go out."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError, PeerError
from kiwi_core.states import AntiThrash, SessionState
from kiwi_core.wire.framing import (
    CLIENT_TYPES,
    DAEMON_TYPES,
    FrameReader,
    decode_client,
    decode_daemon,
    encode,
)
from kiwi_core.wire.messages import (
    Acquire,
    Error,
    GetStory,
    GpuStatus,
    Granted,
    Hello,
    MemoryStatus,
    Ping,
    QueueEntry,
    Role,
    SchedulerStatus,
    SessionStatus,
    Set,
    StatusReport,
)
from tests.wire.messages_strategy import CLIENT, DAEMON

LIMIT = 40


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


# Lines are much more frequent than in random bytes, so that valid ones precede and follow bad ones.
STREAM = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.just(b"\n"),
        st.sampled_from([b'{"type":"ping"}\n', b'{"type":"acquire","burst":1}\n', b"[" * 30]),
        st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
    max_size=12,
).map(b"".join)


@given(STREAM, st.lists(st.integers(0, 10_000)))
def test_any_bytes_in_any_chunks_raise_nothing_but_peer_error(data: bytes, cuts: list[int]) -> None:
    reader = FrameReader(LIMIT)
    lines: list[bytes] = []
    try:
        for chunk in chunks_of(data, cuts):
            lines.extend(_decoded(line) for line in reader.feed(chunk))
            assert reader.held_bytes <= LIMIT
    except PeerError as error:
        assert error.code in ("too-large", "malformed")  # noqa: PT017
        with pytest.raises(PeerError) as again:
            list(reader.feed(b""))
        assert again.value.code == error.code  # noqa: PT017
        assert reader.held_bytes == 0
    else:
        *whole, rest = data.split(b"\n")
        assert lines == whole
        assert reader.held_bytes == len(rest)


def _decoded(line: bytes) -> bytes:
    for decode in (decode_client, decode_daemon):
        try:
            decode(line)
        except PeerError as error:
            assert error.code in ("malformed", "unknown-type")  # noqa: PT017
    return line


@given(STREAM, st.lists(st.integers(0, 10_000)))
def test_how_bytes_are_cut_changes_nothing(data: bytes, cuts: list[int]) -> None:
    assert _outcome(chunks_of(data, cuts)) == _outcome([data])


def _outcome(chunks: list[bytes]) -> tuple[list[bytes], str]:
    reader, lines = FrameReader(LIMIT), []
    for chunk in chunks:
        more, code = _fed(reader, chunk)
        lines += more
        if code:
            return lines, code
    return lines, ""


def _fed(reader: FrameReader, data: bytes) -> tuple[list[bytes], str]:
    lines: list[bytes] = []
    try:
        for line in reader.feed(data):
            lines.append(line)  # noqa: PERF402 - those before an error count
    except PeerError as error:
        return lines, error.code
    return lines, ""


SHORT_LINES = st.text("ab{}\n\0é", max_size=12).map(str.encode) | st.binary(max_size=12)


@given(SHORT_LINES, SHORT_LINES.map(lambda line: line + b"\n"))
def test_the_fast_path_for_one_line_gives_the_same_result(before: bytes, data: bytes) -> None:
    reader = FrameReader(max_bytes=8)
    try:
        list(reader.feed(before))
    except PeerError:
        assert reader.only_line(data) is None
        return
    line = reader.only_line(data)
    if line is not None:
        assert list(reader.feed(data)) == [line]


def test_the_fast_path_is_taken_for_whole_lines_only() -> None:
    reader = FrameReader(max_bytes=8)
    assert reader.only_line(b"1234567\n") == b"1234567"
    for data in (b"", b"a", b"a\nb", b"a\nb\n", "é\n".encode(), b"a\0\n", b"123456789\n"):
        assert reader.only_line(data) is None
    list(reader.feed(b"a"))
    assert reader.only_line(b"b\n") is None


@given(st.binary(max_size=200))
def test_decoding_any_bytes_raises_nothing_but_peer_error(line: bytes) -> None:
    _decoded(line)


@given(CLIENT)
def test_what_a_client_says_arrives_as_it_was(message: object) -> None:
    line = encode(message)  # type: ignore[arg-type]
    assert line.count(b"\n") == 1
    (read,) = FrameReader().feed(line)
    assert decode_client(read) == message


@given(DAEMON)
def test_what_a_daemon_says_arrives_as_it_was(message: object) -> None:
    line = encode(message)  # type: ignore[arg-type]
    (read,) = FrameReader().feed(line)
    assert decode_daemon(read) == message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"x" * (LIMIT + 1), "too-large"),
        (b"x" * (LIMIT + 1) + b"\n", "too-large"),
        (b"a\0b\n", "malformed"),
        (b"\xff\n", "malformed"),
    ],
)
def test_a_bad_line_comes_after_the_good_ones_before_it(data: bytes, code: str) -> None:
    reader, lines = FrameReader(LIMIT), []
    with pytest.raises(PeerError) as caught:  # noqa: PT012
        for line in reader.feed(b'ok\n"\xc3\xa9"\n' + data):
            lines.append(line)  # noqa: PERF402
    assert lines == [b"ok", '"é"'.encode()]
    assert caught.value.code == code


def test_a_line_of_exactly_the_limit_is_fine() -> None:
    reader = FrameReader(LIMIT)
    assert list(reader.feed(b"x" * LIMIT)) == []
    assert list(reader.feed(b"\n")) == [b"x" * LIMIT]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"", "malformed"),
        (b"null", "malformed"),
        (b"{}", "malformed"),
        (b'{"type":1}', "malformed"),
        (b'{"type":"granted","burst":1,"quantum_s":1}', "unknown-type"),
        (b'{"type":"shout"}', "unknown-type"),
        (b'{"type":"acquire"}', "malformed"),
        (b'{"type":"acquire","burst":0}', "malformed"),
        (b'{"type":"acquire","burst":9007199254740992}', "malformed"),
        (b'{"type":"acquire","burst":1.5}', "malformed"),
        (b'{"type":"acquire","burst":true}', "malformed"),
        (b'{"type":"hello","protocol":1,"role":"king","client":"x"}', "malformed"),
        (b'{"type":"set","tq_s":1e999}', "malformed"),
        (b'{"type":"ping","x":' + b"[" * 20_000, "malformed"),
        (b"[" * 20_000, "malformed"),
        (b'{"type":"\xff"}', "malformed"),
        (b'{"type":"ping"}' + b" " * DEFAULTS.request_max_bytes, "too-large"),
    ],
)
def test_what_is_wrong_with_a_line_has_a_code(line: bytes, code: str) -> None:
    with pytest.raises(PeerError) as caught:
        decode_client(line)
    assert caught.value.code == code
    assert len(str(caught.value)) < 1000


def test_a_hello_with_too_long_a_path_is_refused() -> None:
    hello = Hello(protocol=1, role=Role.SESSION, client="x", cuda_library="/" * 4097)
    with pytest.raises(PeerError, match="cuda_library"):
        decode_client(encode(hello).strip())


def test_unknown_fields_are_ignored() -> None:
    assert decode_client(b'{"type":"ping","mood":"good"}') == Ping()
    assert decode_client(b'{"type":"acquire","burst":4,"for":{"a":[1]}}') == Acquire(burst=4)


def test_optional_fields_may_be_left_out() -> None:
    hello = decode_client(b'{"type":"hello","protocol":1,"role":"observer","client":"c"}')
    assert hello == Hello(protocol=1, role=Role.OBSERVER, client="c")


def test_names_are_cleaned_on_arrival() -> None:
    dirty = "a\x1b[31m\n" + "b" * 300
    hello = decode_client(
        encode(
            Hello(protocol=1, role=Role.SESSION, client=dirty, name=dirty, kernel_id=dirty)
        ).strip()
    )
    assert isinstance(hello, Hello)
    assert hello.name == hello.client == hello.kernel_id
    assert len(hello.name) == 200
    assert hello.name.isprintable()


def test_too_long_a_message_is_not_sent() -> None:
    with pytest.raises(CallerError) as caught:
        encode(Error(code="x", message="m" * 100), max_bytes=64)
    assert caught.value.code == "too-large"


def test_text_without_a_utf8_form_is_not_sent() -> None:
    with pytest.raises(CallerError) as caught:
        encode(GetStory(session="\udcff"))
    assert caught.value.code == "malformed"


def test_no_number_becomes_null() -> None:
    assert b'"tq_s":null' in encode(Set(tq_s=float("nan")))
    with pytest.raises(PeerError):
        decode_daemon(encode(Granted(burst=1, quantum_s=float("inf"))).strip())


def test_all_types_are_known_by_name() -> None:
    assert {"hello", "get-status", "end-burst"} < CLIENT_TYPES
    assert {"welcome", "notice", "status"} < DAEMON_TYPES
    assert not CLIENT_TYPES & DAEMON_TYPES


def test_the_status_of_a_thousand_sessions_fits() -> None:
    sessions = [
        SessionStatus(
            id=f"0123456789abcdef-{number}", pid=4_194_304, owner="somebody", name="n" * 40,
            state=SessionState.PAGED_OUT, resident_bytes=10**11, paged_out_bytes=10**11,
            suspensions=10**4, held_s=1 / 3, waited_s=1 / 3, kernel_id="0" * 36,
            peak_bytes=10**11, time_left_s=1 / 3, problem="page-out-refused",
            problem_text="Its memory could not be moved out: the process did not come to rest.",
        )
        for number in range(1000)
    ]  # fmt: skip
    queue = [
        QueueEntry(session=session.id, position=999, expected_wait_s=1 / 3, waited_s=1 / 3)
        for session in sessions
    ]
    status = GpuStatus(
        uuid="GPU-" + "0" * 36, name="NVIDIA", index=0, emulated=False,
        memory=MemoryStatus(total_bytes=1, free_bytes=1, paged_out_bytes=1, host_budget_bytes=1),
        scheduler=SchedulerStatus(tq_s=30.0, anti_thrash=AntiThrash.ON, serialised=True),
        holders=[], queue=queue, sessions=sessions,
    )  # fmt: skip
    line = encode(StatusReport(gpu=status))
    assert decode_daemon(line.strip()) == StatusReport(gpu=status)
    assert msgspec.json.decode(line)["gpu"]["sessions"][999]["id"] == sessions[999].id
