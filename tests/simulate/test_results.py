"""Tests of figures, fleets of GPUs, and the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from simulated_work import cell, session, trace

from kiwi_core.errors import CallerError
from kiwi_core.simulate.fleet import Plan, Work, run
from kiwi_core.simulate.measure import Measures, Summary, jain, spread, summarise
from kiwi_core.simulate.mixes import MIXES, generate
from kiwi_core.simulate.model import Setup
from kiwi_core.simulate.picture import waits_svg
from kiwi_core.units import GIB, NS_PER_S, seconds_to_ns


def measured(*cells: tuple[str, float, float, float]) -> Measures:
    """Make measures from cells: user, GPU, wait and response, in seconds."""
    measures = Measures([user for user, *_ in cells])
    for number, (_, gpu_s, wait_s, response_s) in enumerate(cells):
        measures.cell(
            number, seconds_to_ns(gpu_s), 0, seconds_to_ns(wait_s), seconds_to_ns(response_s)
        )
    return measures


def test_percentiles_are_values_that_occurred() -> None:
    hundred = spread(range(100, 0, -1))
    assert (hundred.n, hundred.p50, hundred.p95, hundred.p99, hundred.max) == (
        100,
        51,
        96,
        100,
        100,
    )
    assert hundred.mean == 50.5
    assert spread([7.0]).p99 == 7.0
    assert spread([]).n == 0


def test_each_cell_is_in_the_class_of_its_gpu_time() -> None:
    summary = summarise(
        measured(("a", 1.999, 1, 3), ("a", 2.0, 2, 4), ("b", 29.9, 3, 40), ("b", 500, 4, 600))
    )
    assert [one.wait_s.max for one in summary.classes] == [1, 2, 3, 0, 4]
    assert [one.wait_s.n for one in summary.classes] == [1, 1, 1, 0, 1]
    assert (summary.short.wait_s.n, summary.short.wait_s.max, summary.all.wait_s.max) == (3, 3, 4)


def test_slowdown_counts_from_the_request_and_spares_tiny_cells() -> None:
    summary = summarise(measured(("a", 10, 5, 20), ("a", 0.001, 0, 0.5)))
    assert summary.all.slowdown.max == 2.0
    assert summary.all.slowdown.p50 == 2.0
    assert summary.classes[0].slowdown.max == 1.0


def test_a_users_sessions_count_together() -> None:
    summary = summarise(measured(("a", 10, 0, 10), ("b", 5, 5, 10), ("a", 10, 20, 30)))
    assert [(user.user, user.cells, user.gpu_s) for user in summary.users] == [
        ("a", 2, 20.0),
        ("b", 1, 5.0),
    ]
    assert [user.share_while_wanting for user in summary.users] == [0.5, 0.5]
    assert summary.jain == 1.0


def test_jain() -> None:
    assert jain([1, 1, 1, 1]) == 1.0
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([]) == 1.0


# --- fleets -------------------------------------------------------------------------------------


def test_pooled_gpus_are_the_sum_of_them_whatever_the_number_of_processes() -> None:
    def plan(seed: int, gpus: int, tq_s: int = 30) -> Plan:
        work = Work(mix="6+1", hours=0.2)
        return Plan(work, seed=seed, gpus=gpus, setup=Setup(tq_ns=tq_s * NS_PER_S))

    told: list[float] = []
    together = run([plan(4, 3), plan(4, 3, 10)], jobs=2, progress=told.append)
    alone = run([plan(4, 1), plan(5, 1), plan(6, 1)])
    assert together[0].cells == sum(one.cells for one in alone)
    assert sorted(together[0].wait_ns) == sorted(wait for one in alone for wait in one.wait_ns)
    assert together[0].makespan_ns == sum(one.makespan_ns for one in alone)
    assert together[0] == run([plan(4, 3)])[0]
    assert together[1].suspensions > together[0].suspensions
    assert told[-1] == 1.0
    assert told == sorted(told)
    users = summarise(together[0]).users
    assert len(users) == 21
    assert users[7].user == "s1 on GPU 1"
    jains = [summarise(one).jain for one in alone]
    assert summarise(together[0]).jain == pytest.approx(sum(jains) / 3)


def test_a_trace_is_the_same_on_every_gpu() -> None:
    work = Work(trace=trace(session("a", cell(100.0)), session("b", cell(40.0), starts_s=1.0)))
    (pooled,) = run([Plan(work, gpus=2)])
    assert pooled.cells == 4
    assert list(pooled.gpu_ns[:2]) == list(pooled.gpu_ns[2:])


# --- generators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_as_long_as_asked_and_fits_the_gpu(name: str) -> None:
    work = generate(name, hours=6.0, seed=1, total_bytes=40 * GIB)
    assert len(work.sessions) == MIXES[name].sessions
    for one in work.sessions:
        lived_s = sum(c.think_ns + c.cpu_ns + c.gpu_ns for c in one.cells) / NS_PER_S
        last = one.cells[-1]
        last_s = (last.think_ns + last.cpu_ns + last.gpu_ns) / NS_PER_S
        assert lived_s - last_s < 6 * 3600 <= lived_s
        assert max(c.peak_bytes for c in one.cells) < 40 * GIB
        sizes = [c.peak_bytes for c in one.cells]
        assert sizes == sorted(sizes)


def test_cell_times_of_notebooks_are_as_published() -> None:
    lengths_s = sorted(
        (c.cpu_ns + c.gpu_ns) / NS_PER_S
        for seed in range(8)
        for one in generate("notebooks", seed=seed).sessions
        for c in one.cells[1:]
    )
    assert lengths_s[len(lengths_s) // 2] == pytest.approx(120.0, rel=0.1)
    assert lengths_s[len(lengths_s) * 3 // 4] == pytest.approx(300.0, rel=0.1)


def test_a_mix_is_scaled_in_its_proportions() -> None:
    def trainings(sessions: int) -> int:
        work = generate("6+2", hours=24.0, sessions=sessions)
        assert len(work.sessions) == sessions
        return sum(max(c.gpu_ns for c in s.cells) > 600 * NS_PER_S for s in work.sessions)

    assert [trainings(n) for n in (2, 8, 16, 40)] == [1, 2, 4, 10]
    with pytest.raises(CallerError, match="too few"):
        generate("6+2", sessions=1)
    with pytest.raises(CallerError, match="no mix 'all'") as raised:
        generate("all")
    assert "notebooks" in raised.value.remedy


# --- the picture --------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*columns: tuple[str, Summary]) -> ET.Element:
    return ET.fromstring(waits_svg("Waits <of> some & others", columns))


def test_the_picture_shows_every_class_of_every_column() -> None:
    one = summarise(measured(("a", 1, 0.5, 3), ("a", 5, 50, 4), ("b", 29.9, 3, 40)))
    other = summarise(measured(("a", 1, 0.0, 3), ("a", 5, 5000, 4), ("b", 29.9, 3, 40)))
    root = drawn(("round-robin, TQ 30 s", one), ("<best>", other))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "Waits <of> some & others" in texts
    assert {"under 2 s", "over 120 s", "<best>", "1 min", "10 h"} <= set(texts)
    bars = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}rect") is not None]
    assert len(bars) == 6  # three classes have cells, in two columns
    heights = [float(bar.find(f"{SVG}line").get("y2")) for bar in bars]  # type: ignore[union-attr, arg-type]
    assert heights[3] < heights[2]  # 5,000 s is higher up than 50 s
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("y", "-1")) <= float(root.get("height", "0"))
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text  # type: ignore[union-attr, operator]
    assert "median wait 50 s" in root.find(f"{SVG}desc").text  # type: ignore[union-attr, operator]


def test_waits_of_months_still_fit_the_picture() -> None:
    longest = summarise(measured(("a", 1, 9e6, 1e7)))
    (bar,) = drawn(("x", longest)).iter(f"{SVG}g")
    assert float(bar.find(f"{SVG}line").get("y2")) >= 60  # type: ignore[union-attr, arg-type]
