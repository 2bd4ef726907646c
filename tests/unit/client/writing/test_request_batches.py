"""What one append call sends: batches that fit the service's limits, whatever it was given."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.client.writing._request_batches import (
    BATCH_ROWS_MAX,
    REQUEST_BYTES_TARGET,
    bounded_batches,
    rows_by_bucket,
)
from streamhouse.core.model.bucketing import (
    FEW_ROWS,
    buckets_for_rows,
    split_by_bucket,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from tests.support.in_process_service import EVENTS, table_descriptor


@pytest.mark.parametrize(
    "chunk_rows", [[1] * 500, [10_000] * 20, [200_000], [0, 3, 0], [70_000, 1, 1, 70_000]]
)
def test_rows_keep_their_order_in_batches_of_a_good_size(chunk_rows: list[int]) -> None:
    ends = np.cumsum(chunk_rows)
    chunks = [
        pa.record_batch({"n": np.arange(end - rows, end)})
        for end, rows in zip(ends, chunk_rows, strict=True)
    ]

    batches = list(bounded_batches(pa.Table.from_batches(chunks)))

    assert np.array_equal(
        np.concatenate([b.column("n").to_numpy() for b in batches]), np.arange(ends[-1])
    )
    assert all(0 < b.num_rows <= BATCH_ROWS_MAX for b in batches)
    # No two neighbours would have fitted into one request.
    assert all(a.num_rows + b.num_rows > BATCH_ROWS_MAX // 2 for a, b in pairwise(batches))


def test_a_few_huge_rows_among_small_ones_do_not_make_a_huge_batch() -> None:
    texts = ["x"] * 1_000 + ["y" * 1_000_000] * 30 + ["z"] * 1_000

    batches = list(bounded_batches(pa.table({"t": texts})))

    assert all(b.nbytes <= REQUEST_BYTES_TARGET for b in batches)
    assert [t for b in batches for t in b.column("t").to_pylist()] == texts


def test_one_row_beyond_the_target_is_sent_as_it_is() -> None:
    (batch,) = bounded_batches(pa.table({"t": ["x" * (REQUEST_BYTES_TARGET + 1)]}))

    assert batch.num_rows == 1


def test_no_rows_make_no_batches() -> None:
    assert list(bounded_batches(pa.table({"t": pa.array([], pa.string())}))) == []


def test_chunks_with_dictionaries_of_their_own_are_joined() -> None:
    chunks = [pa.array(texts).dictionary_encode() for texts in (["a", "b"], ["c", "a", None])]

    (batch,) = bounded_batches(pa.table({"t": pa.chunked_array(chunks)}))

    assert batch.column("t").type == pa.string()
    assert batch.column("t").to_pylist() == ["a", "b", "c", "a", None]


def test_views_are_sent_as_what_they_are_views_of() -> None:
    # A part of them has all bytes of all, as Arrow counts.
    texts = [f"{n} {'x' * 50_000}" for n in range(400)]
    ids = pa.array(range(400))
    data = pa.table({"id": ids, "name": pa.array(texts).cast(pa.string_view())})
    descriptor = table_descriptor("db.t", bucket_count=4, primary_key=("id",))
    table = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)

    batches = list(bounded_batches(data))

    assert 3 <= len(batches) <= 5
    parts = [part for batch in batches for part in rows_by_bucket(table, batch).values()]
    assert {part.column("name").type for part in parts} == {pa.large_string()}
    assert sorted(pa.Table.from_batches(parts).to_pydict()["name"]) == sorted(texts)


@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1, 1_000])
@pytest.mark.parametrize("key", [("id",), ("name",), ("id", "name"), ("name", "id")])
def test_each_bucket_gets_its_rows_in_their_order(rows: int, key: tuple[str, ...]) -> None:
    random = Random(rows)
    schema = EVENTS.append(pa.field("tags", pa.list_(pa.string())))
    given = pa.RecordBatch.from_pylist(
        [
            {"id": random.randrange(50), "name": random.choice("abcü"), "tags": [str(n), None]}
            for n in range(rows)
        ],
        schema=schema,
    )
    # More than is sent lies around it, and some of it is null.
    sliced = pa.concat_batches([given.slice(0, 1), given, given.slice(0, 1)]).slice(1, rows)
    descriptor = TableDescriptor(
        path=TablePath.parse("db.t"),
        schema=Schema.from_arrow(pa.schema([f.with_nullable(f.name == "tags") for f in schema])),
        primary_key=("id", "name"),
        bucket_count=4,
        bucket_key=key,
    )
    table = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)

    parts = rows_by_bucket(table, sliced)

    numbers = buckets_for_rows(given, key, 4)
    assert list(parts) == sorted(set(numbers.tolist()))
    for bucket, part in parts.items():
        assert part.equals(given.filter(pa.array(numbers == bucket)))
        part.validate(full=True)
    assert parts.keys() == split_by_bucket(sliced, key, 4).keys()
    assert all(part.equals(parts[b]) for b, part in split_by_bucket(sliced, key, 4).items())


def test_no_rows_are_in_no_bucket() -> None:
    descriptor = table_descriptor("db.t", bucket_count=4, primary_key=("id",))
    table = TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)

    assert rows_by_bucket(table, pa.RecordBatch.from_pylist([], schema=EVENTS)) == {}


def test_a_column_that_stands_for_many_is_counted_as_many() -> None:
    """What buffers share is sent for each column."""
    text = pa.array(["y" * 10_000] * 100)
    names = [f"c{n}" for n in range(40)]
    shared = pa.RecordBatch.from_arrays([text] * 40, names=names)
    nested = pa.record_batch({"s": pa.StructArray.from_arrays([text] * 40, names=names)})

    for batch in (shared, nested):
        assert batch.get_total_buffer_size() < REQUEST_BYTES_TARGET < batch.nbytes
        cut = list(bounded_batches(batch))
        assert all(part.nbytes <= REQUEST_BYTES_TARGET for part in cut)
        assert sum(part.num_rows for part in cut) == 100
