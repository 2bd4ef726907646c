"""Prometheus metrics of an owner's journal: its lag, its speed, and the lease."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamhouse.storage_service.ownership.journal._writer import JournalWriter

__all__ = [
    "JournalMetrics",
]

_PUT_SECONDS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

_DAMAGED_SHOWN_MAX: Final = 10


@dataclass
class JournalMetrics:
    """The figures of one owner. `put_took` may be called by any thread."""

    writer: JournalWriter | None = None
    lease_left_ms: Callable[[], float] = lambda: 0.0
    checkpoint_age_s: Callable[[], float] = lambda: 0.0
    damaged_files: Callable[[], Sequence[str]] = lambda: ()

    def __post_init__(self) -> None:
        self._put_seconds = Histogram(
            "streamhouse_journal_put_seconds",
            "Time until an object of the journal is stored, repetitions included.",
            buckets=_PUT_SECONDS,
            registry=None,
        )

    def figures(self) -> dict[str, Any] | None:
        """Return the journal's state for people; None without a writer."""
        if self.writer is None:
            return None
        return {
            "epoch": self.writer.epoch,
            "lag_ms": round(self.writer.lag_ms),
            "lag_bytes": self.writer.lag_bytes,
            "lease_left_ms": round(self.lease_left_ms()),
            "checkpoint_age_ms": round(1_000 * self.checkpoint_age_s()),
            "damaged_files": list(self.damaged_files()[:_DAMAGED_SHOWN_MAX]),
        }

    def put_took(self, seconds: float) -> None:
        """Count one stored object."""
        self._put_seconds.observe(seconds)

    def read(self) -> Iterable[Metric]:
        """Return all metrics; nothing without a writer."""
        writer = self.writer
        if writer is None:
            return []
        gauges = {
            "journal_epoch": (
                "The epoch that is written to: it grows with takeovers and checkpoints.",
                writer.epoch,
            ),
            "journal_in_flight": ("Objects of the journal on their way.", writer.in_flight),
            "journal_lag_seconds": (
                "How long the oldest change that the journal does not have has waited.",
                writer.lag_ms / 1_000,
            ),
            "journal_lag_bytes": (
                "Bytes that the journal does not have: what a lost machine takes with --journal-ack"
                " disk.",
                writer.lag_bytes,
            ),
            "lease_left_seconds": (
                "For how long the lease holds; below 0 reads are refused.",
                self.lease_left_ms() / 1_000,
            ),
            "checkpoint_age_seconds": (
                "Time since the last checkpoint, or the start.",
                self.checkpoint_age_s(),
            ),
            "damaged_files": (
                "Files that this disk does not have as they were written; checkpoints take them"
                " from the store.",
                len(self.damaged_files()),
            ),
        }
        counters = {
            "journal_objects": ("Objects stored in the journal.", writer.objects_stored),
            "journal_bytes": ("Bytes stored in the journal.", writer.bytes_stored),
            "journal_failures": (
                "Requests that the journal's store refused or did not answer; each is repeated.",
                writer.failures,
            ),
        }
        return [
            *(
                GaugeMetricFamily(f"streamhouse_{name}", text, value=value)
                for name, (text, value) in gauges.items()
            ),
            *(
                CounterMetricFamily(f"streamhouse_{name}", text, value=value)
                for name, (text, value) in counters.items()
            ),
            *self._put_seconds.collect(),
        ]
