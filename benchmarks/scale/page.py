"""docs/scale.md, and the table of PUTs in docs/journal.md: figures as text.

`template.md` has the words; each name in braces is computed here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.scale.costs import (
    DEFAULTS,
    PLANNED,
    SHARD,
    Load,
    ceilings_mb_s,
    idle_month,
    month_of_puts,
    monthly_cost,
    puts_per_s,
    storage_month,
    tiering_cores,
)
from benchmarks.scale.figures import (
    GETS_PER_S,
    INSTANCE,
    PRICES,
    READER_GET_US,
    RIVAL_BYTES,
    RIVAL_MB_S,
    STORE,
    UPSERT_CALLS_PER_S,
    UPSERT_ROWS_PER_S,
)
from benchmarks.scale.limits import limits
from benchmarks.scale.tables import markdown_table
from benchmarks.scale.takeovers import PRODUCT, Outcome, Scenario, simulate

__all__ = ["scale_page", "with_puts_table"]

_TEMPLATE: Final = Path(__file__).parent / "template.md"
_SCENARIOS: Final = {
    "a zone with a third of the owners fails": Scenario(shards=1_000, zone_fails=True),
    "the same, with two standbys of each": Scenario(shards=1_000, zone_fails=True, standbys=2),
    "the store is away for 30 s": Scenario(shards=1_000, store_away_s=30, seconds=75),
}
_BEGIN: Final = "<!-- begin: python -m benchmarks.scale -->\n"
_END: Final = "<!-- end -->\n"
_CORES: Final = (2, 4, 16, 64)
_HALF_A_MILLION: Final = 500_000
_SHARDS: Final = (1, 10, 100, 1_000)
_LINGERS_MS: Final = (0, 2, 5, 10, 20, 50, 100, 250)
_LOADS: Final = {
    "1 call/s": Load(calls_per_s=1, mb_per_s=0.001),
    "100 calls/s of 10 kB": Load(calls_per_s=100, mb_per_s=1),
    "1,000 calls/s of 10 kB": Load(calls_per_s=1_000, mb_per_s=10),
    "80 calls/s of 500 kB": Load(calls_per_s=80, mb_per_s=40),
}


def scale_page() -> str:
    """Return docs/scale.md."""
    outcomes = {name: simulate(scenario, PRODUCT) for name, scenario in _SCENARIOS.items()}
    first = next(iter(outcomes.values()))
    values = {
        **_shard_values(),
        **_reader_values(),
        **_rival_values(),
        "hours": f"{PRICES.hours_a_month:.0f}",
        "inputs": _inputs(),
        "shards": _many_shards(),
        "idle": f"{idle_month(PLANNED):.0f}",
        "limits": _limits(),
        "takeovers": _takeovers(outcomes),
        "peak_ratio": f"{first.peak_per_s / first.at_rest_per_s:.1f}",
    }
    return _TEMPLATE.read_text().format_map(values)


def _puts_table() -> str:
    """Return what a journal costs by linger and load: PUTs a second, dollars a month."""
    rows = []
    for linger_ms in _LINGERS_MS:
        settings = dataclasses.replace(DEFAULTS, linger_ms=linger_ms)
        rates = [puts_per_s(load, settings) for load in _LOADS.values()]
        cells = [f"{rate:,.1f}/s, {month_of_puts(rate):,.0f} $" for rate in rates]
        name = f"**{linger_ms}**" if linger_ms == DEFAULTS.linger_ms else str(linger_ms)
        rows.append([name, *cells])
    return markdown_table(["`--journal-linger-ms`", *_LOADS], rows)


def with_puts_table(text: str) -> str:
    """Return docs/journal.md with the table as it is computed."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin, "docs/journal.md has lost the place of its table"
    assert end, "docs/journal.md has lost the end of its table"
    return f"{before}{begin}\n{_puts_table()}\n{end}{after}"


def _inputs() -> str:
    machine = INSTANCE
    steps = ", ".join(f"{price:.3f}" for _, price in PRICES.storage_steps)
    rows = [
        ["PUT, LIST", f"{PRICES.put * 1e3:.3f} $ a thousand", "S3 Standard, us-east-1, list price"],
        ["GET", f"{PRICES.get * 1e3:.4f} $ a thousand", "the same; DELETE costs nothing"],
        ["storage", f"{steps} $ a GB and month", "the first 50 TB, the next 450 TB, the rest"],
        [
            "machine of a shard",
            f"{machine.dollars_an_hour} $ an hour",
            f"{machine.name}, on demand: {machine.cores} vCPU, {machine.memory_gb:.0f} GB,"
            f" {machine.disk_gb:.0f} GB NVMe, {machine.network_mb_s:.0f} MB/s for sure each way",
        ],
        [
            "a GB from zone to zone",
            f"{PRICES.cross_zone_gb:.2f} $",
            "both sides together; to and from the store nothing",
        ],
        [
            "requests of one partition",
            f"{STORE.puts_per_s:,.0f} PUT/s, {STORE.gets_per_s:,.0f} GET/s",
            "as S3 documents; under load it splits a bucket's keys by itself",
        ],
        [
            "time of a PUT, t",
            f"{STORE.put_ms:.0f} ms and {STORE.put_mb_s:.0f} MB/s",
            "assumed, of S3; seaweedfs beside the tests takes 5 ms for 4 kB, 9 ms for 500 kB",
        ],
    ]
    return markdown_table(["", "", "what"], rows)


def _shard_values() -> Mapping[str, str]:
    ceilings = ceilings_mb_s(PLANNED, SHARD)
    rows = [[name, f"{value:,.0f} MB/s"] for name, value in ceilings.items()]
    return {
        "ceilings": markdown_table(["part", "lets through"], rows),
        "upsert_rows": f"{UPSERT_ROWS_PER_S.value:,.0f}",
        "upsert_calls": f"{UPSERT_CALLS_PER_S.value:,.0f}",
        "gets": f"{GETS_PER_S.value:,.0f}",
        "planned": f"{SHARD.load.mb_per_s:.0f}",
        "calls": f"{SHARD.load.calls_per_s:,.0f}",
        "tables": str(SHARD.tables),
        "buckets": str(SHARD.buckets),
        "freshness": f"{SHARD.freshness_s:.0f}",
        "objects": f"{puts_per_s(SHARD.load, PLANNED):.0f}",
        "linger": f"{PLANNED.linger_ms:.0f}",
        "default_linger": f"{DEFAULTS.linger_ms:.0f}",
        "default_objects": f"{puts_per_s(SHARD.load, DEFAULTS):.0f}",
        "default_dollars": f"{month_of_puts(puts_per_s(SHARD.load, DEFAULTS)):,.0f}",
    }


def _reader_values() -> Mapping[str, str]:
    of_a_core = 1e6 / READER_GET_US.value
    rows = [
        [
            "GETs of one row, thousands a second",
            *(f"{of_a_core * (n - 1) / 1e3:,.0f}" for n in _CORES),
        ],
        ["copies of the rows, the service's included", *(str(n) for n in _CORES)],
    ]
    return {
        "reader_us": f"{READER_GET_US.value:.0f}",
        "readers": markdown_table(["cores", *(str(n) for n in _CORES)], rows),
        "half_million": str(math.ceil(_HALF_A_MILLION / of_a_core) + 1),
    }


def _many_shards() -> str:
    costs = [monthly_cost(number, PLANNED, SHARD) for number in _SHARDS]
    a_shard = {
        "carry, MB/s of rows": SHARD.load.mb_per_s,
        "GETs of one row, thousands a second": GETS_PER_S.value / 1e3,
        "small upserts, thousands a second": UPSERT_CALLS_PER_S.value / 1e3,
        "journal objects a second": puts_per_s(SHARD.load, PLANNED),
        "cores that tiering keeps busy": tiering_cores(SHARD),
    }
    rows = [
        [name, *(f"{value * number:,.{0 if value >= 1 else 1}f}" for number in _SHARDS)]
        for name, value in a_shard.items()
    ]
    rows += [
        ["**$ a month:** machines, owners and standbys", *_dollars(c.machines for c in costs)],
        ["tiering", *_dollars(c.tiering for c in costs)],
        ["journal PUTs", *_dollars(c.journal_puts for c in costs)],
        [
            "other requests: leases, standbys, lake, checkpoints",
            *_dollars(c.other_requests for c in costs),
        ],
        ["journal and checkpoints, stored", *_dollars(c.journal_storage for c in costs)],
        ["**together**", *_dollars(c.service for c in costs)],
        ["the lake's bytes", *_dollars(c.lake_storage for c in costs)],
        ["clients that write from another zone", *_dollars(c.cross_zone for c in costs)],
    ]
    return markdown_table(["shards", *(f"{number:,}" for number in _SHARDS)], rows)


def _rival_values() -> Mapping[str, str]:
    shards = RIVAL_MB_S / SHARD.load.mb_per_s
    least = min(ceilings_mb_s(PLANNED, SHARD).values())
    gigabytes = RIVAL_MB_S * 1e6 * PRICES.seconds_a_month / 1e9
    cost = monthly_cost(round(shards), PLANNED, SHARD)
    return {
        "rival_shards": f"{shards:,.0f}",
        "rival_full": f"{RIVAL_MB_S / least:,.0f}",
        "rival_machines": f"{2 * shards:,.0f}",
        "rival_cores": f"{shards * tiering_cores(SHARD):,.0f}",
        "rival_objects": f"{shards * puts_per_s(SHARD.load, PLANNED):,.0f}",
        "rival_cost": f"{cost.service / 1e6:,.2f}",
        "rival_lake": f"{storage_month(RIVAL_BYTES) / 1e3:,.0f}",
        "rival_copies": f"{2 * gigabytes * PRICES.cross_zone_gb / 1e6:,.1f}",
    }


def _limits() -> str:
    rows = [
        [limit.part, limit.gives_way_at, limit.figure, limit.next_design]
        for limit in limits(PLANNED, SHARD)
    ]
    return markdown_table(["part", "gives way at", "figure", "next"], rows)


def _takeovers(outcomes: Mapping[str, Outcome]) -> str:
    rows = [
        [
            name,
            f"{outcome.at_rest_per_s:,.0f}",
            f"{outcome.peak_per_s:,}",
            f"{outcome.takeovers}, {outcome.needless_takeovers}",
            f"{outcome.lost_races}",
            f"{outcome.median_wait_s:.1f} s, {outcome.longest_wait_s:.1f} s"
            if outcome.waits_s
            else "none was",
        ]
        for name, outcome in outcomes.items()
    ]
    head = [
        "",
        "requests/s at rest",
        "in the worst second",
        "takeovers, needless ones",
        "lost races",
        "without an owner: median, longest",
    ]
    return markdown_table(head, rows)


def _dollars(values: Iterable[float]) -> list[str]:
    return [f"{value:,.0f}" for value in values]
