"""The changelog of small writes, line by line; and what a write that fails leaves: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
)
from streamhouse.core.model.changelog import CHANGE_TYPE_NAMES, operations_of
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_input import ROW_BYTES_MAX
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.kv_world import LoggedBucket, simple_rules

Lines = list[tuple[str, int, Any, int | None]]


def write(bucket: LoggedBucket, *changes: tuple[str, int, str | None]) -> Lines:
    """Write (change type, id, name); return the lines that make."""
    planned = plan(bucket.tablet, bucket.rules, *changes)
    bucket.append(planned)
    bucket.tablet.apply(planned)
    return lines_of(planned)


def plan(
    tablet: KvTablet, rules: TableRules, *changes: tuple[str, int, str | None]
) -> PlannedWrite:
    types, ids, names = zip(*changes, strict=True)
    rows = pa.RecordBatch.from_arrays(
        [pa.array(ids, pa.int64()), pa.array(names, pa.string()), pa.nulls(len(ids), pa.float64())],
        schema=rules.schema.to_arrow(),
    )
    return tablet.plan(
        rows,
        base_offset=tablet.planned_offset,
        operations=operations_of(pa.array(types), table="db.t"),
    )


def lines_of(planned: PlannedWrite) -> Lines:
    return [
        (CHANGE_TYPE_NAMES[line["__change_type"]], line["id"], line["name"], line["__retracts"])
        for line in planned.changelog.to_pylist()
    ]


def test_lines_keep_the_order_of_rows_and_images_are_neighbours(bucket: LoggedBucket) -> None:
    write(bucket, ("+I", 1, "a"), ("+I", 2, "b"), ("+I", 3, "c"))

    lines = write(bucket, ("+U", 3, "C"), ("+I", 4, "d"), ("-D", 1, None), ("+U", 2, "B"))

    assert lines == [
        ("-U", 3, "c", None),
        ("+U", 3, "C", 2),
        ("+I", 4, "d", None),
        ("-D", 1, "a", 0),
        ("-U", 2, "b", None),
        ("+U", 2, "B", 1),
    ]


def test_changes_of_one_key_follow_one_another(bucket: LoggedBucket) -> None:
    lines = write(
        bucket,
        ("+I", 1, "a"),
        ("+I", 1, "b"),
        ("-D", 1, None),
        ("-D", 1, None),
        ("+I", 1, "b"),
        ("+I", 1, "b"),
        ("+I", 1, "c"),
    )

    assert lines == [
        ("+I", 1, "a", None),
        ("-U", 1, "a", None),
        ("+U", 1, "b", 0),
        ("-D", 1, "b", 2),
        ("+I", 1, "b", None),
        ("-U", 1, "b", None),
        ("+U", 1, "c", 4),
    ]
    assert write(bucket, ("+U", 1, "d")) == [("-U", 1, "c", None), ("+U", 1, "d", 6)]


def test_a_row_that_comes_and_goes_in_one_write_leaves_lines_only(bucket: LoggedBucket) -> None:
    lines = write(bucket, ("+I", 1, "a"), ("-D", 1, None))

    assert lines == [("+I", 1, "a", None), ("-D", 1, "a", 0)]
    assert bucket.tablet.row_count == 0
    assert bucket.lookup_all([(1,)]) == {}


def test_what_changes_nothing_writes_nothing(bucket: LoggedBucket) -> None:
    write(bucket, ("+I", 1, "a"))

    planned = plan(bucket.tablet, bucket.rules, ("+U", 1, "a"), ("-D", 9, None), ("-U", 1, "x"))

    assert planned.changelog.num_rows == 0
    assert planned.end_offset == planned.base_offset == 1
    assert len(planned.keys) == 0


def test_an_after_image_has_no_before(tmp_path: Path) -> None:
    bucket = LoggedBucket(tmp_path / "kv", simple_rules(**{"table.changelog.image": "after"}))
    write(bucket, ("+I", 1, "a"))

    assert write(bucket, ("+U", 1, "b"), ("-D", 1, None)) == [
        ("+U", 1, "b", 0),
        ("-D", 1, "b", 1),
    ]
    bucket.tablet.close()


def test_a_new_row_needs_what_the_update_does_not_name(tmp_path: Path) -> None:
    schema = Schema.from_arrow(
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("name", pa.string(), nullable=False),
                pa.field("size", pa.int64()),
            ]
        )
    )
    rules = TableRules(table="db.t", schema=schema, primary_key=("id",), merge=MergeRules())
    tablet = KvTablet(tmp_path / "kv", table_id=1, bucket=0, rules=rules)
    whole = pa.RecordBatch.from_pydict({"id": [1], "name": ["a"], "size": [1]})
    tablet.apply(tablet.plan(whole, base_offset=0))

    part = pa.RecordBatch.from_pydict({"id": [1, 1, 2], "size": [2, 3, 4]})
    with pytest.raises(SchemaMismatchError, match=r"column 'name' .* row 2 is a new row"):
        tablet.plan(part, base_offset=1, columns=["id", "size"])

    # Deleted and named again in one write, it is a new row too.
    operations = operations_of(pa.array(["+U", "-D", "+U"]), table="db.t")
    with pytest.raises(SchemaMismatchError, match="row 2 is a new row"):
        tablet.plan(
            part.take(pa.array([0, 1, 0])),
            base_offset=1,
            operations=operations,
            columns=["id", "size"],
        )
    assert tablet.planned_offset == 1
    planned = tablet.plan(part.slice(0, 2), base_offset=1, columns=["id", "size"])
    assert [line["name"] for line in planned.changelog.to_pylist()] == ["a"] * 4
    tablet.close()


@pytest.mark.parametrize(
    ("column_type", "stored", "added"),
    [
        (pa.int8(), 100, [20, 20]),
        (pa.int64(), 2**63 - 10, [1, 20]),
        (pa.decimal128(3, 1), "99.0", ["0.5", "0.5"]),
    ],
)
def test_a_sum_that_overflows_is_refused_by_row(
    tmp_path: Path, column_type: pa.DataType, stored: Any, added: list[Any]
) -> None:
    def rows(ids: list[int], totals: list[Any]) -> pa.RecordBatch:
        numbers = pa.array(totals)
        if pa.types.is_string(numbers.type):
            numbers = numbers.cast(column_type)
        return pa.RecordBatch.from_arrays(
            [pa.array(ids, pa.int64()), numbers.cast(column_type)], schema=schema.to_arrow()
        )

    schema = Schema.from_arrow(
        pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("total", column_type)])
    )
    properties = {"table.merge-engine": "aggregation", "fields.total.agg": "sum"}
    merge = MergeRules.parse(properties, schema=schema, primary_key=("id",), table="db.t")
    rules = TableRules(table="db.t", schema=schema, primary_key=("id",), merge=merge)
    tablet = KvTablet(tmp_path / "kv", table_id=1, bucket=0, rules=rules)
    tablet.apply(tablet.plan(rows([1], [stored]), base_offset=0))

    sentence = r"'db.t', column 'total': sum overflows .* at row 2"
    with pytest.raises(InvalidRequestError, match=sentence):
        tablet.plan(rows([1, 2, 1], [added[0], added[0], added[1]]), base_offset=1)

    assert tablet.planned_offset == 1
    planned = tablet.plan(rows([1], [added[0]]), base_offset=1)
    assert planned.changelog.num_rows == 2
    tablet.close()


def test_a_row_over_the_limit_is_refused_by_number(bucket: LoggedBucket) -> None:
    with pytest.raises(RequestTooLargeError, match=r"row 1 has \d+ bytes; at most"):
        plan(bucket.tablet, bucket.rules, ("+I", 1, "a"), ("+I", 2, "b" * ROW_BYTES_MAX))

    assert bucket.tablet.planned_offset == 0


def test_no_rows_are_no_changes(bucket: LoggedBucket) -> None:
    empty = bucket.rules.schema.to_arrow().empty_table().to_batches()
    rows = empty[0] if empty else pa.RecordBatch.from_pylist([], bucket.rules.schema.to_arrow())

    planned = bucket.tablet.plan(rows, base_offset=0)
    bucket.tablet.apply(planned)

    assert planned.changelog.num_rows == bucket.tablet.applied_offset == 0
