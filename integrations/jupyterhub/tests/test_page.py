"""Tests of the hub's options page: what it shows, and where it starts a server."""

from __future__ import annotations

import asyncio
import math
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import kiwi_jupyterhub as hub
from kiwi_jupyterhub.page import CHOICE, form_html

NEAR, FAR = hub.Place("kn2", "kn2", 0.0), hub.Place("kn1", "kn1", 75.0)
AWAY, UNKNOWN = hub.Place("kn3", "<kn3>", None), hub.Place("kn4", "kn4", math.inf)


class Form(HTMLParser):
    """Read each choice of a page: its value, its words, and whether it is checked or disabled."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[tuple[str, str, str]] = []
        self._input: dict[str, str | None] = {}
        self._in_label = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_label = tag == "label"
        if tag == "input":
            self._input = dict(attrs)
            assert self._input["name"] == CHOICE

    def handle_data(self, data: str) -> None:
        if self._in_label:
            state = " ".join(word for word in ("checked", "disabled") if word in self._input)
            self.rows.append((str(self._input["value"]), data, state))
            self._in_label = False


def test_the_shortest_wait_comes_first_and_is_chosen() -> None:
    assert Form(form_html([FAR, AWAY, UNKNOWN, NEAR])).rows == [
        ("", "where the wait is shortest (now kn2, free now)", "checked"),
        ("kn2", "kn2: free now", ""),
        ("kn1", "kn1: a cell waits about 1 min 15 s", ""),
        ("kn4", "kn4: nobody can say how long", ""),
        ("kn3", "<kn3>: takes nobody now", "disabled"),
    ]


def test_without_a_place_there_is_one_choice() -> None:
    assert Form(form_html([])).rows == [("", "where the wait is shortest", "checked")]


def spawner(**options: str) -> SimpleNamespace:
    return SimpleNamespace(
        user_options=options, environment={"A": "1"}, node_selector={}, req_options=""
    )


def test_a_server_is_put_on_the_place_that_exists() -> None:
    page = hub.OptionsPage(lambda: [NEAR, FAR], hub.on_slurm_node)
    one = spawner(**page.options({CHOICE: ["kn1"]}))
    asyncio.run(page.before_spawn(one))
    assert one.req_options == "--nodelist=kn1"
    asyncio.run(page.before_spawn(one := spawner()))
    assert one.req_options == ""


@pytest.mark.parametrize("key", ["kn9", "kn1 --uid=0", "kn1\n#SBATCH --uid=0"])
def test_a_place_that_does_not_exist_is_refused(key: str) -> None:
    page = hub.OptionsPage(lambda: [NEAR, FAR], hub.on_slurm_node)
    one = spawner(**{CHOICE: key})
    with pytest.raises(ValueError, match="There is no place"):
        asyncio.run(page.before_spawn(one))
    assert one.req_options == ""


def test_the_page_says_so_if_the_waits_are_not_known() -> None:
    def fails() -> list[hub.Place]:
        raise FileNotFoundError("sinfo")

    page = hub.OptionsPage(fails, hub.on_slurm_node)
    assert "not known now (FileNotFoundError)" in asyncio.run(page.form(spawner()))
    asyncio.run(page.before_spawn(spawner()))  # without a choice, nothing is queried


def test_many_readers_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_jupyterhub.page.FRESH_FOR_S", 600.0)  # the machine may be busy
    asked = []

    def waits() -> list[hub.Place]:
        asked.append(1)
        return [NEAR]

    async def read() -> None:
        page = hub.OptionsPage(waits, hub.on_slurm_node)
        pages = await asyncio.gather(*(page.form(spawner()) for _ in range(10)))
        assert len(set(pages)) == 1

    asyncio.run(read())
    assert len(asked) == 1


def test_on_a_gpu_of_the_hubs_machine() -> None:
    one = spawner()
    hub.on_gpu(one, "GPU-1")
    assert one.environment == {"A": "1", "KIWI_GPU": "GPU-1"}
    hub.on_gpu(one, "")
    assert one.environment == {"A": "1"}


def test_on_a_node_of_kubernetes() -> None:
    one = spawner()
    one.node_selector = {"zone": "a"}
    hub.on_kubernetes_node(one, "kn1")
    assert one.node_selector == {"zone": "a", "kubernetes.io/hostname": "kn1"}
    hub.on_kubernetes_node(one, "")
    assert one.node_selector == {"zone": "a"}


def test_the_configuration_gets_three_functions() -> None:
    config = SimpleNamespace(Spawner=SimpleNamespace())
    page = hub.OptionsPage(lambda: [NEAR], hub.on_gpu)
    page.install(config)
    assert config.Spawner.options_form == page.form
    assert config.Spawner.options_from_form == page.options
    assert config.Spawner.pre_spawn_hook == page.before_spawn
