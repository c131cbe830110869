"""Tests that each example of jupyterhub_config.py loads, and installs the options page."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from traitlets.config import Config

EXAMPLES = sorted((Path(__file__).parents[3] / "integrations/jupyterhub/spawners").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_loaded(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "batchspawner", ModuleType("batchspawner"))
    c = Config()
    exec(compile(example.read_text(), example, "exec"), {"get_config": lambda: c})
    assert c.JupyterHub.spawner_class.lower().startswith((example.stem[:4], "jupyterhub", "batch"))
    spawner = SimpleNamespace(user_options={}, environment={}, node_selector={}, req_options="")
    asyncio.run(c.Spawner.pre_spawn_hook(spawner))
    assert c.Spawner.options_from_form({"kiwi_place": ["x"]}) == {"kiwi_place": "x"}


def test_there_is_one_for_each_spawner_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "integrations/jupyterhub/README.md").read_text()
    assert len(EXAMPLES) == 5
    assert all(f"`{example.name}`" in page for example in EXAMPLES)
