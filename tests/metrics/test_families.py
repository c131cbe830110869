"""Tests of the exposition: names, units, labels, and each number in its place."""

from __future__ import annotations

import math
import re

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as strict_parser
from samples import Scrape, away, metrics, reading

from kiwi_core.metrics.collector import KiwiCollector
from kiwi_core.metrics.families import FAMILIES, GPU_LABELS, INFO, UP, WAITS, families_of
from kiwi_core.metrics.reading import GpuReading
from kiwi_core.states import Reason
from kiwi_core.wire.metrics import OPERATIONS, GpuMetrics

UNITS = ("seconds", "bytes", "bytes_per_second")
NOT_BASE_UNITS = re.compile(
    r"_(ms|millis|milliseconds|minutes|hours|kb|mb|gb|kib|mib|gib|percent|ns|nanoseconds)(_|$)"
)
LABELS = {
    *GPU_LABELS, "after", "state", "direction", "mode", "operation", "reason", "code", "le",
    "version", "driver", "model", "emulated", "policy", "what",
}  # fmt: skip


def exposed(*readings: GpuReading) -> Scrape:
    registry = CollectorRegistry()
    registry.register(KiwiCollector(lambda: readings))
    return Scrape(prometheus_client.generate_latest(registry).decode())


@pytest.fixture(scope="module")
def both() -> Scrape:
    """Return the scrape of one GPU whose daemon answers and one whose daemon does not."""
    return exposed(away(), reading())


# --- lint: what promtool would say ----------------------------------------------------------------


def test_every_family_has_a_type_and_a_help_that_says_something(both: Scrape) -> None:
    assert len(both.families) == len(FAMILIES) + 3
    for name, family in both.families.items():
        assert family.type in ("counter", "gauge", "histogram"), name
        assert len(family.documentation) > 12, name
        assert family.documentation.rstrip().endswith("."), name


def test_names_follow_the_conventions(both: Scrape) -> None:
    for family in both.families.values():
        assert re.fullmatch(r"kiwi_[a-z_]+[a-z]", family.name)
        assert not NOT_BASE_UNITS.search(family.name), family.name
        for sample in family.samples:
            counts = sample.name.endswith("_total")
            assert counts == (family.type == "counter"), sample.name
    for family in FAMILIES:
        measured = any(word in family.help for word in ("Time ", "quantum", "Memory", "Bytes"))
        if measured or "memory" in family.name:
            assert family.name.removesuffix("_total").endswith(UNITS), family.name


def test_no_family_is_there_twice() -> None:
    names = [UP[0], INFO[0], WAITS.name, *(family.name for family in FAMILIES)]
    assert len(set(names)) == len(names)


def test_labels_are_few_and_name_nobody(both: Scrape) -> None:
    for family in both.families.values():
        for sample in family.samples:
            assert set(sample.labels) <= LABELS
            assert {"gpu", "index"} <= set(sample.labels)


def test_a_gpu_has_a_bounded_number_of_series() -> None:
    """With every label that there can be, except the few codes of errors."""
    refusals = [
        {"operation": operation, "reason": reason, "count": 1}
        for operation in OPERATIONS
        for reason in Reason
    ]
    full = exposed(
        reading(refusals=msgspec.convert(refusals, list[metrics().refusals[0].__class__]))
    )
    series = [s for family in full.families.values() for s in family.samples]
    assert len(series) == len(
        [s for family in exposed(reading()).families.values() for s in family.samples]
    )
    assert len(series) < 200


def test_the_strict_parser_of_openmetrics_takes_it() -> None:
    """The parser checks buckets, counts, suffixes and duplicates."""
    registry = CollectorRegistry()
    registry.register(KiwiCollector(lambda: [reading(), away()]))
    text = openmetrics.generate_latest(registry).decode()
    families = list(strict_parser.text_string_to_metric_families(text))
    assert len(families) == len(FAMILIES) + 3


# --- values ---------------------------------------------------------------------------------------

EXPECTED = {
    ("kiwi_up", ()): 1, ("kiwi_lease_held_seconds_total", ()): 3600.25,
    ("kiwi_lease_session_held_seconds_total", ()): 4000.0,
    ("kiwi_lease_grants_total", (("after", "request"),)): 44,
    ("kiwi_lease_grants_total", (("after", "suspension"),)): 6,
    ("kiwi_lease_requests_abandoned_total", ()): 5, ("kiwi_lease_suspensions_total", ()): 6,
    ("kiwi_lease_holders", ()): 1, ("kiwi_queue_length", ()): 2,
    ("kiwi_sessions", (("state", "running"),)): 1, ("kiwi_sessions", (("state", "waiting"),)): 2,
    ("kiwi_sessions", (("state", "lost"),)): 0,
    ("kiwi_swaps_total", (("direction", "out"),)): 9,
    ("kiwi_swaps_total", (("direction", "in"),)): 8,
    ("kiwi_swap_bytes_total", (("direction", "out"),)): 2.0**60,
    ("kiwi_swap_bytes_total", (("direction", "in"),)): 7e9,
    ("kiwi_swap_seconds_total", (("direction", "out"),)): 12.9,
    ("kiwi_swap_seconds_total", (("direction", "in"),)): 9.75,
    ("kiwi_swap_last_bytes_per_second", ()): 3e10,
    ("kiwi_bring_back_hints_begun_total", ()): 15,
    ("kiwi_bring_back_hints_declined_total", ()): 16,
    ("kiwi_memory_total_bytes", ()): 80_000, ("kiwi_memory_free_bytes", ()): 20_000,
    ("kiwi_memory_resident_bytes", ()): 59_000, ("kiwi_memory_outside_bytes", ()): 1_000,
    ("kiwi_memory_paged_out_bytes", ()): 42_000, ("kiwi_memory_host_budget_bytes", ()): 256_000,
    ("kiwi_memory_arena_bytes", ()): 50_000,
    ("kiwi_gpu_utilisation_ratio", ()): 0.31, ("kiwi_gpu_temperature_celsius", ()): 32,
    ("kiwi_gpu_power_watts", ()): 33, ("kiwi_gpu_power_limit_watts", ()): 34,
    ("kiwi_newcomer_wait_seconds", ()): 35,
    ("kiwi_time_quantum_seconds", ()): 30, ("kiwi_serialised", ()): 1,
    ("kiwi_anti_thrash", (("mode", "always"),)): 1, ("kiwi_anti_thrash", (("mode", "on"),)): 0,
    ("kiwi_policy_info", (("policy", "interactive"),)): 1,
    ("kiwi_refusals_total", (("operation", "page-out"), ("reason", "lock-timeout"))): 11,
    ("kiwi_refusals_total", (("operation", "page-in"), ("reason", "lock-timeout"))): 0,
    ("kiwi_losses_total", (("direction", "out"),)): 12,
    ("kiwi_losses_total", (("direction", "in"),)): 13,
    ("kiwi_operations_running", ()): 4, ("kiwi_operations_stuck", ()): 3,
    ("kiwi_operations_overdue_total", ()): 14, ("kiwi_look_errors_total", ()): 22,
    ("kiwi_ignored_events_total", ()): 17, ("kiwi_journal_lines_lost_total", ()): 23,
    ("kiwi_connections", ()): 18, ("kiwi_connections_accepted_total", ()): 19,
    ("kiwi_connections_refused_total", (("code", "malformed"),)): 21,
    ("kiwi_peer_used", (("what", "sessions"),)): 25,
    ("kiwi_peer_limit", (("what", "sessions"),)): 26,
    ("kiwi_peer_share", (("what", "sessions"),)): 27,
    ("kiwi_peer_refused_total", (("what", "sessions"),)): 28,
    ("kiwi_peer_share", (("what", "requests"),)): 29,
    ("kiwi_peer_refused_total", (("what", "requests"),)): 30,
    ("kiwi_log_lines_dropped_total", ()): 24,
    ("kiwi_uptime_seconds", ()): 86400.5,
}  # fmt: skip


@pytest.mark.parametrize(("which", "value"), EXPECTED.items(), ids=lambda x: str(x))
def test_each_number_is_where_it_belongs(
    which: tuple[str, tuple[tuple[str, str], ...]], value: float
) -> None:
    name, labels = which
    assert exposed(reading())(name, gpu="GPU-a", index="0", **dict(labels)) == value


def test_what_nvml_does_not_say_is_absent() -> None:
    silent = reading(
        utilisation_percent=None, temperature_c=None, power_w=None, power_limit_w=None,
        newcomer_wait_s=None,
    )  # fmt: skip
    assert "kiwi_gpu_" in exposed(reading()).text
    lines = exposed(silent).text.splitlines()
    assert not [line for line in lines if line.startswith("kiwi_gpu_") and "info" not in line]


def test_every_family_and_every_field_is_among_them() -> None:
    assert {name for name, _ in EXPECTED} == {UP[0], *(family.name for family in FAMILIES)}
    elsewhere = {"uuid", "index", "name", "emulated", "driver_version", "daemon_version"}
    for field in set(GpuMetrics.__struct_fields__) - elsewhere:
        before = metrics()
        value = getattr(before, field)
        after = GpuReading("GPU-a", 0, msgspec.structs.replace(before, **{field: other(value)}))
        assert exposed(reading()).text != exposed(after).text, f"{field} is nowhere"


def other(value: object) -> object:
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)) and not hasattr(value, "value"):
        return value + 1
    if type(value) is str:
        return value + "+"
    if isinstance(value, str):  # the mode
        return next(mode for mode in type(value) if mode is not value)  # type: ignore[attr-defined]
    if isinstance(value, msgspec.Struct):
        name = "sum" if hasattr(value, "sum") else "moves"
        return msgspec.structs.replace(value, **{name: getattr(value, name) + 1})
    return type(value)()


def test_the_histogram(both: Scrape) -> None:
    def bucket(le: str) -> float:
        return both("kiwi_lease_wait_seconds_bucket", after="request", gpu="GPU-a", le=le)

    assert (bucket("0.1"), bucket("30.0"), bucket("+Inf")) == (40, 43, 44)
    assert both("kiwi_lease_wait_seconds_count", after="suspension") == 6
    assert both("kiwi_lease_wait_seconds_sum", after="suspension") == 130.0


def test_the_build_info_describes_the_daemon(both: Scrape) -> None:
    labels = {"version": "0.1.0", "driver": "580.65", "model": "NVIDIA H100", "emulated": "false"}
    assert both("kiwi_build_info", gpu="GPU-a", **labels) == 1


def test_the_policy_in_force() -> None:
    assert exposed(reading())("kiwi_policy_info", policy="interactive") == 1
    older = exposed(reading(policy=""))
    assert "kiwi_policy_info" not in older.names()


def test_a_gpu_without_its_daemon_is_down_and_has_nothing_else(both: Scrape) -> None:
    assert both("kiwi_up", gpu="GPU-b", index="1") == 0
    for name in both.names() - {"kiwi_up"}:
        assert all(
            sample.labels["gpu"] == "GPU-a"
            for family in both.families.values()
            for sample in family.samples
            if sample.name == name
        )


def test_without_a_move_there_is_no_speed() -> None:
    never = exposed(reading(moved_out=metrics().moved_in))
    assert "kiwi_swap_last_bytes_per_second" not in never.names()


def test_gpus_come_in_the_order_of_their_index() -> None:
    made = {family.name: family for family in families_of([away("GPU-z", 1), reading("GPU-y", 0)])}
    assert [sample.labels["gpu"] for sample in made["kiwi_up"].samples] == ["GPU-y", "GPU-z"]


def test_every_value_is_a_finite_number(both: Scrape) -> None:
    values = [s.value for family in both.families.values() for s in family.samples]
    assert all(math.isfinite(value) for value in values)


# --- a registry with others in it -----------------------------------------------------------------


def test_a_daemon_that_cannot_answer_does_not_hide_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> list[GpuReading]:
        raise ValueError("no such thing")

    registry = CollectorRegistry()
    registry.register(KiwiCollector(broken))
    prometheus_client.Counter("others", "Not Kiwi's.", registry=registry).inc(3)
    text = prometheus_client.generate_latest(registry).decode()
    assert "others_total 3.0" in text
    assert "kiwi" not in text
    assert "no such thing" in caplog.text


def test_registering_asks_nobody() -> None:
    asked: list[int] = []

    def ask() -> list[GpuReading]:
        asked.append(1)
        return []

    CollectorRegistry(auto_describe=True).register(KiwiCollector(ask))
    assert not asked
