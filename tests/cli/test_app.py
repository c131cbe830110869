"""Tests of the parser, the errors and the exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kiwi_core.cli import app, exits
from kiwi_core.cli.terminal import Style, printable, table
from kiwi_core.errors import PeerError


def test_help_names_every_command_and_the_exit_codes(kiwi):
    result = kiwi("--help")
    assert result.code == 0
    listed = re.findall(r"^ {4}(\S+)(?: |$)", result.out, re.MULTILINE)
    assert set(app.COMMANDS) <= set(listed)
    assert "exit codes" in result.out


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_explains_itself_with_examples(kiwi, name):
    result = kiwi(name, "--help")
    assert result.code == 0
    assert f"kiwi {name}" in result.out.split("examples:")[1]


@pytest.mark.parametrize(
    "arguments", [["nope"], ["status", "--nope"], ["set", "tq"], ["daemon", "--tq", "x"]]
)
def test_what_is_not_understood_is_code_2_and_points_to_help(kiwi, arguments):
    result = kiwi(*arguments)
    assert result.code == exits.USAGE
    assert "--help" in result.err
    assert result.out == ""


def test_nothing_at_all_shows_the_help(kiwi):
    result = kiwi()
    assert result.code == exits.USAGE
    assert "examples:" in result.out


def test_version(kiwi):
    assert kiwi("--version").out.startswith("kiwi 0.")


def test_expected_errors_are_a_sentence_and_a_remedy(kiwi, monkeypatch):
    def fail(_arguments):
        raise PeerError("code", "It broke.", "Mend it.")

    monkeypatch.setattr(app, "_dispatch", fail)
    result = kiwi("status")
    assert result.code == exits.FAILED
    assert result.err == "kiwi: It broke.\n      Mend it.\n"


def test_interrupt_is_quiet(kiwi, monkeypatch):
    def interrupt(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_dispatch", interrupt)
    assert kiwi("status") == type(kiwi("status"))(exits.INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("typed", "meant"), [("statsu", "status"), ("suspned", "suspend"), ("docter", "doctor")]
)
def test_a_mistyped_command_is_answered_with_the_one_that_was_meant(kiwi, typed, meant):
    result = kiwi(typed)
    assert result.code == exits.USAGE
    assert f"Did you mean: kiwi {meant}" in result.err
    assert len(result.err.splitlines()) == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_left_is_no_error(sockets, unbuffered):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "kiwi_core.cli", "status", "--json"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=write_end,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write_end)
    assert done.returncode == exits.BROKEN_PIPE
    assert b"Traceback" not in done.stderr
    assert b"Broken" not in done.stderr


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from kiwi_core.cli import main; main(['--help'])\n"
        "heavy = {'asyncio', 'msgspec', 'psutil', 'structlog', 'cuda', 'pynvml', 'kiwi_core.wire',"
        " 'kiwi_core.client', 'kiwi_core.daemon', 'kiwi_core.gpu', 'kiwi_core.sched'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


class _Stream:
    def __init__(self, *, tty: bool) -> None:
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Style.of(_Stream(tty=True)).colour
    assert not Style.of(_Stream(tty=False)).colour
    monkeypatch.setenv("TERM", "dumb")
    assert not Style.of(_Stream(tty=True)).colour
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Style.of(_Stream(tty=True)).colour
    assert Style(False).red("x") == "x"
    assert Style(True).red("x") != "x"


def test_names_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\nc") == "a\ufffd[2Jb\ufffdc"


def test_tables_line_up():
    assert table([["a", "1"], ["bbb", "22"]], right=(1,)) == ["a     1", "bbb  22"]
