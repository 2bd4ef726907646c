"""The state engine of primary key tables alone: planning, a synced log file, applying; lookups.

No HTTP, one thread. The limit is what RocksDB does alone in the same run: look the keys up, write
the same number of rows, with the options that suit it best.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from rocksdict import BlockBasedOptions, DBCompressionType, Options, Rdict, WriteBatch, WriteOptions

from benchmarks.harness import SCHEMA, make_rows, median, percentile, report
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.kv_world import looked_up

KEYS: Final = 1_000_000
MANY_KEYS: Final = 5_000_000
BATCH_ROWS: Final = 10_000
BATCHES: Final = 40
REPEATS: Final = 3
LOOKUP_KEYS: Final = 1_000
LOOKUPS: Final = 300
RULES: Final = TableRules(
    table="bench", schema=Schema.from_arrow(SCHEMA), primary_key=("id",), merge=MergeRules()
)


def main() -> None:
    """Report upserts at 1 M and 5 M keys, memory, lookups from memory and from RocksDB."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        rocksdb = median(_rocksdb_rates(folder / "rocksdb"))
        tablet = _loaded(folder / "kv", KEYS)
        rates, latencies = _upsert_rates(tablet, folder / "log", KEYS)
        few = median(rates)
        _report_upserts(few, latencies, rocksdb)
        tablet.close()

        tablet = _loaded(folder / "many", MANY_KEYS)
        _report_memory(tablet, MANY_KEYS)
        many = median(_upsert_rates(tablet, folder / "log", MANY_KEYS)[0])
        report(
            f"upsert engine at {MANY_KEYS:,} keys",
            measured=f"{many / 1e3:,.0f} k rows/s",
            limit=f"at {KEYS:,} keys {few / 1e3:,.0f} k rows/s",
            ratio=many / few,
            bar="at least 0.7",
            reached=many / few >= 0.7,
        )
        _report_lookups(tablet, "from memory", keys_bar=250_000)
        tablet.flush()
        tablet.close()
        small = KvOptions(cache_bytes=1 << 20)
        tablet = KvTablet(folder / "many", table_id=1, bucket=0, rules=RULES, options=small)
        while tablet.load_some(10_000):
            pass
        _report_lookups(tablet, "from RocksDB, hardly a row cached", keys_bar=50_000)
        tablet.close()


def _loaded(path: Path, key_count: int) -> KvTablet:
    options = KvOptions(cache_bytes=4 << 30)
    tablet = KvTablet(path, table_id=1, bucket=0, rules=RULES, options=options)
    for start in range(0, key_count, 100_000):
        rows = make_rows(100_000, first_id=start)
        _apply(tablet, tablet.plan(rows, base_offset=tablet.planned_offset))
    tablet.flush()
    return tablet


def _apply(tablet: KvTablet, planned: PlannedWrite) -> None:
    tablet.apply(planned)
    if tablet.needs_upkeep:
        tablet.keep_up()


def _batches(key_count: int, seed: int) -> list[pa.RecordBatch]:
    """Return batches of rows of which half have a new key, half a random one that is there."""
    random = np.random.default_rng(seed)
    count = BATCH_ROWS * BATCHES
    rows = make_rows(count, seed=seed)
    fresh = key_count + seed * count + np.arange(count)
    ids = np.where(random.random(count) < 0.5, random.integers(0, key_count, count), fresh)
    changed = rows.set_column(0, SCHEMA.field(0), pa.array(ids))
    return [
        changed.slice(start, BATCH_ROWS).take(pa.array(np.arange(BATCH_ROWS)))
        for start in range(0, count, BATCH_ROWS)
    ]


def _upsert_rates(tablet: KvTablet, log: Path, key_count: int) -> tuple[list[float], list[float]]:
    rates, latencies = [], []
    for repeat in range(REPEATS):
        batches = _batches(key_count, seed=repeat)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        start = time.perf_counter()
        for rows in batches:
            before = time.perf_counter()
            planned = tablet.plan(rows, base_offset=tablet.planned_offset)
            os.write(file, planned.changelog.serialize())
            os.fdatasync(file)
            _apply(tablet, planned)
            latencies.append(time.perf_counter() - before)
        rates.append(BATCH_ROWS * BATCHES / (time.perf_counter() - start))
        os.close(file)
    return rates, latencies


def _rocksdb_rates(path: Path) -> list[float]:
    database = Rdict(str(path), _best_options())
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign, assignment]
    value = bytes(64)

    def write(keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), 1_000):
            batch = WriteBatch(raw_mode=True)
            deque(map(batch.put, keys[start : start + 1_000], [value] * 1_000), maxlen=0)
            database.write(batch, options)

    for start in range(0, KEYS, 100_000):
        write(encode_key([pa.array(np.arange(start, start + 100_000))]).to_pylist())
    rates = []
    for repeat in range(REPEATS):
        keys = list(_sorted_keys(_batches(KEYS, seed=repeat)))
        start_s = time.perf_counter()
        for some in keys:
            database.get(some)
            write(some)
        rates.append(BATCH_ROWS * BATCHES / (time.perf_counter() - start_s))
    database.close()
    return rates


def _sorted_keys(batches: Sequence[pa.RecordBatch]) -> Iterator[list[bytes]]:
    for rows in batches:
        yield sorted(encode_key([rows.column("id")]).to_pylist())


def _best_options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    options.set_write_buffer_size(32 << 20)
    options.set_max_write_buffer_number(4)
    options.set_memtable_prefix_bloom_ratio(0.1)
    options.set_memtable_whole_key_filtering(True)
    table = BlockBasedOptions()
    table.set_bloom_filter(10, block_based=False)
    options.set_block_based_table_factory(table)
    return options


def _report_upserts(rate: float, latencies: Sequence[float], rocksdb: float) -> None:
    report(
        f"upsert engine, {KEYS:,} keys, half updates, {BATCH_ROWS:,}-row batches, synced log",
        measured=f"{rate / 1e3:,.0f} k rows/s, p50 {percentile(latencies, 0.5) * 1e3:.0f} ms,"
        f" p99 {percentile(latencies, 0.99) * 1e3:.0f} ms a batch",
        limit=f"RocksDB alone, get and put: {rocksdb / 1e3:,.0f} k rows/s",
        ratio=rate / rocksdb,
        bar="at least 300 k rows/s",
        reached=rate >= 300_000,
    )


def _report_memory(tablet: KvTablet, key_count: int) -> None:
    memory = tablet.memory_bytes()
    per_key = memory["cache"] / key_count
    report(
        f"memory of rows and index, {key_count:,} keys, 64-byte rows",
        measured=f"{per_key:,.0f} MB a million keys",
        limit=f"the rows themselves 64 MB; RocksDB's readers {memory['table_readers'] >> 20} MB",
        ratio=per_key / 64,
        bar="at most 2.5 times the rows",
        reached=per_key <= 2.5 * 64,
    )


def _report_lookups(tablet: KvTablet, where: str, *, keys_bar: int) -> None:
    random = np.random.default_rng(7)
    asked = [
        pa.RecordBatch.from_pydict({"id": random.integers(0, MANY_KEYS, LOOKUP_KEYS)})
        for _ in range(LOOKUPS)
    ]
    start = time.perf_counter()
    for keys in asked:
        assert looked_up(tablet, keys).found.all()
    rate = LOOKUP_KEYS * LOOKUPS / (time.perf_counter() - start)
    report(
        f"lookup {where}, {LOOKUP_KEYS:,} random keys of {MANY_KEYS:,} a call",
        measured=f"{rate / 1e3:,.0f} k keys/s",
        limit="the bar",
        ratio=rate / keys_bar,
        bar=f"at least {keys_bar / 1e3:,.0f} k keys/s",
        reached=rate >= keys_bar,
    )
    ids = random.integers(0, MANY_KEYS, 5_000).tolist()
    rows = SingleRows(tablet.rules, tablet.codec)
    start = time.perf_counter()
    for number in ids:
        keys = [rows.encode_key({"id": number})]
        hashes = PROCESS_HASHER.few(keys)
        found = tablet.find_few(keys, hashes, bytes_max=1 << 20, reads_files=True)
        assert found is not None
        assert rows.decode_values(found.values[0])
    rate = len(ids) / (time.perf_counter() - start)
    report(
        f"lookup {where}, one key a call, as Python values",
        measured=f"{rate / 1e3:,.0f} k keys/s",
        limit="the bar",
        ratio=rate / 30_000,
        bar="at least 30 k keys/s",
        reached=rate >= 30_000,
    )


if __name__ == "__main__":
    main()
