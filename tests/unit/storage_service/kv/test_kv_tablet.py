"""What a bucket promises its caller, beyond being a dict: order, limits, errors, durability."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from decimal import Decimal, Inexact
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
    SchemaMismatchError,
    UnavailableError,
    UnknownColumnError,
)
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.kv.plan.write_plan import delete_of, plan_writes
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.held_step import around, lower
from tests.support.kv_world import Batch, LoggedBucket, found_alone, looked_up, simple_rules


def upserts(*ids: int, name: str = "a") -> Batch:
    return Batch([("upsert", {"id": i, "name": name, "amount": None}) for i in ids])


def deletes(*ids: int) -> Batch:
    return Batch([("delete", {"id": i, "name": None, "amount": None}) for i in ids])


def keys(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64())})


def test_what_is_planned_is_seen_by_the_next_plan_but_not_by_lookups(bucket: LoggedBucket) -> None:
    first = bucket.plan(upserts(1, name="a"))
    second = bucket.plan(upserts(1, name="b"))

    assert second.base_offset == first.end_offset == 1
    assert second.changelog.column("__retracts").to_pylist() == [None, 0]
    assert bucket.lookup_all([(1,)]) == {}
    assert bucket.tablet.row_count == 0

    bucket.tablet.apply(first)
    assert bucket.lookup_all([(1,)])[(1,)]["name"] == "a"
    bucket.tablet.apply(second)
    assert bucket.lookup_all([(1,)])[(1,)]["name"] == "b"


def test_the_next_plan_sees_all_that_is_planned_though_memory_ran_out(
    bucket: LoggedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    bucket.plan(upserts(1, name="a"))
    with monkeypatch.context() as patch:
        around(patch, "planned-putting", failing)
        with pytest.raises(MemoryError):
            bucket.tablet.newest_few([b""])

    again = bucket.plan(upserts(1, name="b"))
    assert again.changelog.column("name").to_pylist() == ["a", "b"]


def test_what_is_aborted_never_was(bucket: LoggedBucket) -> None:
    bucket.tablet.apply(bucket.plan(upserts(1, name="a")))
    kept = bucket.plan(upserts(2))
    aborted = bucket.plan(upserts(1, name="b"))
    bucket.plan(upserts(1, name="c"))

    bucket.tablet.abort(aborted)

    assert bucket.tablet.planned_offset == kept.end_offset
    again = bucket.plan(upserts(1, name="d"))
    assert again.changelog.column("name").to_pylist() == ["a", "d"]


def test_an_answer_says_up_to_where_the_changelog_must_be_visible(bucket: LoggedBucket) -> None:
    planned = bucket.plan(upserts(1, 2, 3))
    assert looked_up(bucket.tablet, keys(1)).end_offset == 0

    bucket.tablet.apply(planned)

    assert looked_up(bucket.tablet, keys(1)).end_offset == 3
    few = bucket.tablet.find_few([b""], [(0, 0)], bytes_max=1, reads_files=False)
    assert few is not None
    assert few.end_offset == 3
    assert bucket.tablet.prefix_lookup(keys(1), rows_max=1).end_offset == 3


def test_lookups_answer_in_the_order_of_keys(bucket: LoggedBucket) -> None:
    bucket.write(upserts(1, 2, 3))

    found = looked_up(bucket.tablet, keys(3, 9, 1, 3))

    assert found.found.tolist() == [True, False, True, True]
    assert found.rows.column("id").to_pylist() == [3, 1, 3]
    assert looked_up(bucket.tablet, keys()).rows.num_rows == 0


@pytest.mark.parametrize("cache_bytes", [0, 64 << 20], ids=["in files", "in memory"])
def test_changes_that_meet_too_many_bytes_are_refused_and_nothing_is_planned(
    tmp_path: Path, cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = KvOptions(cache_bytes=cache_bytes, backlog_rows=50)
    bucket = LoggedBucket(tmp_path / "kv", simple_rules(), options=options)
    every = range(200)
    bucket.write(upserts(*every, name="x" * 1_000))
    lower(monkeypatch, "met-bytes", 100_000)

    for ids in (range(99), every):
        with pytest.raises(RequestTooLargeError, match="more than 100000 bytes; send fewer"):
            bucket.plan(deletes(*ids))
        assert bucket.tablet.planned_offset == bucket.tablet.applied_offset == 200
    assert bucket.write(deletes(*every[:90])).changelog.num_rows == 90
    bucket.tablet.close()


def test_what_buckets_meet_counts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = [LoggedBucket(tmp_path / str(n), simple_rules()) for n in range(2)]
    every = [range(0, 300, 2), range(1, 300, 2)]
    for bucket, ids in zip(buckets, every, strict=True):
        bucket.write(upserts(*ids, name="x" * 1_000))
    lower(monkeypatch, "met-bytes-of-buckets", 200_000)
    tablets = [bucket.tablet for bucket in buckets]
    writes = [delete_of(number, keys(*ids)) for number, ids in enumerate(every)]

    with pytest.raises(RequestTooLargeError, match="more than 200000 bytes"):
        plan_writes(tablets, writes, columns=None)
    for write in writes:
        (part,) = plan_writes(tablets, [write], columns=None)
        assert part.changelog.num_rows == 150
    for tablet in tablets:
        tablet.close()


@pytest.mark.parametrize("cache_bytes", [0, 64 << 20], ids=["in files", "in memory"])
def test_an_answer_of_too_many_bytes_is_refused_and_not_built(
    tmp_path: Path, cache_bytes: int
) -> None:
    options = KvOptions(cache_bytes=cache_bytes, backlog_rows=50)
    bucket = LoggedBucket(tmp_path / "kv", simple_rules(), options=options)
    every = range(100)
    bucket.write(upserts(*every, name="x" * 1_000))
    wanted = keys(*every)

    assert looked_up(bucket.tablet, wanted, bytes_max=200_000).rows.num_rows == 100
    with pytest.raises(RequestTooLargeError, match="more than 50000 bytes"):
        looked_up(bucket.tablet, wanted, bytes_max=50_000)
    assert looked_up(bucket.tablet, keys(*every[:20]), bytes_max=50_000).rows.num_rows == 20
    bucket.tablet.close()


def test_only_a_flush_claims_durability(bucket: LoggedBucket) -> None:
    bucket.write(upserts(1, 2))
    assert bucket.tablet.flushed_offset == 0

    bucket.tablet.flush()

    assert bucket.tablet.flushed_offset == bucket.tablet.applied_offset == 2


def test_replay_skips_what_is_applied_even_within_a_batch(bucket: LoggedBucket) -> None:
    bucket.write(upserts(1, 2, 3))
    bucket.write(upserts(1, 2, name="b"))
    whole = pa.Table.from_batches([batch for _, batch in bucket.log]).combine_chunks()

    bucket.tablet.replay(whole.to_batches()[0], base_offset=0)
    assert bucket.tablet.applied_offset == 7
    assert bucket.tablet.row_count == 3

    bucket.tablet.close()
    other = LoggedBucket(bucket.path.parent / "other", bucket.rules)
    other.tablet.replay(whole.slice(0, 4).to_batches()[0], base_offset=0)
    other.tablet.replay(whole.to_batches()[0], base_offset=0)
    assert other.tablet.row_count == 3
    assert other.lookup_all([(1,), (3,)])[(1,)]["name"] == "b"
    other.tablet.close()


def test_a_start_waits_for_no_rows_besides_the_replayed_ones(bucket: LoggedBucket) -> None:
    """Rows that are flushed are loaded behind the start, or with the writes that come."""
    bucket.write(upserts(*range(1_000)))
    bucket.tablet.flush()
    bucket.write(upserts(1, 2, name="b"))

    bucket.reopen(replay_from=1)
    assert not bucket.tablet.is_loaded
    bucket.tablet.keep_up()
    assert not bucket.tablet.is_loaded
    assert bucket.lookup_all([(1,), (3,)])[(1,)]["name"] == "b"

    assert not bucket.tablet.load_some(1_001)
    assert bucket.tablet.is_loaded
    assert bucket.tablet.row_count == 1_000
    assert bucket.lookup_all([(2,), (999,)])[(2,)]["name"] == "b"


def test_a_gap_in_the_log_is_damage(bucket: LoggedBucket) -> None:
    planned = bucket.plan(upserts(1))
    bucket.tablet.abort(planned)

    with pytest.raises(CorruptDataError, match="continues at offset 5, but the state ends at 0"):
        bucket.tablet.replay(planned.changelog, base_offset=5)


def test_writes_are_refused_while_rocksdb_cannot_take_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is durable in the log is applied all the same; new writes wait until it is better."""
    bucket = LoggedBucket(tmp_path / "kv", simple_rules(), options=KvOptions(backlog_rows=2))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OverloadedError("RocksDB is behind")

    around(monkeypatch, "rocksdb-writing", refuse)
    for number in range(8):
        bucket.write(upserts(number))
    assert "event=rocksdb_behind" in caplog.text
    with pytest.raises(OverloadedError):
        bucket.plan(upserts(9))
    assert len(bucket.lookup_all([(n,) for n in range(8)])) == 8

    monkeypatch.undo()
    bucket.write(upserts(9))
    bucket.tablet.flush()
    bucket.reopen(replay_from=len(bucket.log))
    assert bucket.tablet.row_count == 9
    bucket.tablet.close()


def test_lookups_of_other_threads_see_whole_rows_while_rows_change(tmp_path: Path) -> None:
    """Each row's columns always agree, and no row is missing, wherever it is read from."""
    options = KvOptions(cache_bytes=60_000, segment_bytes=1_000, backlog_rows=200)
    bucket = LoggedBucket(tmp_path / "kv", simple_rules(), options=options)
    ids = list(range(300))
    bucket.write(upserts(*ids, name="0"))
    wrong: list[Any] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found = looked_up(bucket.tablet, keys(*ids))
            names = found.rows.column("name").to_pylist()
            alone = found_alone(bucket.tablet, {"id": 7})
            under = bucket.tablet.prefix_lookup(keys(8), rows_max=1).rows.num_rows
            if not found.found.all() or not all(n.isdigit() for n in names) or alone is None:
                wrong.append((found.found.tolist(), names, alone))
            if under != 1:
                wrong.append(under)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for round_ in range(60):
        bucket.write(upserts(*ids[round_ % 3 :: 3], name=str(round_)))
    stop.set()
    for reader in readers:
        reader.join()

    assert not wrong
    bucket.tablet.close()


def test_a_closed_bucket_says_so(bucket: LoggedBucket) -> None:
    bucket.write(upserts(1))
    bucket.tablet.close()
    bucket.tablet.close()

    with pytest.raises(UnavailableError):
        bucket.tablet.flush()


@pytest.fixture
def composite(tmp_path: Path) -> Iterator[KvTablet]:
    schema = Schema.from_arrow(
        pa.schema(
            [
                pa.field("city", pa.string(), nullable=False),
                pa.field("day", pa.date32(), nullable=False),
                pa.field("size", pa.int64()),
            ]
        )
    )
    rules = TableRules(table="db.t", schema=schema, primary_key=("city", "day"), merge=MergeRules())
    tablet = KvTablet(tmp_path / "kv", table_id=1, bucket=0, rules=rules)
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array(["a", "a", "ab", "b"]),
            pa.array([2, 1, 1, 1], pa.int32()).cast(pa.date32()),
            pa.array([1, 2, 3, 4]),
        ],
        schema=schema.to_arrow(),
    )
    tablet.apply(tablet.plan(rows, base_offset=0))
    yield tablet
    tablet.close()


@pytest.mark.parametrize("flushed", [False, True])
def test_a_prefix_is_of_whole_columns_and_rows_come_in_key_order(
    composite: KvTablet, flushed: bool
) -> None:
    if flushed:
        composite.flush()
    prefix = pa.RecordBatch.from_pydict({"city": ["a"]})

    found = composite.prefix_lookup(prefix, rows_max=10)
    first = composite.prefix_lookup(prefix, rows_max=0)

    assert found.rows.column("size").to_pylist() == [2, 1]
    assert first.rows.column("size").to_pylist() == [2], "one more than the maximum: there is more"


@pytest.mark.parametrize(
    ("columns", "error", "sentence"),
    [
        (
            {"city": ["a"]},
            SchemaMismatchError,
            r"takes .*\(city, day\).* not \(city\)",
        ),
        ({"city": ["a"], "dya": [1]}, UnknownColumnError, "did you mean 'day'"),
        ({"city": ["a"], "day": [1], "size": [1]}, SchemaMismatchError, "takes the key columns"),
        ({"city": ["a"], "day": [1]}, SchemaMismatchError, "column 'day' is date,"),
        ({"city": [None], "day": [None]}, SchemaMismatchError, "'city' is string, but|must not be"),
    ],
)
def test_wrong_keys_are_refused(
    composite: KvTablet,
    columns: dict[str, list[Any]],
    error: type[InvalidRequestError],
    sentence: str,
) -> None:
    with pytest.raises(error, match=sentence):
        looked_up(composite, pa.RecordBatch.from_pydict(columns))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"day": [1]}, r"not \(day\)"),
        ({"size": [1]}, r"not \(size\)"),
        ({"city": ["a", "b"]}, "one row of leading key columns, not 2 rows"),
        ({}, "needs leading key columns .*, and there is none"),
    ],
)
def test_wrong_prefixes_are_refused(
    composite: KvTablet, columns: dict[str, list[Any]], sentence: str
) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        composite.prefix_lookup(pa.RecordBatch.from_pydict(columns), rows_max=1)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ({}, r"takes the key columns \(city, day\)"),
        ({"city": "a", "dya": 1}, "takes the key columns"),
        ({"city": "a", "day": 1}, "key column 'day' is date, and 1 is no such value"),
        ({"city": None, "day": 1}, "key column 'city' is string, and None is no such value"),
    ],
)
def test_one_wrong_key_is_refused(composite: KvTablet, key: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaMismatchError, match=sentence):
        found_alone(composite, key)


def test_a_decimal_with_a_large_exponent_is_refused_before_all_its_digits_are_made() -> None:
    price = pa.field("price", pa.decimal128(20, 3), nullable=False)
    schema = Schema.from_arrow(pa.schema([price]))
    rules = TableRules(table="db.t", schema=schema, primary_key=("price",), merge=MergeRules())
    rows = SingleRows(rules, RowCodec(schema, schema_id=0, table="db.t"))

    for text in ("1E+999990", "-1E+99", "1E-4"):
        with pytest.raises(SchemaMismatchError, match="no such value") as refused:
            rows.encode_key({"price": Decimal(text)})
        assert isinstance(refused.value.__cause__, Inexact)
    for text in ("1E+16", "0E+999990", "9.999E+16"):
        rows.encode_key({"price": Decimal(text)})
    with pytest.raises(SchemaMismatchError):
        rows.encode_key({"price": Decimal("1E+17")})


def test_rows_of_memory_and_of_files_count_together_in_one_answer(bucket: LoggedBucket) -> None:
    text = "x" * 1_000
    bucket.write(upserts(1, name=text))
    bucket.tablet.flush()
    bucket.reopen()
    tablet = bucket.tablet
    tablet.apply(bucket.plan(upserts(2, name=text)))
    rows = SingleRows(tablet.rules, tablet.codec)
    keys = [rows.encode_key({"id": i}) for i in (1, 2)]
    hashes = PROCESS_HASHER.few(keys)

    assert tablet.find_few(keys, hashes, bytes_max=4_000, reads_files=False) is None
    assert tablet.find_few(keys, hashes, bytes_max=4_000, reads_files=True) is not None
    with pytest.raises(RequestTooLargeError):
        tablet.find_few(keys, hashes, bytes_max=1_500, reads_files=True)


def test_a_run_that_was_ended_by_others_does_not_end_the_next(tmp_path: Path) -> None:
    bucket = LoggedBucket(tmp_path / "kv", simple_rules(), options=KvOptions(backlog_rows=2))
    tablet = bucket.tablet
    for planned in (bucket.plan(upserts(1)), bucket.plan(upserts(2))):
        tablet.apply(planned)
    first = tablet.begin_run()
    assert first is not None
    tablet.write_run(first)
    tablet.flush()
    for planned in (bucket.plan(upserts(3)), bucket.plan(upserts(4))):
        tablet.apply(planned)
    second = tablet.begin_run()
    assert second is not None

    tablet.end_run(first)

    tablet.write_run(second)
    tablet.end_run(second)
    tablet.flush()
    assert tablet.flushed_offset == 4
    assert second.is_written
    tablet.close()
