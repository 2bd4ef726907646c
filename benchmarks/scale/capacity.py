"""docs/capacity.md: what so many rows a second need, from what a call, a row and a round cost.

`capacity.md` beside this has the words; each name in braces is computed here. What a call takes of
the service's processor is read from RESULTS.md as measured, and a line is drawn between two sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.scale.costs import DEFAULTS, PLANNED_MB_S, Load, month_of_puts, puts_per_s
from benchmarks.scale.figures import (
    APPEND_CALL_MS,
    APPEND_MB_S,
    APPEND_ROW_CALL_MS,
    GET_US,
    JOURNALLED_CALL_MS,
    LAKE_MB,
    ROUND_SERVICE_MS,
    ROUND_WORKER_MS,
    ROW_BYTES,
    TIERING_ROWS_PER_S,
    UPSERT_10_CALL_MS,
    UPSERT_10K_CALL_MS,
)
from benchmarks.scale.tables import markdown_table

__all__ = ["Need", "capacity_page", "need_of"]

_TEMPLATE: Final = Path(__file__).parent / "capacity.md"
_DAY_S: Final = 86_400
# A core that is busy half of the time answers soon, and has room for a burst and for a takeover.
_BUSY_SHARE: Final = 0.5
_FRESHNESS_S: Final = 60.0
_FILES_BESIDE_A_ROUND: Final = 4  # manifest, list, metadata, table state
_FILE_ROWS_MIN: Final = 100  # fewer, and `streamhouse tables` says that rounds scatter their rows
_ROWS_PER_LAKE_MB: Final = 3_000_000
_EXAMPLES: Final = {10_000: 10, 100_000: 100, 1_000_000: 1_000}
"""Rows a second, and rows a call: whoever has more of them sends more at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one table needs that gets so many rows a second."""

    calls_per_s: float
    mb_per_s: float
    append_cores: float
    upsert_cores: float
    journal_cores: float
    tiering_cores: float
    shards: int
    log_gb_a_day: float
    lake_gb_a_day: float
    buckets: int
    places_max: int
    journal_puts_per_s: float
    lake_puts_per_s: float


def need_of(rows_per_s: float, rows_a_call: int) -> Need:
    """Return what so many rows of the benchmarks need; of the cores to have half are busy."""
    calls = rows_per_s / rows_a_call
    mb_per_s = rows_per_s * ROW_BYTES / 1e6
    shards = math.ceil(mb_per_s / PLANNED_MB_S)
    a_shard = Load(calls_per_s=calls / shards, mb_per_s=mb_per_s / shards)
    round_s = (ROUND_WORKER_MS.value + ROUND_SERVICE_MS.value) / 1e3 / _FRESHNESS_S
    tiering = rows_per_s / TIERING_ROWS_PER_S.value + round_s
    buckets = max(4, 2 ** math.ceil(math.log2(2 * tiering / _BUSY_SHARE)))
    return Need(
        calls_per_s=calls,
        mb_per_s=mb_per_s,
        append_cores=calls * append_ms(rows_a_call) / 1e3 / _BUSY_SHARE,
        upsert_cores=calls * upsert_ms(rows_a_call) / 1e3 / _BUSY_SHARE,
        journal_cores=calls * (JOURNALLED_CALL_MS.value - APPEND_CALL_MS.value) / 1e3 / _BUSY_SHARE,
        tiering_cores=tiering / _BUSY_SHARE,
        shards=shards,
        log_gb_a_day=mb_per_s * _DAY_S / 1e3,
        lake_gb_a_day=rows_per_s * LAKE_MB.value / _ROWS_PER_LAKE_MB * _DAY_S / 1e3,
        buckets=buckets,
        places_max=int(rows_per_s * _FRESHNESS_S / _FILE_ROWS_MIN),
        journal_puts_per_s=shards * puts_per_s(a_shard, DEFAULTS),
        lake_puts_per_s=(buckets + _FILES_BESIDE_A_ROUND) / _FRESHNESS_S,
    )


def append_ms(rows: int) -> float:
    """Return what an append of so many rows takes of the service's processor."""
    measured = (2_000, APPEND_CALL_MS.value)
    if rows <= measured[0]:
        return _line(rows, (1, APPEND_ROW_CALL_MS.value), measured)
    # Of larger ones only the rate is known, of both cores with the clients on them.
    large = 10_000
    return _line(rows, measured, (large, large * ROW_BYTES / (APPEND_MB_S.value / 2) / 1e3))


def upsert_ms(rows: int) -> float:
    """Return what an upsert of so many rows takes of the service's processor."""
    return _line(rows, (10, UPSERT_10_CALL_MS.value), (10_000, UPSERT_10K_CALL_MS.value))


def _line(at: float, low: tuple[float, float], high: tuple[float, float]) -> float:
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[1] + slope * (at - low[0])


def capacity_page() -> str:
    """Return docs/capacity.md."""
    return _TEMPLATE.read_text().format_map(
        {
            "units": _units(),
            "examples": _examples(),
            "call_sizes": _call_sizes(),
            "planned": f"{PLANNED_MB_S:.0f}",
            "row_bytes": f"{ROW_BYTES:.0f}",
            "lake_bytes": f"{LAKE_MB.value * 1e6 / _ROWS_PER_LAKE_MB:.0f}",
            "file_rows": str(_FILE_ROWS_MIN),
            "freshness": f"{_FRESHNESS_S:.0f}",
            "put_month": f"{month_of_puts(1):.2f}",
        }
    )


def _units() -> str:
    slope_us = (UPSERT_10K_CALL_MS.value - UPSERT_10_CALL_MS.value) / 9_990 * 1e3
    tiering = 1e6 / TIERING_ROWS_PER_S.value
    journal = JOURNALLED_CALL_MS.value - APPEND_CALL_MS.value
    return markdown_table(
        ["what", "of a core", "measured by"],
        [
            ["an append, of 1 row", f"{APPEND_ROW_CALL_MS.value:.2f} ms", "`bench_small_calls`"],
            ["an append, of 2,000 rows", f"{APPEND_CALL_MS.value:.2f} ms", "`bench_journal`"],
            ["the journal, an append (ack `journal`)", f"{journal:.2f} ms more", "`bench_journal`"],
            ["an upsert, of 10 rows", f"{UPSERT_10_CALL_MS.value:.2f} ms", "`bench_small_upserts`"],
            ["each further row of it", f"{slope_us:.1f} us", "`bench_small_calls`"],
            ["a GET of one key", f"{GET_US.value:.0f} us", "`bench_get_key`"],
            ["a tiered row, of the worker", f"{tiering:.2f} us", "`bench_tiering`"],
            [
                "a tiering round, of worker and service",
                f"{ROUND_WORKER_MS.value:.0f} and {ROUND_SERVICE_MS.value:.0f} ms",
                "`bench_freshness`",
            ],
        ],
    )


def _examples() -> str:
    needs = [need_of(rows, a_call) for rows, a_call in _EXAMPLES.items()]
    lines = {
        "rows a call, calls/s": [
            f"{a_call:,}, {need.calls_per_s:,.0f}"
            for need, a_call in zip(needs, _EXAMPLES.values(), strict=True)
        ],
        "MB/s of rows": [f"{need.mb_per_s:,.1f}" for need in needs],
        "**cores** of the service, log table": [f"{need.append_cores:.1f}" for need in needs],
        "cores of the service, upserts": [f"{need.upsert_cores:.1f}" for need in needs],
        "more with `--journal`": [f"{need.journal_cores:.2f}" for need in needs],
        "cores of tiering": [f"{need.tiering_cores:.2f}" for need in needs],
        "shards, with a journal in S3": [f"{need.shards}" for need in needs],
        "**disk**: a day of log": [f"{need.log_gb_a_day:,.0f} GB" for need in needs],
        "lake: a day": [f"{need.lake_gb_a_day:,.0f} GB" for need in needs],
        "**buckets** to begin with": [f"{need.buckets}" for need in needs],
        "partitions x buckets of a round, at most": [f"{need.places_max:,}" for need in needs],
        "**PUTs** of the journal": [f"{need.journal_puts_per_s:,.0f}/s" for need in needs],
        "PUTs of the lake": [f"{need.lake_puts_per_s:.1f}/s" for need in needs],
    }
    head = ["rows/s", *(f"{rows:,}" for rows in _EXAMPLES)]
    return markdown_table(head, [[name, *cells] for name, cells in lines.items()])


def _call_sizes() -> str:
    sizes = (1, 10, 100, 1_000, 10_000)
    rates = {"appended": append_ms, "upserted": upsert_ms}
    rows = [
        [f"rows {name} a second and busy core", *(_rate(n * 1e3 / cost(n)) for n in sizes)]
        for name, cost in rates.items()
    ]
    return markdown_table(["rows a call", *(f"{n:,}" for n in sizes)], rows)


def _rate(rows_per_s: float) -> str:
    if rows_per_s >= 1e6:
        return f"{rows_per_s / 1e6:.1f} M"
    return f"{rows_per_s / 1e3:.{0 if rows_per_s >= 10_000 else 1}f} k"
