"""A copy of rows by key in another process has the rows of the tablet, at every published offset.

The tablet hands rows over to RocksDB and flushes at any moment, also rows that are applied and not
published; the copy is opened at any moment.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import CorruptDataError, OverloadedError
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER
from streamhouse.storage_service.kv.cache._memory_budget import KvOptions, MemoryBudget
from streamhouse.storage_service.kv.row_copy import RowCopy
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from tests.support.kv_world import (
    LoggedBucket,
    found_alone,
    random_batch,
    random_keys,
    random_rules,
)

_OPTIONS = KvOptions(backlog_rows=40)


def _open(bucket: LoggedBucket, options: KvOptions = _OPTIONS) -> RowCopy:
    return RowCopy(bucket.path, table_id=7, bucket=0, rules=bucket.rules, options=options)


def _follow(copy: RowCopy, bucket: LoggedBucket, end: int, *, at_once: bool) -> None:
    waiting: list[pa.RecordBatch] = []
    first = 0
    for base, batch in bucket.log:
        if base + batch.num_rows <= copy.applied_offset or base >= end:
            continue
        if not waiting:
            first = base
        waiting.append(batch)
        if not at_once:
            _replay(copy, waiting, first)
            waiting = []
    if waiting:
        _replay(copy, waiting, first)


def _replay(copy: RowCopy, waiting: list[pa.RecordBatch], first: int) -> None:
    at_once = copy.replays_at_once(sum(batch.num_rows for batch in waiting))
    copy.replay(waiting, base_offset=first, at_once=at_once)


def _rows(copy: RowCopy, bucket: LoggedBucket, keys: list[tuple[Any, ...]]) -> list[Any]:
    rows = SingleRows(bucket.rules, bucket.tablet.codec)
    names = bucket.rules.primary_key
    encoded = [rows.encode_key(dict(zip(names, key, strict=True))) for key in keys]
    few = copy.find_few(
        encoded, PROCESS_HASHER.few(encoded), bytes_max=1 << 62, reads_files=False
    ).values
    many = copy.find(pa.array(encoded, pa.binary()), bytes_max=1 << 62).values.to_pylist()
    assert few == many
    return [None if value is None else rows.decode_values(value) for value in few]


@pytest.mark.parametrize("seed", range(25))
def test_a_copy_follows_the_tablet(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    keys = random_keys(random, rules, 30)
    bucket = LoggedBucket(tmp_path / "kv", rules, options=_OPTIONS)
    copy: RowCopy | None = None
    for _ in range(40):
        for _ in range(random.randint(1, 4)):
            bucket.write(random_batch(random, rules, keys, rows_max=12))
        if random.random() < 0.3:
            bucket.tablet.flush()
        if copy is None and random.random() < 0.4:
            copy = _open(bucket)
            for _ in range(random.randint(0, 3)):
                bucket.write(random_batch(random, rules, keys, rows_max=12))
            if random.random() < 0.5:
                bucket.tablet.flush()
            floor = bucket.tablet.applied_offset
            _follow(copy, bucket, floor, at_once=random.random() < 0.5)
            copy.load()
            copy.finish(floor)
        if copy is not None:
            _follow(copy, bucket, bucket.tablet.applied_offset, at_once=random.random() < 0.5)
            names = rules.schema.names
            expected = [
                found_alone(bucket.tablet, dict(zip(rules.primary_key, key, strict=True)))
                for key in keys
            ]
            found = [
                None if row is None else dict(zip(names, row, strict=True))
                for row in _rows(copy, bucket, keys)
            ]
            assert repr(found) == repr(expected)
            assert copy.row_count == sum(row is not None for row in expected)
            if random.random() < 0.2:
                copy.close()
                copy = None
    if copy is not None:
        copy.close()
    bucket.tablet.close()


def _flushed_bucket(folder: Path, *, seed: int, key_count: int, writes: int) -> LoggedBucket:
    random = Random(seed)
    rules = random_rules(random, {})
    keys = random_keys(random, rules, key_count)
    bucket = LoggedBucket(folder / "kv", rules, options=_OPTIONS)
    for _ in range(writes):
        bucket.write(random_batch(random, rules, keys, rows_max=12))
    bucket.tablet.flush()
    return bucket


def test_a_copy_that_misses_changes_of_the_files_is_refused(tmp_path: Path) -> None:
    bucket = _flushed_bucket(tmp_path, seed=1, key_count=30, writes=20)
    copy = _open(bucket)
    base, batch = bucket.log[-1]

    with pytest.raises(CorruptDataError, match="the changelog goes on"):
        copy.replay([batch], base_offset=base + batch.num_rows + 1)
    copy.close()
    bucket.tablet.close()


def test_a_copy_that_does_not_fit_is_given_up(tmp_path: Path) -> None:
    bucket = _flushed_bucket(tmp_path, seed=2, key_count=200, writes=40)
    copy = _open(bucket, KvOptions(cache_bytes=100))

    with pytest.raises(OverloadedError, match="does not fit into memory"):
        copy.load()
    copy.close()
    bucket.tablet.close()


def test_a_copy_that_cannot_be_opened_takes_no_share_of_the_memory(tmp_path: Path) -> None:
    bucket = _flushed_bucket(tmp_path, seed=3, key_count=30, writes=20)
    memory = MemoryBudget(100)
    memory.join().report(80)

    bucket.tablet.close()
    (bucket.path / "CURRENT").write_bytes(b"no name")

    with pytest.raises(CorruptDataError):
        _open(bucket, KvOptions(memory=memory))

    # Half of the memory for each of two shares.
    assert memory.join().report(0) == 50


def test_a_copy_of_a_bucket_without_files_is_made_of_the_log(tmp_path: Path) -> None:
    random = Random(4)
    rules = random_rules(random, {})
    keys = random_keys(random, rules, 20)
    bucket = LoggedBucket(tmp_path / "kv", rules, options=KvOptions())
    for _ in range(5):
        bucket.write(random_batch(random, rules, keys, rows_max=12))
    floor = bucket.tablet.applied_offset
    copy = RowCopy(tmp_path / "not made yet", table_id=7, bucket=0, rules=rules, options=_OPTIONS)
    assert not copy.is_loaded

    _follow(copy, bucket, floor, at_once=False)
    copy.load()
    copy.finish(floor)

    assert copy.is_loaded
    expected = [
        found_alone(bucket.tablet, dict(zip(rules.primary_key, key, strict=True))) for key in keys
    ]
    found = [
        None if row is None else dict(zip(rules.schema.names, row, strict=True))
        for row in _rows(copy, bucket, keys)
    ]
    assert repr(found) == repr(expected)
    copy.close()
    bucket.tablet.close()
