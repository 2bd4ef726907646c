"""Upserts and lookups over HTTP with fsync, against planning the same batches in one process."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, report
from streamhouse.client import StorageClient
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.service_process import ServiceProcess

KEYS = 1_000_000
BATCH_ROWS = 10_000
BATCHES = 60
CONNECTIONS = 2
LOOKUPS = 300
LOOKUP_KEYS = 1_000
REPEATS = 3
PATH = "bench_upsert"


def main() -> None:
    """Report rows/s of upserts to 1 M existing keys, half of them updates, and keys/s looked up."""
    rng = np.random.default_rng(1)
    base = make_rows(KEYS)
    rounds = [[_half_changed(base, rng) for _ in range(BATCHES)] for _ in range(REPEATS)]
    with tempfile.TemporaryDirectory() as directory:
        limits = _engine_rates(Path(directory) / "kv", base, rounds)
        data = Path(directory) / "data"
        with ServiceProcess(data) as service, StorageClient(service.endpoint) as client:
            client.create_table(PATH, SCHEMA, primary_key=["id"])
            client.upsert(PATH, pa.Table.from_batches([base]))
            rates = [_upsert_rate(service.endpoint, batches) for batches in rounds]
            assert client.count(PATH) == KEYS
            lookups = [_lookup_rate(client, rng) for _ in range(REPEATS)]
    ratios = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    report(
        f"upsert over HTTP, {KEYS:,} existing keys, half changed, {BATCH_ROWS:,}-row batches",
        measured=f"{median(rates) / 1e3:,.0f} k rows/s",
        limit=f"the same in one process, no log: {median(limits) / 1e3:,.0f} k rows/s",
        ratio=median(ratios),
        bar="at least 300 k rows/s",
        reached=median(rates) >= 300_000,
    )
    report(
        f"lookup over HTTP, {LOOKUP_KEYS:,} random keys of {KEYS:,} a call",
        measured=f"{median(lookups) / 1e3:,.0f} k keys/s",
        limit="the bar",
        ratio=median(lookups) / 250_000,
        bar="at least 250 k keys/s",
        reached=median(lookups) >= 250_000,
    )


def _half_changed(base: pa.RecordBatch, rng: np.random.Generator) -> pa.RecordBatch:
    """Return random existing rows, every other one with another amount."""
    rows = base.take(pa.array(rng.choice(KEYS, BATCH_ROWS, replace=False)))
    amounts = np.array(rows.column("amount"))
    amounts[::2] += rng.random()
    return rows.set_column(rows.schema.get_field_index("amount"), "amount", pa.array(amounts))


def _engine_rates(
    path: Path, base: pa.RecordBatch, rounds: list[list[pa.RecordBatch]]
) -> list[float]:
    schema = Schema.from_arrow(SCHEMA)
    rules = TableRules(table=PATH, schema=schema, primary_key=("id",), merge=MergeRules())
    tablet = KvTablet(path, table_id=1, bucket=0, rules=rules)

    def write(rows: pa.RecordBatch) -> None:
        tablet.apply(tablet.plan(rows, base_offset=tablet.planned_offset))
        if tablet.needs_upkeep:
            tablet.keep_up()

    for start in range(0, KEYS, 65_536):
        write(base.slice(start, 65_536))
    rates = []
    for batches in rounds:
        start_s = time.perf_counter()
        for rows in batches:
            write(rows)
        rates.append(BATCH_ROWS * len(batches) / (time.perf_counter() - start_s))
    tablet.close()
    return rates


def _upsert_rate(endpoint: str, batches: list[pa.RecordBatch]) -> float:
    def write(first: int) -> None:
        with StorageClient(endpoint) as client:
            for rows in batches[first::CONNECTIONS]:
                client.upsert(PATH, rows)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(CONNECTIONS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return BATCH_ROWS * len(batches) / (time.perf_counter() - start)


def _lookup_rate(client: StorageClient, rng: np.random.Generator) -> float:
    asked = [pa.table({"id": rng.integers(0, KEYS, LOOKUP_KEYS)}) for _ in range(LOOKUPS)]
    start = time.perf_counter()
    for keys in asked:
        assert client.lookup(PATH, keys).num_rows == LOOKUP_KEYS
    return LOOKUP_KEYS * LOOKUPS / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
