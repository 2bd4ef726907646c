"""Batches of even size, and the checks before a split's first row."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.client import LogBatch
from streamhouse.core.errors import OffsetOutOfRangeError, TableNotFoundError
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.row_form import row_request
from streamhouse.reading.plan.scan_schema import output_columns, scan_context
from streamhouse.reading.scan.scan import LogPiece, ScanContext, Split
from streamhouse.reading.scan.split_reader import coalesce, read_split
from tests.support.tiering_world import SCHEMA, rows
from tests.support.union_world import UnionWorld


def batch(count: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(range(count), pa.int64())})


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 20))
def test_coalescing_keeps_rows_and_order(counts: list[int], rows_max: int) -> None:
    batches = [batch(count) for count in counts]

    found = list(coalesce(batches, rows_max=rows_max))

    expected = [x for b in batches for x in b["x"].to_pylist()]
    assert [x for b in found for x in b["x"].to_pylist()] == expected
    assert all(b.num_rows <= max(rows_max, max(counts, default=0)) for b in found)
    # Two small neighbours that would have fitted into one batch were put there.
    for a, b in itertools.pairwise(found):
        is_any_large = 2 * max(a.num_rows, b.num_rows) > rows_max
        assert is_any_large or a.num_rows + b.num_rows > rows_max


def test_a_large_batch_passes_untouched() -> None:
    large = batch(1_000)

    assert next(iter(coalesce([large], rows_max=1_000))) is large


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        for bucket in (0, 1):
            for start in range(0, 30, 10):
                opened.append(bucket, rows(start, 10))
        yield opened


def scan(world: UnionWorld, **options: Any) -> ScanContext:
    given = {"table": UnionWorld.PATH, "endpoint": "http://memory", **options}
    read = read_options(given, use=BATCH)
    state = world.state()
    output = output_columns(
        state.table.schema,
        columns=read.columns,
        include_metadata=read.include_metadata,
        table="db.t",
    )
    return scan_context(state.table, row_request(state.table, read, output))


def read(world: UnionWorld, pieces: Sequence[LogPiece], context: ScanContext) -> pa.Table:
    batches = list(read_split(Split(tuple(pieces)), context, client=world.client))
    return pa.Table.from_batches(batches, schema=context.output_schema)


def test_log_rows_carry_their_address(world: UnionWorld) -> None:
    pieces = [LogPiece(bucket=1, start=8, end=12), LogPiece(bucket=0, start=29, end=30)]

    found = read(world, pieces, scan(world, includeMetadata="true"))

    assert found["__bucket"].to_pylist() == [1, 1, 1, 1, 0]
    assert found["__offset"].to_pylist() == [8, 9, 10, 11, 29]
    assert found["id"].to_pylist() == [8, 9, 10, 11, 29]
    assert found["__timestamp"].null_count == 0


def test_only_metadata_columns_still_have_rows(world: UnionWorld) -> None:
    found = read(world, [LogPiece(bucket=0, start=0, end=5)], scan(world, columns="__offset"))

    assert found.to_pydict() == {"__offset": [0, 1, 2, 3, 4]}


def test_a_filter_column_is_not_returned(world: UnionWorld) -> None:
    context = scan(world, columns="name", where="id >= 7")

    found = read(world, [LogPiece(bucket=0, start=0, end=10)], context)

    assert found.to_pydict() == {"name": ["n7", "n8", None]}


def test_a_table_created_again_is_not_read(world: UnionWorld) -> None:
    context = scan(world)
    world.tiering.service.drop_table(UnionWorld.PATH)
    world.tiering.create_table(UnionWorld.PATH, SCHEMA)

    with pytest.raises(TableNotFoundError, match="dropped and created again"):
        read(world, [LogPiece(bucket=0, start=0, end=0)], context)


def test_rows_that_left_the_log_since_the_plan_fail_by_name(world: UnionWorld) -> None:
    context = scan(world)
    world.expire_log(0, 12)

    with pytest.raises(OffsetOutOfRangeError) as caught:
        read(world, [LogPiece(bucket=0, start=5, end=20)], context)

    assert caught.value.message == (
        "table 'db.t', bucket 0: rows [5, 20) left the log after this read was planned (it now"
        " holds [12, 30)): read again to find them in the lake, or set failOnDataLoss=false to"
        " skip them"
    )


def test_rows_that_left_the_log_may_be_skipped(
    world: UnionWorld, caplog: pytest.LogCaptureFixture
) -> None:
    context = scan(world, failOnDataLoss="false")
    world.expire_log(0, 12)
    pieces = [LogPiece(bucket=0, start=5, end=20), LogPiece(bucket=0, start=0, end=3)]

    found = read(world, pieces, context)

    assert found["id"].to_pylist() == list(range(12, 20))
    assert "rows [5, 20) left the log" in caplog.text


def test_rows_that_leave_while_being_read_are_noticed(world: UnionWorld) -> None:
    context = scan(world, failOnDataLoss="false")
    calls = 0

    def losing(_: int, pages: Iterator[LogBatch]) -> Iterator[LogBatch]:
        """Retention takes the log below 20 after the first page of the first call."""
        nonlocal calls
        calls += 1
        yield next(pages)
        if calls == 1:
            world.expire_log(0, 20)
            raise OffsetOutOfRangeError("offset 10 is gone")
        yield from pages

    world.tiering.service.on_read = losing

    found = read(world, [LogPiece(bucket=0, start=0, end=30)], context)

    assert found["id"].to_pylist() == [*range(10), *range(20, 30)]


def test_a_context_travels_and_shows_no_secret(world: UnionWorld) -> None:
    context = scan(world, token="s3cret", where="id > 3")

    assert pickle.loads(pickle.dumps(context)) == context
    assert "s3cret" not in repr(context)


def test_a_plan_of_an_empty_table_has_no_split(tmp_path: Path) -> None:
    with UnionWorld(tmp_path) as world:
        world.tiering.create_table(UnionWorld.PATH, SCHEMA)
        options = read_options({"table": "db.t", "endpoint": "http://memory"}, use=BATCH)
        output = output_columns(
            world.state().table.schema, columns=None, include_metadata=False, table="db.t"
        )

        assert plan_batch_read(world.client, world.state(), options, output).splits == []
