"""Tests that the options of ``kiwi daemon`` reach the supervisor."""

from __future__ import annotations

import argparse
from dataclasses import replace

import msgspec
import pytest

from kiwi_core.cli.daemon import add_arguments
from kiwi_core.config import DEFAULTS
from kiwi_core.daemon import supervisor
from kiwi_core.daemon.options import ChildOptions, DaemonOptions
from kiwi_core.errors import CallerError
from kiwi_core.states import AntiThrash, Priority
from kiwi_core.units import GIB, NS_PER_S

TYPED = [
    "--gpu", "0", "--gpu", "GPU-1", "--tq", "2.5", "--anti-thrash", "always",
    "--policy", "Interactive", "--priority", "ann=high", "--priority", "bob=training",
    "--fair-share", "session", "--training-share", "0.3", "--host-budget", "8GiB",
    "--lock-timeout", "60", "--stuck-after", "2.5", "--idle-after", "0.5", "--swap-floor", "1.5",
    "--no-bring-back", "--socket-dir", "/s", "--state-dir", "/t", "--admin-group", "g",
    "--sessions-per-user", "8", "--metrics", ":9402", "--end-unused-after", "60", "--log-json",
    "--emulate", "2×512MiB", "--emulate-copy-rate", "1GiB",
    "--pager", "checkpoint",
]  # fmt: skip
ASKED = DaemonOptions(
    gpus=["0", "GPU-1"],
    tq_ns=2_500_000_000,
    anti_thrash=AntiThrash.ALWAYS,
    policy="interactive",
    priorities=[("ann", Priority.HIGH), ("bob", Priority.TRAINING)],
    emulate="2x512MiB",
    emulate_copy_bytes_per_s=GIB,
    socket_dir="/s",
    state_dir="/t",
    admin_group="g",
    host_budget_bytes=8 * GIB,
    metrics=("127.0.0.1", 9402),
    log_json=True,
    end_unused_after_s=60.0,
    sessions_per_user=8,
    pager="checkpoint",
    config=replace(
        DEFAULTS,
        lock_timeout_ns=60 * NS_PER_S,
        operation_deadline_min_ns=2_500_000_000,
        lingering_idle_ns=NS_PER_S // 2,
        swap_floor_factor=1.5,
        training_share=0.3,
        turns_by_owner=False,
        bring_back=False,
    ),
)


@pytest.fixture
def asked(monkeypatch):
    seen: list[DaemonOptions] = []

    def main(options: DaemonOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(supervisor, "main", main)
    return seen


def test_nothing_typed_is_every_default(kiwi, asked):
    assert kiwi("daemon").code == 0
    assert asked == [DaemonOptions()]


def test_everything_typed_arrives(kiwi, asked):
    assert kiwi("daemon", *TYPED).code == 0
    assert asked == [ASKED]


def test_everything_there_is_was_typed():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = {name for action in parser._actions for name in action.option_strings}
    assert options - {"-h", "--help"} == {word for word in TYPED if word.startswith("--")}
    default = DaemonOptions()
    own = ASKED.__struct_fields__
    assert [name for name in own if getattr(ASKED, name) == getattr(default, name)] == []


def test_a_daemon_reads_what_was_asked_for():
    child = ChildOptions(asked=ASKED, gpu_uuid="GPU-1", sockets="/s", state="/t")
    assert msgspec.json.decode(msgspec.json.encode(child), type=ChildOptions) == child


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--fair-share", "user", "is neither owner nor session"),
        ("--policy", "best", "there are: interactive, round-robin"),
        ("--priority", "ann", "USER=CLASS"),
        ("--priority", "=high", "USER=CLASS"),
        ("--priority", "ann=royal", "there are: low, normal, high, training"),
        ("--training-share", "0", "is not a share"),
        ("--training-share", "0.6", "is not a share"),
        ("--training-share", "much", "is not a share"),
    ],
)
def test_what_is_no_policy_or_priority_is_said_before_anything_starts(
    kiwi, asked, option, text, words
):
    result = kiwi("daemon", f"{option}={text}")
    assert result.code == 2
    assert words in result.err
    assert not asked


@pytest.mark.parametrize("text", ["-1", "often", "nan", "1000"])
def test_what_is_no_factor_is_said_before_anything_starts(kiwi, asked, text):
    result = kiwi("daemon", f"--swap-floor={text}")
    assert result.code == 2
    assert "is not a factor" in result.err
    assert not asked


@pytest.mark.parametrize(
    "text", ["2", "x512MiB", "0x512MiB", "2x", "2xbig", "-1x1GiB", "1x1GiB,595"]
)
def test_what_is_no_emulation_is_said_before_anything_starts(kiwi, asked, text):
    result = kiwi("daemon", f"--emulate={text}")
    assert result.code == 2
    assert "--emulate" in result.err
    assert asked == []


def test_an_emulated_driver_is_chosen_by_name(kiwi, asked):
    assert kiwi("daemon", "--emulate", "1×512MiB,driver=595").code == 0
    assert asked[0].emulate == "1x512MiB,driver=595"
    result = kiwi("daemon", "--emulate", "1x512MiB,driver=470")
    assert result.code == 2
    assert "580, 595, 595-open, 610" in result.err
    assert len(asked) == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
def test_what_is_no_time_is_said_before_anything_starts(kiwi, asked, text):
    result = kiwi("daemon", f"--lock-timeout={text}")
    assert result.code == 2
    assert "--lock-timeout" in result.err
    assert asked == []


def test_what_the_supervisor_cannot_do_is_a_sentence(kiwi, monkeypatch):
    def main(_options: DaemonOptions) -> int:
        raise CallerError("no-gpu", "There is no GPU.", "Use --emulate.")

    monkeypatch.setattr(supervisor, "main", main)
    result = kiwi("daemon")
    assert (result.code, result.err) == (1, "kiwi: There is no GPU.\n      Use --emulate.\n")


def test_a_group_that_the_machine_does_not_have_is_refused(kiwi, tmp_path):
    result = kiwi("daemon", "--admin-group", "no-such-group", "--socket-dir", str(tmp_path / "s"))
    assert result.code == 1
    assert "This machine has no group 'no-such-group'." in result.err
    assert not (tmp_path / "s").exists()
