"""Tests of Kiwi's two plugins for Slurm, in a Lua interpreter with tables like Slurm's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lupa
import pytest

PLUGINS = Path(__file__).parents[3] / "integrations/slurm"
SHARD = "gres:shard:1"
NEED_MB = 81920 + 8192


class Slurm:
    """A Lua interpreter with the global ``slurm`` and a plugin."""

    def __init__(self, plugin: str) -> None:
        self._lua = lupa.LuaRuntime()
        self.told: list[str] = []
        self._lua.execute("slurm = {SUCCESS = 0}")
        self._lua.globals().slurm.log_user = lambda form, *values: self.told.append(
            form.replace("%s", "{}").replace("%d", "{}").format(*values)
        )
        text = (PLUGINS / plugin).read_text()
        assert 'directory = "/etc/slurm/"' in text
        text = text.replace('directory = "/etc/slurm/"', f'directory = "{PLUGINS}/"')
        assert self._lua.execute(text) == 0

    def __call__(self, function: str, **fields: object) -> dict[str, Any]:
        table = self._lua.table_from({name.replace("_", "-"): v for name, v in fields.items()})
        if function == "slurm_job_submit":
            table = self._lua.table_from(fields)
            assert self._lua.globals()[function](table, None, 1000) == 0
        else:
            assert self._lua.globals()[function](table, 0) == 0
        return dict(table)


def submit(**job: object) -> tuple[dict[str, Any], list[str]]:
    slurm = Slurm("job_submit.lua")
    return slurm("slurm_job_submit", **job), slurm.told


@pytest.mark.parametrize("asked", ["gres:gpu:1", "gres/gpu=1", "gpu", "gres:gpu:a100:2"])
def test_a_gpu_becomes_a_shard_and_gets_room_for_its_memory(asked: str) -> None:
    job, told = submit(partition="notebooks", tres_per_node=asked, min_mem_per_node=300)
    assert (job["tres_per_node"], job["min_mem_per_node"]) == (SHARD, NEED_MB)
    assert "shard:1 instead of a whole GPU" in told[0]
    assert f"{NEED_MB} MB of RAM" in told[1]


def test_what_else_the_job_asks_for_stays() -> None:
    job, _ = submit(partition="notebooks", tres_per_node="gres:gpu:1,license:matlab:2")
    assert job["tres_per_node"] == f"{SHARD},license:matlab:2"


@pytest.mark.parametrize("field", ["tres_per_job", "tres_per_task", "tres_per_socket"])
def test_gpus_of_a_whole_job_become_a_shard_too(field: str) -> None:
    job, _ = submit(partition="notebooks", **{field: "gres:gpu:4"})
    assert (job["tres_per_node"], job[field]) == (SHARD, "")


def test_a_shard_of_a_second_look_stays_one() -> None:
    job, told = submit(partition="notebooks", tres_per_node=SHARD, min_mem_per_node=NEED_MB)
    assert job["tres_per_node"] == SHARD
    assert told == []


@pytest.mark.parametrize(
    "memory", [{"min_mem_per_node": 100_000}, {"min_mem_per_node": 0}, {"min_mem_per_cpu": 100}]
)
def test_memory_that_is_enough_or_counted_otherwise_is_left(memory: dict[str, int]) -> None:
    job, _ = submit(partition="notebooks", tres_per_node="gres:gpu:1", **memory)
    assert {name: job[name] for name in memory} == memory


@pytest.mark.parametrize(
    "job",
    [
        {"partition": "gpu", "tres_per_node": "gres:gpu:1"},
        {"tres_per_node": "gres:gpu:1"},
        {"partition": "notebooks,gpu", "tres_per_node": "gres:gpu:1"},
        {"partition": "notebooks"},
        {"partition": "notebooks", "tres_per_node": "gres:fpga:1"},
    ],
)
def test_other_jobs_are_left_alone(job: dict[str, str]) -> None:
    assert submit(**job) == (job, [])


def test_srun_asks_for_its_step_what_its_job_gets() -> None:
    options = Slurm("cli_filter.lua")("slurm_cli_pre_submit", partition="notebooks", gres="gpu:1")
    assert options["gres"] == "shard:1"


@pytest.mark.parametrize("name", ["gpus", "gpus_per_node", "gpus_per_task", "gpus_per_socket"])
def test_every_way_to_ask_for_a_gpu_is_known(name: str) -> None:
    asked = {"partition": "notebooks", "gres": "license:x", name: "2"}
    options = Slurm("cli_filter.lua")("slurm_cli_pre_submit", **asked)
    assert options["gres"] == "shard:1,license:x"
    assert options[name.replace("_", "-")] == ""


def test_other_partitions_of_srun_are_left_alone() -> None:
    options = Slurm("cli_filter.lua")("slurm_cli_pre_submit", partition="gpu", gpus="1")
    assert options == {"partition": "gpu", "gpus": "1"}
