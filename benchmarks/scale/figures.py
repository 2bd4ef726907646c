"""Every number that goes in: what we measured, what a cloud asks for, what is assumed.

A measured figure names its line of RESULTS.md; a test compares the two, so that a figure that moves
by more than half is looked at again, while the noise of a shared machine rewrites no page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "ACK_JOURNAL_SHARE",
    "APPEND_CALL_MS",
    "APPEND_MB_S",
    "APPEND_ROW_CALL_MS",
    "GETS_PER_S",
    "GET_US",
    "INSTANCE",
    "JOURNALLED_CALL_MS",
    "LAKE_MB",
    "MEASURED",
    "PLAN_100K_AGAIN_S",
    "PLAN_100K_S",
    "PRICES",
    "RIVAL_BYTES",
    "RIVAL_MB_S",
    "ROUND_SERVICE_MS",
    "ROUND_WORKER_MS",
    "ROW_BYTES",
    "STORE",
    "TIERING_ROWS_PER_S",
    "UPSERT_10K_CALL_MS",
    "UPSERT_10_CALL_MS",
    "UPSERT_CALLS_PER_S",
    "UPSERT_ROWS_PER_S",
    "Instance",
    "Measured",
    "Prices",
    "Store",
]

_RESULTS: Final = Path(__file__).parents[1] / "RESULTS.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A figure of RESULTS.md: the section, how its line begins, where in it the number is.

    `unit` is what the number there is multiplied with.
    """

    value: float
    benchmark: str
    line: str
    number: str
    unit: float = 1.0

    def found(self) -> float:
        """Return what RESULTS.md has today, in the unit of `value`."""
        section = _RESULTS.read_text().partition(f"## {self.benchmark}\n")[2].partition("\n## ")[0]
        lines = [text for text in section.splitlines() if text.startswith(f"| {self.line} ")]
        if len(lines) != 1:
            raise ValueError(f"{self.benchmark} has {len(lines)} lines that begin '{self.line}'")
        match = re.search(self.number, lines[0])
        if match is None:
            raise ValueError(f"no '{self.number}' in: {lines[0]}")
        return float(match[1].replace(",", "")) * self.unit


# Two shared cores, the clients beside the service.
APPEND_MB_S: Final = Measured(
    value=470,
    benchmark="bench_append",
    line="append over HTTP, 10,000-row batches, 4 buckets, 4 connections",
    number=r"\| ([\d,]+) MB/s",
)
UPSERT_ROWS_PER_S: Final = Measured(
    value=975_000,
    benchmark="bench_upsert",
    line="upsert over HTTP, 1,000,000 existing keys, half changed, 10,000-row batches",
    number=r"\| ([\d,]+) k rows/s",
    unit=1e3,
)
UPSERT_CALLS_PER_S: Final = Measured(
    value=1_170,
    benchmark="bench_small_upserts",
    line="upserts of 10 rows over 4 buckets, 8 writers",
    number=r"([\d,]+) calls/s",
)
GETS_PER_S: Final = Measured(
    value=15_300,
    benchmark="bench_get_key",
    line="GET of one key of 1,000,000, 32 connections, nothing else runs",
    number=r"\| ([\d.]+) k/s",
    unit=1e3,
)
TIERING_ROWS_PER_S: Final = Measured(
    value=2_390_000,
    benchmark="bench_tiering",
    line="tiering 4 M rows in 4 buckets, one thread",
    number=r"\| ([\d.]+) M rows/s",
    unit=1e6,
)
ROUND_WORKER_MS: Final = Measured(
    value=20,
    benchmark="bench_freshness",
    line="50 tables, freshness 3 s, one worker: rounds in time",
    number=r"([\d.]+) ms of the worker's",
)
ROUND_SERVICE_MS: Final = Measured(
    value=11,
    benchmark="bench_freshness",
    line="50 tables, freshness 3 s, one worker: rounds in time",
    number=r"([\d.]+) ms of the service's",
)
PLAN_100K_S: Final = Measured(
    value=4.1,
    benchmark="bench_planning",
    line="planning 100,000 lake files, first time in a process",
    number=r"\| ([\d.]+) s \|",
)
PLAN_100K_AGAIN_S: Final = Measured(
    value=1.4,
    benchmark="bench_planning",
    line="planning 100,000 lake files again",
    number=r"\| ([\d.]+) s \|",
)

APPEND_ROW_CALL_MS: Final = Measured(
    value=0.67,
    benchmark="bench_small_calls",
    line="append of 1 row to a subscriber, p50",
    number=r"service ([\d.]+) ms",
)
APPEND_CALL_MS: Final = Measured(
    value=0.72,
    benchmark="bench_journal",
    line="append, 2,000-row batches, 32 connections, ack journal, file",
    number=r"no journal: [^|]*service ([\d.]+) ms",
)
JOURNALLED_CALL_MS: Final = Measured(
    value=0.98,
    benchmark="bench_journal",
    line="append, 2,000-row batches, 32 connections, ack journal, file",
    number=r"service ([\d.]+) ms",
)
UPSERT_10_CALL_MS: Final = Measured(
    value=0.86,
    benchmark="bench_small_upserts",
    line="upserts of 10 rows over 4 buckets, 8 writers",
    number=r"service ([\d.]+) ms",
)
UPSERT_10K_CALL_MS: Final = Measured(
    value=12.4,
    benchmark="bench_small_calls",
    line="upsert of 10,000 rows a call",
    number=r"service ([\d.]+) ms",
)
GET_US: Final = Measured(
    value=68,
    benchmark="bench_get_key",
    line="GET of one key of 1,000,000, 32 connections, nothing else runs",
    number=r"([\d.]+) us of the service's",
)
READER_GET_US: Final = Measured(
    value=88,
    benchmark="bench_readers",
    line="GET of one key of 200,000, 32 connections, with --readers 2",
    number=r"([\d.]+) us of processor each",
)
LAKE_MB: Final = Measured(
    value=71.5,
    benchmark="bench_layouts",
    line="a batch layout: bytes of the copy, 3 M rows",
    number=r"stream-ordered: ([\d.]+) MB",
)

MEASURED: Final = {name: it for name, it in globals().items() if isinstance(it, Measured)}

# The rows of the benchmarks: five columns, as Arrow (10,000 rows are a frame of 496 kB).
ROW_BYTES: Final = 49.6
# What of the rate without a journal is asked of ack `journal`.
ACK_JOURNAL_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars, list prices of AWS in us-east-1, on demand, no discount, as known in 2026-11."""

    put: float = 0.005 / 1_000  # also LIST and COPY; DELETE costs nothing
    get: float = 0.0004 / 1_000
    # Dollars a GB and month: the first 50 TB, the next 450 TB, the rest.
    storage_steps: tuple[tuple[float, float], ...] = (
        (50_000, 0.023),
        (450_000, 0.022),
        (float("inf"), 0.021),
    )
    cross_zone_gb: float = 0.02  # 0.01 on each side; to and from S3 of the region: nothing
    hours_a_month: float = 730

    @property
    def seconds_a_month(self) -> float:
        """What a rate a second is multiplied with."""
        return self.hours_a_month * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The machine of a shard: i4i.xlarge, a local NVMe disk, 4 vCPU."""

    name: str = "i4i.xlarge"
    dollars_an_hour: float = 0.343
    cores: int = 4
    memory_gb: float = 32
    disk_gb: float = 937
    # What is guaranteed of "up to 10 Gbit/s": 1.875 Gbit/s, each way.
    network_mb_s: float = 234


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """S3 as assumed: requests a second are documented, times are a round figure of many reports."""

    puts_per_s: float = 3_500  # of one partition of the key space; it splits under load, by itself
    gets_per_s: float = 5_500
    put_ms: float = 25
    put_mb_s: float = 80  # of one connection
    list_ms: float = 60
    list_keys: int = 1_000

    def put_seconds(self, byte_count: float) -> float:
        """How long storing an object of this size takes."""
        return self.put_ms / 1e3 + byte_count / (self.put_mb_s * 1e6)


PRICES: Final = Prices()
INSTANCE: Final = Instance()
STORE: Final = Store()

# The largest deployment of a rival that is known: Fluss at Alibaba, as its makers say.
RIVAL_BYTES: Final = 3e15
RIVAL_MB_S: Final = 40_000
