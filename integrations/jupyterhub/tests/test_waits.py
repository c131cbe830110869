"""Tests of the sources of the hub's waits: daemons, Slurm, metrics."""

from __future__ import annotations

import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kiwi_jupyterhub as hub
from tests.client.scripted_daemon import ScriptedDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep a source from answering within three seconds."""
    monkeypatch.setattr("kiwi_jupyterhub.waits.WITHIN_S", 60.0)


SINFO = """\
kn1 75004 mixed
kn2 1 idle
kn1 75004 mixed
kn3 1 drained*
kn4 1000000002 allocated*
"""


def test_slurms_weights_are_waits(tmp_path: Path) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\ncat <<END\n{SINFO}END\n')
    sinfo.chmod(0o755)
    found = hub.waits_of_slurm("notebooks", command=[str(sinfo)])
    assert found == [
        hub.Place("kn1", "kn1", 75.0, 3),
        hub.Place("kn2", "kn2", 0.0),
        hub.Place("kn3", "kn3", None),
        hub.Place("kn4", "kn4", math.inf, 1),
    ]
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == "--noheader --Node --partition notebooks --format %N %w %T"


def test_a_nodes_weight_is_its_least_wait_then_its_sessions() -> None:
    busy, idle = hub.Place("a", "a", 75.4, 2), hub.Place("b", "b", 12.0, 1)
    assert hub.slurm_weight([busy, idle]) == 12004
    assert hub.slurm_weight([hub.Place("a", "a", 0.0, 2000)]) == 1000
    assert hub.slurm_weight([hub.Place("a", "a", math.inf)]) == 1_000_000_001
    with pytest.raises(ValueError, match="empty"):
        hub.slurm_weight([])


def test_the_gpus_of_this_machine(tmp_path: Path) -> None:
    daemons = [ScriptedDaemon(tmp_path / f"GPU-{n}.sock") for n in (0, 1)]
    for daemon in daemons:
        daemon.start()
    try:
        found = hub.waits_of_this_machine(tmp_path)
        # scripted daemons do not tell their wait
        unknown = hub.Place("GPU-1", "GPU 0 (Test GPU)", math.inf)
        assert found == [unknown] * 2
        daemons[1].stop()
        assert len(hub.waits_of_this_machine(tmp_path)) == 1
    finally:
        for daemon in daemons:
            daemon.stop()


@contextmanager
def metrics(text: str) -> Iterator[str]:
    """Run a server of metrics, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        ('kiwi_newcomer_wait_seconds{gpu="0"} 30.5\nkiwi_newcomer_wait_seconds{gpu="1"} 4\n', 4.0),
        ("# HELP kiwi_newcomer_wait_seconds How long\n", math.inf),
        ("# no daemon\n", None),
        ("kiwi_newcomer_wait_seconds soon\n", None),
    ],
)
def test_the_best_gpu_of_a_node(text: str, wait_s: float | None) -> None:
    with metrics(text) as url:
        assert hub.waits_of_metrics({"n1": url})() == [hub.Place("n1", "n1", wait_s)]


def test_a_node_that_does_not_answer_takes_nobody() -> None:
    with metrics("") as url:
        pass
    assert hub.waits_of_metrics({"n1": url})() == [hub.Place("n1", "n1", None)]
