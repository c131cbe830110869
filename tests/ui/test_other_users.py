"""Tests of Alice's JupyterLab on a GPU that Bob uses too. They need root, to be both users."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from daemon import running_daemon
from lab import running_lab
from playwright.sync_api import expect
from sharing_stage import USE, Stage
from somebody import ALICE, BOB, Somebody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from lab_page import LabPage
    from playwright.sync_api import WebSocket

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

SECRETS = ("bobs-secret", "kernel-of-bob")


@pytest.fixture
def stage(private_tmp: Path, stack: ExitStack) -> Stage:
    """Start root's daemon for everybody; the server and its kernels are Alice's."""
    daemon = stack.enter_context(running_daemon("1x128MiB", "--tq", "600"))
    private_tmp.chmod(0o711)
    daemon.directory.chmod(0o755)
    # Everybody may use real GPUs, too.
    daemon.state_path.chmod(0o666)
    daemon.state_path.with_suffix(".d").chmod(0o777)
    return Stage(daemon, stack.enter_context(running_lab(daemon.env, uid=ALICE)))


@pytest.fixture
def bob(stage: Stage) -> Iterator[Somebody]:
    """Start a session of Bob's that does nothing."""
    (path,) = stage.daemon.sockets()
    bob = Somebody(path, BOB)
    answer = bob.hello(role="session", name="bobs-secret.ipynb", kernel_id="kernel-of-bob")
    assert answer["type"] == "welcome", answer
    yield bob
    bob.kill()


def test_a_session_of_another_user_is_anonymous(
    stage: Stage, bob: Somebody, open_lab: Callable[..., LabPage]
) -> None:
    """Bob has the GPU, and Alice waits. She sees that somebody has it and for how long, but neither
    who nor what, not even in the data that her browser receives."""
    lines = ["from gpu_work import Memory\nmemory = Memory(76, 1)", "memory.step()"]
    stage.lab.write_notebook("alices.ipynb", lines)
    page = open_lab(stage)
    sent: list[str] = []

    def listen(socket: WebSocket) -> None:
        if "kiwi" in socket.url:
            socket.on("framereceived", lambda frame: sent.append(str(frame)))

    page.page.on("websocket", listen)
    page.reload()  # so that the test reads the stream from its beginning
    panel = page.panel()
    alice = page.open_notebook("alices.ipynb")
    alice.run(0)
    his = next(s.id for s in stage.daemon.status().sessions if s.name == "bobs-secret.ipynb")
    assert bob.ask("acquire", burst=1)["type"] in ("waiting", "granted")
    stage.daemon.wait_for(lambda s: s.holders == [his], "Alice's memory has made room for Bob")
    alice.start(USE)
    hers = stage.session("alices.ipynb").id
    entry = panel.queue_entry(hers)
    expect(entry).to_contain_text("alices.ipynb")
    holder = panel.part("holder")
    expect(holder).to_have_attribute("data-session", his)
    expect(holder).to_contain_text("another user")
    expect(holder.get_by_role("button")).to_have_count(0)
    expect(panel.part("my-wait")).to_contain_text("1st of 1")
    expect(alice.waiting_line(USE)).to_contain_text("another user")
    assert _settings_are_text(page)
    bob.kill()
    alice.wait_end(USE)
    expect(panel.spans("held", his).first).to_be_attached()
    assert any(his in frame for frame in sent), "the stream was listened to"
    for secret in (*SECRETS, str(BOB)):
        assert secret not in page.page.content()
        assert not any(secret in frame for frame in sent), secret


def _settings_are_text(page: LabPage) -> bool:
    """Return whether the settings are shown as text, because only the daemon's owner may change
    them."""
    panel = page.panel()
    expect(panel.part("gpu")).to_contain_text("Quantum: 600 s")
    return panel.part("tq").count() == 0 and panel.part("mode").count() == 0
