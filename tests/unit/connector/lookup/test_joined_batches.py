"""What a task asks for: each key once, the whole table where that is cheaper, a window ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.connector.lookup._joined_batches import (
    joined,
    joined_structs,
    joined_values,
    looked_up_by,
)
from streamhouse.connector.lookup._row_source import RowSource
from streamhouse.core.errors import RequestTooLargeError, SchemaMismatchError
from tests.support.held_step import lower
from tests.support.lookup_world import FakeTable, plan_of

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _table(count: int) -> FakeTable:
    return FakeTable(SCHEMA, ["id"], [{"id": i, "name": f"n{i}"} for i in range(count)])


def _batch(*values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"user": pa.array(values, pa.int64())})


def _names(batches: Any) -> list[Any]:
    return [name for batch in batches for name in batch.column("name").to_pylist()]


def test_a_key_is_asked_for_once_a_task() -> None:
    table = _table(10)
    plan = plan_of(table, given=["user"], columns=["name"])

    def task() -> list[Any]:
        batches = [_batch(1, 1, 99), _batch(2, 99, 1), _batch(None, 3)]
        return _names(joined(batches, plan, RowSource(plan, table, table), window_rows=1))

    assert task() == ["n1", "n1", None, "n2", None, "n1", None, "n3"]
    assert sorted(table.asked) == [(1,), (2,), (3,), (99,)]
    table.rows[(1,)]["name"] = "changed"
    # The next task sees what was written meanwhile.
    assert task()[0] == "changed"


def test_what_is_known_lives_as_long_as_it_may() -> None:
    table = _table(10)
    plan = plan_of(table, given=["user"], columns=["name"], cache_ms=1_000, table="default.kept")

    def task(now_s: float) -> int:
        table.asked.clear()
        list(joined([_batch(1)], plan, RowSource(plan, table, table), clock=lambda: now_s))
        return len(table.asked)

    assert [task(10.0), task(10.9), task(11.0), task(11.5)] == [1, 0, 1, 0]


def test_the_whole_table_is_read_once_where_that_is_cheaper() -> None:
    table = _table(100)
    plan = plan_of(table, given=["user"], columns=["name"])
    source = RowSource(plan, table, table, key_count_min=5)
    batches = [_batch(*range(3)), _batch(*range(3, 50)), _batch(*range(50, 120))]

    assert _names(joined(batches, plan, source, window_rows=1))[-21:-19] == ["n99", None]
    assert (table.reads, sorted(table.asked)) == (1, [(0,), (1,), (2,)])


@pytest.mark.parametrize("why", ["it is out of reach", "it is too large", "it has many changes"])
def test_a_table_that_cannot_be_read_as_a_whole_is_asked_on(why: str) -> None:
    table = _table(100)
    table.is_unreadable = why == "it is out of reach"
    table.changes = 1_000_000 if why == "it has many changes" else 0
    cache_bytes = 1_000 if why == "it is too large" else 1 << 27
    plan = plan_of(table, given=["user"], columns=["name"], cache_bytes=cache_bytes)
    source = RowSource(plan, table, table, key_count_min=5)

    names = _names(joined([_batch(*range(40)), _batch(*range(120))], plan, source))

    assert names[40:] == [f"n{i}" if i < 100 else None for i in range(120)]
    assert table.reads == 0


def test_a_table_that_grows_old_is_read_again_when_as_much_is_asked_again() -> None:
    table = _table(100)
    plan = plan_of(table, given=["user"], columns=["name"], cache_ms=1, table="default.old")
    source = RowSource(plan, table, table, key_count_min=5)
    batches = [_batch(*range(10)), *(_batch(i) for i in range(3)), _batch(*range(7))]
    times = iter(range(100))

    out = joined(batches, plan, source, window_rows=1, clock=lambda: float(next(times)))

    assert _names(out) == [
        f"n{i}" for batch in ((*range(10),), (0, 1, 2), (*range(7),)) for i in batch
    ]
    assert (table.reads, table.asked) == (2, [(0,), (1,), (2,)])


def test_a_table_that_turns_out_too_large_is_read_once() -> None:
    table = _table(100)
    plan = plan_of(table, given=["user"], columns=["name"], cache_bytes=10_000)
    source = RowSource(plan, table, table, key_count_min=5)

    assert len(_names(joined([_batch(i, i + 50) for i in range(50)], plan, source, window_rows=1)))
    assert table.reads <= 1


def test_the_next_window_is_asked_for_while_one_is_taken() -> None:
    table = _table(10)
    plan = plan_of(table, given=["user"], columns=["name"])
    out = joined(
        [_batch(1), _batch(2), _batch(3)], plan, RowSource(plan, table, table), window_rows=1
    )
    assert next(out).column("name").to_pylist() == ["n1"]
    # Whoever takes no more rows leaves nothing behind: what was asked for is waited for.
    out.close()
    assert table.asked == [(1,), (2,)]
    assert not [t for t in threading.enumerate() if t.name.startswith("streamhouse-lookup")]


def test_many_rows_of_one_prefix_come_in_pieces_and_too_many_are_refused() -> None:
    schema = pa.schema([*(pa.field(n, pa.int64(), nullable=False) for n in "ab"), SCHEMA.field(1)])
    rows = [{"a": i // 5_000, "b": i, "name": str(i)} for i in range(20_000)]
    table = FakeTable(schema, ["a", "b"], rows)
    plan = plan_of(table, given=["user"], columns=["b"])

    out = list(joined([_batch(*range(4), *range(4), 9)], plan, RowSource(plan, table, table)))

    assert sum(batch.num_rows for batch in out) == 40_001
    assert [b.column("b").null_count for b in out][-1] == 1

    class Endless(FakeTable):
        def prefix_lookup(self, path: str, keys: pa.Table, *, limit: int, columns: Any) -> pa.Table:
            values = {"a": [keys.column("a")[0].as_py()] * limit, "b": list(range(limit))}
            return pa.table(values, schema=pa.schema([schema.field("a"), schema.field("b")]))

    endless = Endless(schema, ["a", "b"], [])
    with pytest.raises(RequestTooLargeError, match="at least 100,000 rows have a = 7") as error:
        list(joined([_batch(7)], plan, RowSource(plan, endless, endless)))
    assert "spark.read.format('streamhouse').load('default.t')" in error.value.message


def test_structs_of_large_rows_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch, "lookup-piece-bytes", 1_000)
    table = FakeTable(SCHEMA, ["id"], [{"id": i, "name": str(i) * 300} for i in range(10)])
    plan = plan_of(table, given=["user"], columns=["name"])
    wanted = [*range(12), None, *range(12)]

    out = list(joined_structs([_batch(*wanted)], plan, RowSource(plan, table, table)))

    assert max(array.nbytes for array in out) < 1_500
    assert [row.as_py() and row.as_py()["name"] for array in out for row in array] == [
        None if i is None or i > 9 else str(i) * 300 for i in wanted
    ]
    values = list(joined_values([_batch(*wanted)], plan, RowSource(plan, table, table)))
    assert [array.to_pylist() for array in values] == [
        [row.as_py() and row.as_py()["name"] for row in array] for array in out
    ]


def test_a_column_that_is_another_since_says_so() -> None:
    table = _table(3)
    plan = plan_of(table, given=["user"], columns=["name"])
    table.schema = table.schema.set(1, pa.field("name", pa.list_(pa.string())))
    table.rows = {(1,): {"id": 1, "name": ["a"]}}
    with pytest.raises(
        SchemaMismatchError, match=r"column 'name' is array<string> now, and was string"
    ):
        list(joined([_batch(1)], plan, RowSource(plan, table, table)))


@pytest.mark.parametrize("may_write_files", [False, True])
def test_rows_are_in_local_files_only_where_spark_may_have_them_there(
    may_write_files: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    plan = plan_of(_table(1), given=["user"], columns=["name"], may_write_files=may_write_files)
    assert looked_up_by(plan).shares == may_write_files


def test_a_key_of_another_type_is_taken_without_loss_or_refused() -> None:
    table = _table(10)
    plan = plan_of(table, given=["user"], columns=["name"])

    def names(array: pa.Array) -> list[Any]:
        batch = pa.RecordBatch.from_arrays([array], names=["user"])
        return _names(joined([batch], plan, RowSource(plan, table, table)))

    assert names(pa.array([1.0, None])) == ["n1", None]
    with pytest.raises(SchemaMismatchError, match=r"'user': row 1 has 1\.5, which is no bigint"):
        names(pa.array([1.0, 1.5]))
    for array in (pa.array(["1"]), pa.array([True]), pa.array([1], pa.timestamp("us"))):
        with pytest.raises(SchemaMismatchError, match="does not fit its column 'id'"):
            names(array)
