"""Made-up counts of a daemon, and scrapes as numbers."""

from __future__ import annotations

from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from kiwi_core.metrics.reading import GpuReading
from kiwi_core.states import AntiThrash, Reason, SessionState
from kiwi_core.wire.metrics import GpuMetrics, Histogram, MoveTotals, PeerUse, Refusals

SCRAPE_TIMEOUT_S = 30.0


def metrics(uuid: str = "GPU-a", index: int = 0, **changed: Any) -> GpuMetrics:
    """Return metrics with different numbers everywhere, so that none can be taken for another."""
    fields: dict[str, Any] = {
        "uuid": uuid, "index": index, "name": "NVIDIA H100", "emulated": False,
        "driver_version": "580.65", "daemon_version": "0.1.0", "uptime_s": 86400.5,
        "total_bytes": 80_000, "free_bytes": 20_000, "resident_bytes": 59_000,
        "outside_bytes": 1_000, "paged_out_bytes": 42_000, "host_budget_bytes": 256_000,
        "arena_bytes": 50_000,
        "tq_s": 30.0, "anti_thrash": AntiThrash.ALWAYS, "serialised": True, "holders": 1,
        "queue_length": 2, "sessions": {SessionState.RUNNING: 1, SessionState.WAITING: 2},
        "operations_running": 4, "operations_stuck": 3, "held_s": 3600.25,
        "session_held_s": 4000.0,
        "first_waits": Histogram(bounds=[0.1, 30.0], counts=[40, 3, 1], sum=95.5),
        "resumption_waits": Histogram(bounds=[0.1, 30.0], counts=[0, 4, 2], sum=130.0),
        "waits_given_up": 5, "suspensions": 6,
        "moved_out": MoveTotals(moves=9, bytes_moved=2.0**60, seconds=12.9, last_bytes_per_s=3e10),
        "moved_in": MoveTotals(moves=8, bytes_moved=7e9, seconds=9.75),
        "refusals": [Refusals(operation="page-out", reason=Reason.LOCK_TIMEOUT, count=11)],
        "lost_out": 12, "lost_in": 13, "overdue": 14, "hints_begun": 15, "hints_declined": 16,
        "ignored_events": 17, "connections": 18, "connections_taken": 19,
        "connections_ended": {"malformed": 21}, "look_errors": 22, "journal_lines_lost": 23,
        "policy": "interactive", "log_lines_dropped": 24,
        "utilisation_percent": 31, "temperature_c": 32, "power_w": 33.0, "power_limit_w": 34.0,
        "newcomer_wait_s": 35.0,
        "peers": [
            PeerUse(what="sessions", used=25, most=26, per_user=27, refused=28),
            PeerUse(what="requests", used=0, most=None, per_user=29, refused=30),
        ],
    }  # fmt: skip
    return GpuMetrics(**{**fields, **changed})


def reading(uuid: str = "GPU-a", index: int = 0, **changed: Any) -> GpuReading:
    return GpuReading(uuid, index, metrics(uuid, index, **changed))


def away(uuid: str = "GPU-b", index: int = 1) -> GpuReading:
    return GpuReading(uuid, index, None)


class Scrape:
    """An exposition, read by the client library's own parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def __call__(self, name: str, **labels: str) -> float:
        """Return the one sample of ``name`` that has these labels."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, (name, labels, found)
        return float(found[0])

    def names(self) -> set[str]:
        return {sample.name for family in self.families.values() for sample in family.samples}


def scrape(url: str) -> Scrape:
    with urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return Scrape(answer.read().decode())
