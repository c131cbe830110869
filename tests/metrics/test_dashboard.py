"""Tests that the Grafana dashboard uses existing metrics and labels, and a form that Grafana
accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from samples import Scrape, reading

from kiwi_core.metrics.collector import KiwiCollector

FILE = Path(__file__).parents[2] / "integrations/grafana/kiwi-dashboard.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    (panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", [])
]
NAME = re.compile(r"\bkiwi_[a-z_]+\b")
SELECTOR = re.compile(r"(kiwi_[a-z_]+)\{([^}]*)\}")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
SCRAPED_WITH = {"instance", "job"}
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Return the labels by the name of each sample."""
    registry = CollectorRegistry()
    registry.register(KiwiCollector(lambda: [reading()]))
    scraped = Scrape(prometheus_client.generate_latest(registry).decode())
    return {
        sample.name: set(sample.labels) | SCRAPED_WITH
        for family in scraped.families.values()
        for sample in family.samples
    }


def test_there_is_something_to_look_at() -> None:
    assert len(QUERIES) > 25
    asked = {name for _, expr in QUERIES for name in NAME.findall(expr)}
    wanted = (
        "lease_wait_seconds_bucket", "lease_held_seconds_total", "queue_length", "sessions",
        "swaps_total", "swap_bytes_total", "memory_resident_bytes", "memory_paged_out_bytes",
        "memory_free_bytes", "refusals_total", "losses_total", "look_errors_total", "up",
    )  # fmt: skip
    assert {f"kiwi_{name}" for name in wanted} <= asked


@pytest.mark.parametrize(("title", "expr"), QUERIES, ids=lambda text: text[:40])
def test_every_metric_and_label_of_a_query_exists(
    title: str, expr: str, exposed: dict[str, set[str]]
) -> None:
    names = set(NAME.findall(expr))
    assert names, title
    for name in names:
        assert name in exposed, f"{title}: there is no {name}"
    labels = set.intersection(*(exposed[name] for name in names))
    for name, inside in SELECTOR.findall(expr):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside):
            assert label in exposed[name], f"{title}: {name} has no label {label}"
        # Each panel follows the choice above it.
        assert 'instance=~"$instance"' in inside
        assert 'gpu=~"$gpu"' in inside
    for group in GROUPED.findall(expr):
        assert {label.strip() for label in group.split(",")} <= labels, title
    for opening, closing in ("()", "{}", "[]"):
        assert expr.count(opening) == expr.count(closing), title
    for ranged in re.findall(r"\[([^\]]+)\]", expr):
        assert re.fullmatch(r"\$__rate_interval|\d+[smhd]", ranged), title


def test_counters_are_looked_at_as_rates_and_gauges_are_not() -> None:
    for title, expr in QUERIES:
        for name in NAME.findall(expr):
            counts = name.endswith(("_total", "_bucket"))
            rated = re.search(rf"\b(rate|increase)\({name}\{{", expr) is not None
            assert rated == (counts and name != "kiwi_up"), f"{title}: {name}"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_is_complete(panel: dict[str, Any]) -> None:
    kinds = ("timeseries", "stat", "heatmap", "state-timeline", "table")
    assert panel["type"] in kinds
    assert panel["title"]
    assert panel["description"].endswith(".")
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == source
    assert all(target["datasource"] == source for target in panel["targets"])
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters) > 0
    assert panel["fieldConfig"]["defaults"]["unit"]
    shown = {target["format"] for target in panel["targets"]}
    assert shown == {{"heatmap": "heatmap", "table": "table"}.get(panel["type"], "time_series")}


def test_legends_use_labels_that_the_query_leaves(exposed: dict[str, set[str]]) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = GROUPED.findall(target["expr"])
            if groups:
                left = {label.strip() for label in groups[-1].split(",")}
            elif re.search(r"\b(sum|avg|count)\(", target["expr"]):
                left = set()
            else:
                left = set.intersection(*(exposed[n] for n in NAME.findall(target["expr"])))
            assert used <= left, panel["title"]


def test_the_choices_above_are_there() -> None:
    choices = {choice["name"]: choice for choice in BOARD["templating"]["list"]}
    assert list(choices) == ["datasource", "instance", "gpu"]
    assert choices["datasource"]["type"] == "datasource"
    assert choices["datasource"]["query"] == "prometheus"
    for name in ("instance", "gpu"):
        choice = choices[name]
        assert choice["multi"]
        assert choice["includeAll"]
        assert re.fullmatch(rf"label_values\(kiwi_up.*, {name}\)", choice["query"]["query"])
    used = set(re.findall(r"\$(\w+)|\$\{(\w+)\}", json.dumps(BOARD)))
    known = {*choices, "__rate_interval", "__all"}
    assert {a or b for a, b in used} <= known


def test_the_dashboard_can_be_imported() -> None:
    assert BOARD["schemaVersion"] >= 39  # Grafana 11 and newer, which migrates older ones
    assert re.fullmatch(r"[a-z0-9-]{1,40}", BOARD["uid"])
    assert BOARD.get("id") is None  # a number could be another dashboard's
    assert BOARD["title"].startswith("Kiwi")
    assert {"time", "refresh", "templating", "annotations"} <= set(BOARD)


def test_panels_lie_side_by_side() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
