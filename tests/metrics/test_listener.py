"""Tests of the listener: daemons that answer, hang or are away, and unavailable ports."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from samples import SCRAPE_TIMEOUT_S, Scrape, away, reading, scrape

from kiwi_core.cli.app import _parser
from kiwi_core.errors import CallerError
from kiwi_core.metrics.listener import MetricsListener
from kiwi_core.metrics.reading import GpuPlace, GpuReading, ask_daemons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Open = Callable[..., MetricsListener]


@pytest.fixture
def listening() -> Iterator[Open]:
    """Start listeners on free ports, and close them after the test."""
    made: list[MetricsListener] = []

    def start(
        ask: Callable[[Sequence[GpuPlace]], list[GpuReading]] = ask_daemons,
        places: Sequence[GpuPlace] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> MetricsListener:
        listener = MetricsListener(host, port, places, ask)
        listener.start()
        made.append(listener)
        return listener

    yield start
    for listener in made:
        listener.close()


def test_what_is_asked_is_served(listening: Open) -> None:
    listener = listening(lambda _: [reading(), away()])
    assert listener.url.startswith("http://127.0.0.1:")
    seen = scrape(listener.url)
    assert seen("kiwi_up", gpu="GPU-a") == 1
    assert seen("kiwi_up", gpu="GPU-b") == 0
    assert not any(name.startswith(("python_", "process_")) for name in seen.names())


def test_openmetrics_is_served_to_those_who_ask_for_it(listening: Open) -> None:
    listener = listening(lambda _: [reading()])
    wanted = Request(
        listener.url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urlopen(wanted, timeout=SCRAPE_TIMEOUT_S) as answer:
        assert "openmetrics" in answer.headers["Content-Type"]
        assert answer.read().endswith(b"# EOF\n")


def test_nothing_can_be_changed_through_it(listening: Open) -> None:
    listener = listening(lambda _: [reading()])
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(listener.url, data=b"x", method="POST"), timeout=SCRAPE_TIMEOUT_S)
    refused.value.close()
    assert refused.value.code == 405


def test_scrapes_that_come_together_share_one_answer(
    listening: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_core.metrics.listener.FRESH_S", 60.0)  # the machine may be busy
    asked: list[int] = []
    go_on = threading.Event()

    def slow(_: Sequence[GpuPlace]) -> list[GpuReading]:
        asked.append(1)
        go_on.wait(SCRAPE_TIMEOUT_S)
        return [reading()]

    url = listening(slow).url
    seen: list[Scrape] = []
    threads = [threading.Thread(target=lambda: seen.append(scrape(url))) for _ in range(6)]
    for thread in threads:
        thread.start()
    while not asked:
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join(SCRAPE_TIMEOUT_S)
    assert len(seen) == 6
    assert len(asked) == 1


def test_each_later_scrape_asks_again(listening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_core.metrics.listener.FRESH_S", 0.0)
    held_s = iter((1.0, 2.0))
    listener = listening(lambda _: [reading(held_s=next(held_s))])
    assert scrape(listener.url)("kiwi_lease_held_seconds_total") == 1
    assert scrape(listener.url)("kiwi_lease_held_seconds_total") == 2


def test_daemons_that_hang_or_are_away_are_down_and_do_not_hold_up_the_scrape(
    listening: Open, tmp_path: Path
) -> None:
    hanging = socket.socket(socket.AF_UNIX)
    with hanging:
        hanging.bind(str(tmp_path / "0.sock"))
        hanging.listen()  # connections are made, and nothing ever answers
        places = [GpuPlace(f"GPU-{n}", n, tmp_path / f"{n}.sock") for n in range(3)]
        (tmp_path / "2.sock").write_text("no socket at all")
        seen = scrape(listening(places=places).url)  # the scrape has its own limit
    for number in range(3):
        assert seen("kiwi_up", gpu=f"GPU-{number}", index=str(number)) == 0
    assert seen.names() == {"kiwi_up"}


def test_asking_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # some of them, of earlier tests, may end meanwhile
    ask_daemons([GpuPlace("GPU-0", 0, tmp_path / "0.sock")])
    assert not set(threading.enumerate()) - before


# --- addresses ------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_with_what_to_do(listening: Open) -> None:
    first = listening(lambda _: [])
    port = int(first.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(CallerError) as refused:
        MetricsListener("127.0.0.1", port, ())
    assert refused.value.code == "no-metrics-port"
    assert f"127.0.0.1:{port}" in refused.value.message
    assert "another port" in refused.value.remedy


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CallerError) as refused:
        MetricsListener("192.0.2.1", 0, ())  # reserved for documentation
    assert "address of this machine" in refused.value.remedy


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CallerError, match="Cannot serve metrics"):
        MetricsListener("no-such-host.invalid", 0, ())


@pytest.mark.parametrize(
    ("host", "others"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_it_knows_whether_other_machines_reach_it(listening: Open, host: str, others: bool) -> None:
    assert listening(lambda _: [], host=host).for_others is others


def test_ipv6(listening: Open) -> None:
    try:
        listener = listening(lambda _: [reading()], host="::1")
    except CallerError as error:
        pytest.skip(f"no IPv6 here: {error.message}")
    assert listener.url.startswith("http://[::1]:")
    assert not listener.for_others
    assert scrape(listener.url)("kiwi_up") == 1


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9402", ("127.0.0.1", 9402)),
        ("9402", ("127.0.0.1", 9402)),
        ("0.0.0.0:9402", ("0.0.0.0", 9402)),
        ("gpu-box.example:80", ("gpu-box.example", 80)),
        ("[::1]:9402", ("::1", 9402)),
        ("[::]:0", ("::", 0)),
    ],
)
def test_an_address_that_is_understood(text: str, address: tuple[str, int]) -> None:
    parser, _ = _parser("daemon")
    assert parser.parse_args(["daemon", "--metrics", text]).metrics == address


@pytest.mark.parametrize("text", ["", ":", "host", "host:", "::1:9402", ":99999", "a b:1", ":-1"])
def test_a_wrong_address_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser, _ = _parser("daemon")
    with pytest.raises(SystemExit):
        parser.parse_args(["daemon", f"--metrics={text}"])
    assert "write for example :9402" in capsys.readouterr().err
