"""Tests that the C and the Python JSON code accept the same texts with the same values."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint64
from typing import Any

import pytest

from kiwi_core import compiled
from kiwi_core.preload._paths import SOURCES

TEXT, INTEGER, BOOL = range(3)
TEXT_ROOM = 64


class Field(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("kind", c_int),
        ("into", ctypes.c_void_p),
        ("room", c_size_t),
        ("found", c_bool),
    ]


class Out(Structure):
    _fields_ = [
        ("at", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("comma", c_bool),
        ("full", c_bool),
    ]


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("json") / "json.so"
    sources = [str(SOURCES / name) for name in ("link/json.c", "link/json_write.c")]
    command = [*compiled.find_compiler(), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += ["-iquote", str(SOURCES)]
    subprocess.run([*command, "-shared", "-fPIC", "-o", str(target), *sources], check=True)
    library = ctypes.CDLL(str(target))
    library.kp_json_read.argtypes = [c_char_p, c_size_t, POINTER(Field), c_size_t]
    library.kp_json_read.restype = c_bool
    library.kp_json_end.restype = c_size_t
    library.kp_json_text.argtypes = [POINTER(Out), c_char_p, c_char_p, c_size_t]
    library.kp_json_integer.argtypes = [POINTER(Out), c_char_p, c_uint64]
    return library


def read(c: ctypes.CDLL, line: bytes) -> dict[str, Any] | None:
    """Return the members t, i and b that the C reader finds; ``None``: it refuses the line."""
    text, integer, flag = ctypes.create_string_buffer(TEXT_ROOM), c_int64(), c_bool()
    fields = (Field * 3)(
        Field(b"t", TEXT, ctypes.addressof(text), TEXT_ROOM),
        Field(b"i", INTEGER, ctypes.addressof(integer), 0),
        Field(b"b", BOOL, ctypes.addressof(flag), 0),
    )
    if not c.kp_json_read(line, len(line), fields, 3):
        return None
    values = (text.value.decode(), integer.value, flag.value)
    return {
        name: value for name, value, field in zip("tib", values, fields, strict=True) if field.found
    }


class _RefusedError(ValueError):
    pass


def _refuse(text: str) -> None:
    raise _RefusedError(text)


class _Number(str):
    """A number, as the text of the line."""


def _wanted(name: str, value: object) -> object:
    match name:
        case "t" if type(value) is str:
            cut = value.replace("\0", "�").encode()[: TEXT_ROOM - 1]
            return cut.decode(errors="ignore")
        case "i" if type(value) is _Number and value.lstrip("-").isdecimal():
            if abs(int(value)) < 1 << 53:
                return int(value)
        case "b" if type(value) is bool:
            return value
    raise _RefusedError(name)


def expected(line: bytes) -> dict[str, Any] | None:
    def members(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return pairs

    try:
        whole = json.loads(
            line.decode(),
            parse_constant=_refuse,
            parse_int=_Number,
            parse_float=_Number,
            object_pairs_hook=members,
        )
        # Half of a surrogate pair alone is no text.
        json.dumps(whole, ensure_ascii=False).encode()
        # A list of pairs is what an object was; all others are lists of something else or empty.
        if line.lstrip(b" \t\r\n")[:1] != b"{":
            return None
        return {name: _wanted(name, value) for name, value in whole if name in set("tib")}
    except ValueError:
        return None


NUMBERS = (
    "0 -0 1 -1 9007199254740991 9007199254740992 1.5 0.25 1e3 1E-3 2.5e+2 1e-999 1e999".split()
)
NUMBERS += ["12345678901234567890123", "0.1234567890123456789012345", "100000000000000000000e-20"]
NUMBERS += ["01", "+1", ".5", "1.", "1e", "--1", "NaN", "-Infinity", "0x1", "1_0"]
TEXTS = ['""', '"a"', '"é😀"', r'"\u00e9\ud83d\ude00"', r'"\n\t\"\\\/\b\f\r"', r'"\u0000"']
TEXTS += [r'"\ud83d"', r'"\udc00\ud800"', r'"\x"', r'"\u12g4"', '"\x01"', '"' + "é" * 50 + '"']


def made_up(draw: random.Random, depth: int = 0) -> str:
    def value() -> str:
        kind = draw.randrange(9 if depth < 4 else 5)
        if kind < 2:
            return draw.choice(NUMBERS[:16] if draw.random() < 0.9 else NUMBERS)
        if kind < 4:
            return draw.choice(TEXTS[:6] if draw.random() < 0.9 else TEXTS)
        if kind == 4:
            return draw.choice(["true", "false", "null"])
        if kind < 7:
            return "[" + ", ".join(value() for _ in range(draw.randrange(3))) + "]"
        return made_up(draw, depth + 1)

    def member() -> str:
        name = draw.choice(["t", "i", "b", "x", "xxxx" * 20])
        fitting = {"t": TEXTS, "i": NUMBERS, "b": ["true", "false"]}.get(name)
        return f'"{name}":{draw.choice(fitting) if fitting and draw.random() < 0.9 else value()}'

    space = draw.choice(["", "", " ", "\t", "\r"])
    return "{" + space + f"{space},".join(member() for _ in range(draw.randrange(4))) + space + "}"


def spoilt(draw: random.Random, line: bytes) -> bytes:
    data = bytearray(line)
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(3):
            case 0:
                data[at : at + 1] = bytes([draw.choice(b'{}[]",:\\u0 -.eE+tfn\x00\xc3\xed\xff')])
            case 1:
                del data[at : at + draw.randrange(4)]
            case _:
                data[at:at] = data[draw.randrange(len(data) + 1) :][: draw.randrange(6)]
    return bytes(data)


def test_it_reads_what_python_reads(c: ctypes.CDLL) -> None:
    draw = random.Random(4)
    taken = refused = 0
    for _ in range(20_000):
        line = spoilt(draw, made_up(draw).encode())
        got, want = read(c, line), expected(line)
        assert got == want, line
        taken += got is not None
        refused += got is None
    assert taken > 3000
    assert refused > 3000


def test_too_deep_is_refused_and_costs_nothing(c: ctypes.CDLL) -> None:
    assert read(c, b'{"x":' + b"[" * 12 + b"]" * 12 + b"}") == {}
    assert read(c, b'{"x":' + b"[" * 32_000 + b"]" * 32_000 + b"}") is None
    assert read(c, b'{"x":' * 10_000 + b"1" + b"}" * 10_000) is None


@pytest.mark.parametrize(
    ("value", "max_bytes", "back"),
    [
        (b'a "quoted" \\ path\n\t\x01', 100, 'a "quoted" \\ path\n\t\x01'),
        ("é😀".encode(), 100, "é😀"),
        ("é😀".encode(), 5, "é"),
        (b"\xff\xfe ok \xed\xa0\x80", 100, "\ufffd\ufffd ok \ufffd\ufffd\ufffd"),
        (b"\xc3", 100, "\ufffd"),
        (b"x" * 300, 200, "x" * 200),
    ],
)
def test_what_it_writes_python_reads(
    c: ctypes.CDLL, value: bytes, max_bytes: int, back: str
) -> None:
    buffer, out = ctypes.create_string_buffer(4096), Out()
    c.kp_json_begin(ctypes.byref(out), buffer, c_size_t(4096))
    c.kp_json_text(ctypes.byref(out), b"text", value, max_bytes)
    c.kp_json_open(ctypes.byref(out), b"in")
    c.kp_json_integer(ctypes.byref(out), b"n", (1 << 53) - 1)
    c.kp_json_integer(ctypes.byref(out), b"zero", 0)
    c.kp_json_close(ctypes.byref(out))
    length = c.kp_json_end(ctypes.byref(out), buffer)
    assert buffer.raw[length - 1 : length] == b"\n"
    assert json.loads(buffer.raw[:length]) == {
        "text": back,
        "in": {"n": (1 << 53) - 1, "zero": 0},
    }


@pytest.mark.parametrize("room", range(30))
def test_a_line_that_does_not_fit_is_no_line(c: ctypes.CDLL, room: int) -> None:
    buffer, out = ctypes.create_string_buffer(64), Out()
    c.kp_json_begin(ctypes.byref(out), buffer, c_size_t(room))
    c.kp_json_text(ctypes.byref(out), b"t", b'0123"5678', 100)
    length = c.kp_json_end(ctypes.byref(out), buffer)
    assert length == (0 if room < len('{"t":"0123\\"5678"}\n') else 19)
    assert buffer.raw[room:] == bytes(64 - room), "nothing behind its end"
