"""Every metric by name: what it counts, in which unit, with which labels.

Names follow the Prometheus conventions: base units, counters end in ``_total``. The labels are few
and bounded, and none names a user, a notebook or a process, since every scraper sees them all.
``docs/metrics.md`` has this table, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from kiwi_core.states import AntiThrash, Reason, SessionState
from kiwi_core.wire.metrics import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from kiwi_core.metrics.reading import GpuReading
    from kiwi_core.wire.metrics import GpuMetrics, Histogram

    Sample = tuple[tuple[str, ...], float]
    """The values of the family's own labels, and the number."""

GPU_LABELS: Final = ("gpu", "index")
"""Labels of every metric: the GPU's UUID and its index on this machine."""


@dataclass(frozen=True)
class Family:
    """One metric. ``read`` returns the samples of one GPU; ``labels`` come after ``GPU_LABELS``."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    read: Callable[[GpuMetrics], Iterable[Sample]]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistogramFamily:
    name: str
    help: str
    label: str
    read: Callable[[GpuMetrics], Iterable[tuple[str, Histogram]]]


def _only(read: Callable[[GpuMetrics], float]) -> Callable[[GpuMetrics], list[Sample]]:
    return lambda m: [((), read(m))]


def _counter(name: str, text: str, read: Callable[[GpuMetrics], float]) -> Family:
    return Family(name, CounterMetricFamily, text, _only(read))


def _gauge(name: str, text: str, read: Callable[[GpuMetrics], float]) -> Family:
    return Family(name, GaugeMetricFamily, text, _only(read))


def _known_gauge(name: str, text: str, read: Callable[[GpuMetrics], float | None]) -> Family:
    def samples(m: GpuMetrics) -> list[Sample]:
        value = read(m)
        return [] if value is None else [((), value)]

    return Family(name, GaugeMetricFamily, text, samples)


def _both_ways(
    out: Callable[[GpuMetrics], float | None], into: Callable[[GpuMetrics], float | None]
) -> Callable[[GpuMetrics], list[Sample]]:
    def read(m: GpuMetrics) -> list[Sample]:
        both = ((("out",), out(m)), (("in",), into(m)))
        return [(labels, value) for labels, value in both if value is not None]

    return read


def _refusals(m: GpuMetrics) -> list[Sample]:
    """Return all counts, zeros too. Prometheus' ``increase()`` misses the first refusal of a kind
    if its count was absent before."""
    counts = {(r.operation, r.reason): r.count for r in m.refusals}
    return [
        ((operation, reason.value), counts.get((operation, reason), 0))
        for operation in OPERATIONS
        for reason in Reason
    ]


WAITS: Final = HistogramFamily(
    "kiwi_lease_wait_seconds",
    'How long bursts waited for the GPU: after="request", from the request to the first grant; '
    'after="suspension", from each suspension in mid-burst to the next grant.',
    "after",
    lambda m: [("request", m.first_waits), ("suspension", m.resumption_waits)],
)

FAMILIES: Final[tuple[Family, ...]] = (
    # --- who has the GPU, and who waits -----------------------------------------------------------
    _counter(
        "kiwi_lease_held_seconds_total",
        "Time in which at least one session held the GPU.",
        lambda m: m.held_s,
    ),
    _counter(
        "kiwi_lease_session_held_seconds_total",
        "Time for which sessions held the GPU, added up over those that held it together.",
        lambda m: m.session_held_s,
    ),
    Family(
        "kiwi_lease_grants_total",
        CounterMetricFamily,
        'Grants: after="request", of a new burst; after="suspension", to go on in mid-burst.',
        lambda m: [
            (("request",), sum(m.first_waits.counts)),
            (("suspension",), sum(m.resumption_waits.counts)),
        ],
        ("after",),
    ),
    _counter(
        "kiwi_lease_requests_abandoned_total",
        "Requests that ended before they were granted: interrupted, or the session ended.",
        lambda m: m.waits_given_up,
    ),
    _counter(
        "kiwi_lease_suspensions_total",
        "Bursts suspended in their middle for others' turns.",
        lambda m: m.suspensions,
    ),
    _gauge("kiwi_lease_holders", "Sessions that hold the GPU.", lambda m: m.holders),
    _gauge("kiwi_queue_length", "Sessions that wait for the GPU.", lambda m: m.queue_length),
    Family(
        "kiwi_sessions",
        GaugeMetricFamily,
        "Sessions by state.",
        lambda m: [((state.value,), m.sessions.get(state, 0)) for state in SessionState],
        ("state",),
    ),
    # --- moving memory ----------------------------------------------------------------------------
    Family(
        "kiwi_swaps_total",
        CounterMetricFamily,
        'Moves of a session\'s memory: direction="out" to system RAM, "in" to the GPU.',
        _both_ways(lambda m: m.moved_out.moves, lambda m: m.moved_in.moves),
        ("direction",),
    ),
    Family(
        "kiwi_swap_bytes_total",
        CounterMetricFamily,
        "Bytes of sessions' memory moved.",
        _both_ways(lambda m: m.moved_out.bytes_moved, lambda m: m.moved_in.bytes_moved),
        ("direction",),
    ),
    Family(
        "kiwi_swap_seconds_total",
        CounterMetricFamily,
        "Time spent moving memory; the rate of the bytes over the rate of this is the speed.",
        _both_ways(lambda m: m.moved_out.seconds, lambda m: m.moved_in.seconds),
        ("direction",),
    ),
    Family(
        "kiwi_swap_last_bytes_per_second",
        GaugeMetricFamily,
        "Speed of the last move; absent before the first.",
        _both_ways(lambda m: m.moved_out.last_bytes_per_s, lambda m: m.moved_in.last_bytes_per_s),
        ("direction",),
    ),
    _counter(
        "kiwi_bring_back_hints_begun_total",
        "Hints that a session is about to be used after which its memory was brought back.",
        lambda m: m.hints_begun,
    ),
    _counter(
        "kiwi_bring_back_hints_declined_total",
        "Hints that a session is about to be used after which nothing was done.",
        lambda m: m.hints_declined,
    ),
    # --- memory -----------------------------------------------------------------------------------
    _gauge("kiwi_memory_total_bytes", "Memory of the GPU.", lambda m: m.total_bytes),
    _gauge("kiwi_memory_free_bytes", "Memory of the GPU that is free.", lambda m: m.free_bytes),
    _gauge(
        "kiwi_memory_resident_bytes",
        "Memory of the GPU that sessions hold.",
        lambda m: m.resident_bytes,
    ),
    _gauge(
        "kiwi_memory_outside_bytes",
        "Memory of the GPU that programs outside Kiwi hold.",
        lambda m: m.outside_bytes,
    ),
    _gauge(
        "kiwi_memory_paged_out_bytes",
        "GPU memory of sessions that is in system RAM.",
        lambda m: m.paged_out_bytes,
    ),
    _gauge(
        "kiwi_memory_host_budget_bytes",
        "System RAM that paged-out memory may take.",
        lambda m: m.host_budget_bytes,
    ),
    _gauge(
        "kiwi_memory_arena_bytes",
        "System RAM that preloaded libraries hold, for what is out and for speed.",
        lambda m: m.arena_bytes,
    ),
    # --- how hard the GPU works -------------------------------------------------------------------
    _known_gauge(
        "kiwi_gpu_utilisation_ratio",
        "Share of the last moments in which any kernel ran on the GPU; absent if NVML does not "
        "report it.",
        lambda m: None if m.utilisation_percent is None else m.utilisation_percent / 100,
    ),
    _known_gauge(
        "kiwi_gpu_temperature_celsius",
        "Temperature of the GPU; absent if NVML does not report it.",
        lambda m: m.temperature_c,
    ),
    _known_gauge(
        "kiwi_gpu_power_watts",
        "Power that the GPU draws; absent if NVML does not report it.",
        lambda m: m.power_w,
    ),
    _known_gauge(
        "kiwi_gpu_power_limit_watts",
        "Power that the GPU may draw; absent if NVML does not report it.",
        lambda m: m.power_limit_w,
    ),
    _known_gauge(
        "kiwi_newcomer_wait_seconds",
        "How long a new session would wait if it asked now; absent if that is not known.",
        lambda m: m.newcomer_wait_s,
    ),
    # --- settings ---------------------------------------------------------------------------------
    _gauge("kiwi_time_quantum_seconds", "The time quantum (TQ).", lambda m: m.tq_s),
    _gauge(
        "kiwi_serialised",
        "1 while one session at a time gets the GPU, 0 while they run in parallel.",
        lambda m: m.serialised,
    ),
    Family(
        "kiwi_anti_thrash",
        GaugeMetricFamily,
        "1 for the mode that is set, 0 for the others.",
        lambda m: [((mode.value,), mode is m.anti_thrash) for mode in AntiThrash],
        ("mode",),
    ),
    Family(
        "kiwi_policy_info",
        GaugeMetricFamily,
        "The policy in force, which decides who goes first; always 1.",
        lambda m: [((m.policy,), 1)] if m.policy else [],
        ("policy",),
    ),
    # --- what goes wrong --------------------------------------------------------------------------
    Family(
        "kiwi_refusals_total",
        CounterMetricFamily,
        "Operations on a session that were refused, with nothing changed.",
        _refusals,
        ("operation", "reason"),
    ),
    Family(
        "kiwi_losses_total",
        CounterMetricFamily,
        "Sessions whose GPU memory was lost in a move.",
        _both_ways(lambda m: m.lost_out, lambda m: m.lost_in),
        ("direction",),
    ),
    _gauge(
        "kiwi_operations_running",
        "Driver operations that have not reported, stuck ones included.",
        lambda m: m.operations_running,
    ),
    _gauge(
        "kiwi_operations_stuck",
        "Driver operations past their deadline that have not reported.",
        lambda m: m.operations_stuck,
    ),
    _counter(
        "kiwi_operations_overdue_total",
        "Driver operations that did not report by their deadline.",
        lambda m: m.overdue,
    ),
    _counter(
        "kiwi_look_errors_total",
        "Looks at the GPU's memory (driver, NVML) in which something could not be read.",
        lambda m: m.look_errors,
    ),
    _counter(
        "kiwi_ignored_events_total",
        "Events that the scheduler dropped: of unknown sessions or operations, or of stale bursts.",
        lambda m: m.ignored_events,
    ),
    _counter(
        "kiwi_journal_lines_lost_total",
        "Lines of the journal that could not be written.",
        lambda m: m.journal_lines_lost,
    ),
    # --- the daemon -------------------------------------------------------------------------------
    _gauge("kiwi_connections", "Connections to the daemon.", lambda m: m.connections),
    _counter(
        "kiwi_connections_accepted_total",
        "Connections that the daemon accepted.",
        lambda m: m.connections_taken,
    ),
    Family(
        "kiwi_connections_refused_total",
        CounterMetricFamily,
        "Connections that the daemon ended with a fatal error (protocol errors, limits), by its "
        "code; absent before the first.",
        lambda m: [((code,), count) for code, count in sorted(m.connections_ended.items())],
        ("code",),
    ),
    # --- what peers may make it hold (kiwi_core.peer_limits) --------------------------------------
    Family(
        "kiwi_peer_used",
        GaugeMetricFamily,
        "What connected programs make the daemon hold now; docs/metrics.md has each one.",
        lambda m: [((one.what,), one.used) for one in m.peers if one.most is not None],
        ("what",),
    ),
    Family(
        "kiwi_peer_limit",
        GaugeMetricFamily,
        "How much of it all users together may have; absent where users take turns instead.",
        lambda m: [((one.what,), one.most) for one in m.peers if one.most is not None],
        ("what",),
    ),
    Family(
        "kiwi_peer_share",
        GaugeMetricFamily,
        "How much of it one user may have at most.",
        lambda m: [((one.what,), one.per_user) for one in m.peers],
        ("what",),
    ),
    Family(
        "kiwi_peer_refused_total",
        CounterMetricFamily,
        "How often a user asked for more of it: was refused, or has to wait.",
        lambda m: [((one.what,), one.refused) for one in m.peers],
        ("what",),
    ),
    _counter(
        "kiwi_log_lines_dropped_total",
        "Lines of the daemon's log that were not written because too many of their kind came.",
        lambda m: m.log_lines_dropped,
    ),
    _gauge("kiwi_uptime_seconds", "Time since the daemon started.", lambda m: m.uptime_s),
)

UP: Final = ("kiwi_up", "1 if the daemon of the GPU answers, 0 if not.")
INFO: Final = ("kiwi_build", "Versions, and what the GPU is; always 1.")
INFO_LABELS: Final = ("version", "driver", "model", "emulated")


def families_of(readings: Iterable[GpuReading]) -> Iterator[Metric]:
    """Yield every metric with the samples of all GPUs. A GPU whose daemon does not answer has only
    ``kiwi_up``."""
    known = sorted(readings, key=lambda reading: reading.index)
    up = GaugeMetricFamily(*UP, labels=GPU_LABELS)
    for reading in known:
        up.add_metric(_gpu(reading), float(reading.metrics is not None))
    yield up
    answered = [(_gpu(r), r.metrics) for r in known if r.metrics is not None]
    info = InfoMetricFamily(*INFO, labels=GPU_LABELS)
    for gpu, metrics in answered:
        info.add_metric(gpu, _info(metrics))
    yield info
    yield _waits(answered)
    for family in FAMILIES:
        made = family.kind(family.name, family.help, labels=(*GPU_LABELS, *family.labels))
        for gpu, metrics in answered:
            for labels, value in family.read(metrics):
                made.add_metric((*gpu, *labels), float(value))
        yield made


def _gpu(reading: GpuReading) -> tuple[str, str]:
    return reading.uuid, str(reading.index)


def _info(metrics: GpuMetrics) -> dict[str, str]:
    values = (
        metrics.daemon_version, metrics.driver_version, metrics.name,
        "true" if metrics.emulated else "false",
    )  # fmt: skip
    return dict(zip(INFO_LABELS, values, strict=True))


def _waits(answered: Iterable[tuple[tuple[str, str], GpuMetrics]]) -> HistogramMetricFamily:
    made = HistogramMetricFamily(WAITS.name, WAITS.help, labels=(*GPU_LABELS, WAITS.label))
    for gpu, metrics in answered:
        for label, histogram in WAITS.read(metrics):
            bounds = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
            made.add_metric((*gpu, label), buckets, histogram.sum)
    return made
