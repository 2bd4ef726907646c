"""Rows of a log as records."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.core.model.changelog import (
    CHANGE_TYPE_NAMES,
    changelog_schema,
)
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE
from streamhouse.storage_service.kafka.values import RowRecords, records_of
from tests.support.kafka_records import record_table

PLAIN: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(RAW_TOPIC.field("headers").type.value_type)),
    ]
)
KEYED: Final = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("n", pa.int32()), ("b", pa.binary())]
)
HISTORY: Final = [
    ("+I", 1, 10),
    ("-U", 1, 10),
    ("+U", 1, 11),
    ("-D", 1, 11),
    ("+U", 2, 5),
]


def _values(found: RowRecords) -> list[Any]:
    return [None if v is None else json.loads(v) for v in found.columns.values.to_pylist()]


def _changes(info: TableInfo, history: list[tuple[str, int, int]]) -> pa.RecordBatch:
    schema = changelog_schema(Schema.from_arrow(info.schema.to_arrow()))
    rows = [
        {"id": id_, "n": n, "b": b"\0", "__change_type": CHANGE_TYPE_NAMES.index(name)}
        for name, id_, n in history
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def test_raw_rows_are_records_as_they_were() -> None:
    info = record_table(RAW_TOPIC)
    rows = pa.RecordBatch.from_pylist(
        [
            {"key": b"k", "value": b"v", "timestamp": 1_700_000_000_123_999, "headers": []},
            {"headers": [{"key": "a", "value": None}]},
        ],
        schema=info.schema.to_arrow(),
    )

    found = records_of(rows, info, commit_ms=7)

    assert found.columns.keys.to_pylist() == [b"k", None]
    assert found.columns.values.to_pylist() == [b"v", None]
    assert found.columns.timestamps_ms.tolist() == [1_700_000_000_123, -1]
    assert found.columns.headers is not None
    assert found.columns.headers.to_pylist() == [[], [{"key": "a", "value": None}]]
    assert found.rows.tolist() == [0, 1]
    own, theirs = found.columns.values.buffers()[2], rows.column("value").buffers()[2]
    assert own.address == theirs.address


def test_json_rows_have_all_columns_but_the_headers() -> None:
    info = record_table(PLAIN, key_columns="name", timestamp_column="at", headers_column="tags")
    rows = pa.RecordBatch.from_pylist(
        [
            {"id": 1, "name": "a", "at": 1_700_000_000_123_456, "tags": [{"key": None}]},
            {"id": 2},
        ],
        schema=info.schema.to_arrow(),
    )

    found = records_of(rows, info, commit_ms=7)

    assert _values(found) == [
        {"id": 1, "name": "a", "at": "2023-11-14T22:13:20.123456+00:00"},
        {"id": 2, "name": None, "at": None},
    ]
    assert found.columns.keys.to_pylist() == [b"a", None]
    assert found.columns.timestamps_ms.tolist() == [1_700_000_000_123, -1]
    assert found.columns.headers is not None
    assert found.columns.headers.type == HEADERS_TYPE
    assert found.columns.headers.to_pylist() == [[{"key": "", "value": None}], None]


def test_without_a_column_a_timestamp_is_when_the_row_was_written() -> None:
    info = record_table(pa.schema([("n", pa.int32())]))
    rows = pa.RecordBatch.from_pydict({"n": pa.array([1, 2, 3], pa.int32())})

    found = records_of(rows, info, commit_ms=np.array([5, 6, 7]), first_row=1)

    assert found.columns.timestamps_ms.tolist() == [6, 7]
    assert found.rows.tolist() == [1, 2]
    assert found.columns.headers is None
    assert found.columns.keys.null_count == 2


def test_a_changelog_is_upserts_and_tombstones() -> None:
    info = record_table(KEYED, ("id",))

    found = records_of(_changes(info, HISTORY), info, commit_ms=7)

    assert _values(found) == [
        {"id": 1, "n": 10, "b": "00"},
        {"id": 1, "n": 11, "b": "00"},
        None,
        {"id": 2, "n": 5, "b": "00"},
    ]
    assert [json.loads(key) for key in found.columns.keys.to_pylist()] == [
        {"id": 1}, {"id": 1}, {"id": 1}, {"id": 2},
    ]  # fmt: skip
    assert found.rows.tolist() == [0, 2, 3, 4]


def test_a_changelog_is_envelopes() -> None:
    info = record_table(KEYED, ("id",), changes_format="debezium-json")

    found = records_of(_changes(info, HISTORY), info, commit_ms=7)

    old, new = {"id": 1, "n": 10, "b": "AA=="}, {"id": 1, "n": 11, "b": "AA=="}
    assert _values(found) == [
        {"op": "c", "before": None, "after": old, "ts_ms": 7},
        {"op": "u", "before": old, "after": new, "ts_ms": 7},
        {"op": "d", "before": new, "after": None, "ts_ms": 7},
        {"op": "u", "before": None, "after": {"id": 2, "n": 5, "b": "AA=="}, "ts_ms": 7},
    ]
    assert found.rows.tolist() == [0, 2, 3, 4]


def test_a_pair_that_a_read_cuts_is_whole_with_the_row_before_it() -> None:
    info = record_table(KEYED, ("id",), changes_format="debezium-json")
    changes = _changes(info, HISTORY)

    first = records_of(changes.slice(0, 2), info, commit_ms=7)
    second = records_of(changes.slice(1), info, commit_ms=7, first_row=1)
    cut = records_of(changes.slice(2), info, commit_ms=7)

    assert first.rows.tolist() == [0]
    assert second.rows.tolist() == [1, 2, 3]
    assert _values(second)[0]["before"] == {"id": 1, "n": 10, "b": "AA=="}
    assert _values(cut)[0]["before"] is None


def test_no_rows_are_no_records() -> None:
    for info in (
        record_table(RAW_TOPIC),
        record_table(KEYED, ("id",)),
        record_table(KEYED, ("id",), changes_format="debezium-json"),
    ):
        schema = info.log_schema
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, t) for t in schema.types], schema=schema)

        assert len(records_of(empty, info, commit_ms=7).columns) == 0
