"""Records as rows: what comes from which part of a record, and which records are no rows."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pytest

from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.model.changelog import OPERATION_DELETE, OPERATION_UPSERT
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.table import TableInfo
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.storage_service.kafka.records.columns import RecordColumns
from streamhouse.storage_service.kafka.values import rows_of
from tests.support.kafka_records import columns_of, read_alone_and_among_many, record_table

ORDERS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
    ]
)
BYTES_MAX: Final = 64 << 20


def read(given: RecordColumns, info: TableInfo) -> CheckedRows:
    return read_alone_and_among_many(given, info, bytes_max=BYTES_MAX)


def reasons(found: CheckedRows) -> dict[int, str]:
    return {at: misfit.reason for at, misfit in found.misfits.items()}


def test_raw_records_are_rows_without_a_copy() -> None:
    given = columns_of(
        [b"a", None], [b"k", None], ms=[1_700_000_000_123, -1], headers=[[("h", b"1")], []]
    )

    found = read(given, record_table(RAW_TOPIC))

    first, second = found.rows.to_pylist()
    assert (first["key"], first["value"], first["headers"]) == (
        b"k",
        b"a",
        [{"key": "h", "value": b"1"}],
    )
    assert first["timestamp"].isoformat() == "2023-11-14T22:13:20.123000+00:00"
    assert second == dict.fromkeys(RAW_TOPIC.names)
    assert found.positions.tolist() == [0, 1]
    assert found.operations is None
    own, theirs = found.rows.column("value").buffers()[2], given.values.buffers()[2]
    assert own.address == theirs.address


def test_a_raw_text_is_text_and_what_is_none_is_bad() -> None:
    schema = pa.schema([("key", pa.string()), ("value", pa.string())])

    given = columns_of([b"a", b"\xff", b"c"], [b"1", b"2", b"\xfe"])

    found = read(given, record_table(schema, on_error="reject"))

    assert found.rows.to_pylist() == [{"key": "1", "value": "a"}]
    assert found.positions.tolist() == [0]
    assert {at: misfit.column for at, misfit in found.misfits.items()} == {1: "value", 2: "key"}
    assert found.original_of(1)["value"] == b"\xff"


def test_a_raw_table_with_a_key_takes_tombstones_as_deletes() -> None:
    schema = pa.schema([pa.field("key", pa.string(), nullable=False), ("value", pa.binary())])

    found = read(columns_of([b"a", None, None], [b"1", b"2", None]), record_table(schema, ("key",)))

    assert found.rows.column("key").to_pylist() == ["1", "2"]
    assert found.operations is not None
    assert found.operations.tolist() == [OPERATION_UPSERT, OPERATION_DELETE]
    assert reasons(found) == {2: "the record deletes a row, but its key lacks 'key'"}


def test_json_values_are_rows() -> None:
    given = columns_of(
        [b'{"id":1,"name":"a"}', b' {\n "at":"2024-05-01T10:00:00Z", "id":2}\r\n'], ms=[5, 6]
    )

    found = read(given, record_table(ORDERS, timestamp_column="at"))

    assert [row["id"] for row in found.rows.to_pylist()] == [1, 2]
    # A value says more than milliseconds: it comes first.
    assert [row["at"].isoformat() for row in found.rows.to_pylist()] == [
        "1970-01-01T00:00:00.005000+00:00",
        "2024-05-01T10:00:00+00:00",
    ]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "the value is no JSON"),
        (b"{", "the value is no JSON"),
        (b"[1]", "the value is no JSON object"),
        (b'{"id":1}{"id":2}', "the value is no JSON"),
        (b'{"id":"x"}', "'x' is no bigint"),
        (b'{"id":1,"nam":"x"}', "the table has no column 'nam'"),
        (b'{"name":"x"}', "null, and the column 'id' must not be null"),
        (b'{"id":1,"name":"\xff"}', "the value is not UTF-8"),
        (None, "null, and the column 'id' must not be null"),
    ],
)
def test_a_bad_value_is_one_bad_record(value: bytes | None, said: str) -> None:
    given = columns_of([b'{"id":1}', value, b'{"id":3}'])

    found = read(given, record_table(ORDERS))

    assert found.rows.column("id").to_pylist() == [1, 3]
    assert found.positions.tolist() == [0, 2]
    assert list(found.misfits) == [1]
    assert said in found.misfits[1].reason


def test_a_log_table_takes_a_record_without_a_value_as_nulls_if_it_may_have_them() -> None:
    schema = pa.schema([("name", pa.string()), ("n", pa.int32())])

    found = read(columns_of([None], [b"a"]), record_table(schema, key_columns="name"))

    assert found.rows.to_pylist() == [{"name": "a", "n": None}]


@pytest.mark.parametrize("key", [b'{"id":7}', b"7", b" 7\n"])
def test_a_key_of_json_is_an_object_or_its_one_value(key: bytes) -> None:
    found = read(columns_of([b'{"name":"a"}', None], [key, key]), record_table(ORDERS, ("id",)))

    assert [row["id"] for row in found.rows.to_pylist()] == [7, 7]
    assert found.operations is not None
    assert found.operations.tolist() == [OPERATION_UPSERT, OPERATION_DELETE]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (b"8", "the record's key has '8', and its value has '7'"),
        (b'{"id":8}', "the record's key has '8', and its value has '7'"),
        (b'{"no":7}', "the key (id) has no column 'no'"),
        (b"7,8", "the key is no JSON"),
        (b'7,"id":7', "the key is no JSON"),
        (b"7} {", "the key is no JSON"),
        (b"seven", "the key is no JSON"),
    ],
)
def test_a_key_that_is_none_or_another_is_bad(key: bytes, said: str) -> None:
    found = read(columns_of([b'{"id":7}'], [key]), record_table(ORDERS, ("id",)))

    assert found.rows.num_rows == 0
    assert said in reasons(found)[0]


def test_a_key_in_the_value_alone_is_enough() -> None:
    found = read(columns_of([b'{"id":7}', b'{"name":"x"}']), record_table(ORDERS, ("id",)))

    assert found.rows.column("id").to_pylist() == [7]
    assert reasons(found) == {1: "null, and the key 'id' must not be null"}


def test_a_raw_key_beside_json_is_the_text_itself() -> None:
    given = columns_of(
        [b'{"id":1}', b'{"id":2,"name":"b"}', b'{"id":3,"name":"c"}', b'{"id":4}'],
        [b"a", b"b", b"no", b"\xff"],
    )

    found = read(given, record_table(ORDERS, key_columns="name"))

    assert found.rows.column("name").to_pylist() == ["a", "b"]
    assert "the record's key has 'no', and its value has 'c'" in reasons(found)[2]
    assert "is no text" in reasons(found)[3]


def test_what_is_kept_of_a_bad_record_can_be_tried_again() -> None:
    given = columns_of([b'{"id":"x","name":"a"}', b"\xff"], [b"9", None], ms=[1_000, 2_000])

    found = read(
        given, record_table(ORDERS, key_columns="id", timestamp_column="at", on_error="reject")
    )

    first, second = (found.original_of(at) for at in found.misfits)
    assert (first["id"], first["name"]) == ("x", "a")
    assert first["at"].isoformat() == "1970-01-01T00:00:01+00:00"
    assert second["kafka.value"] == "ff"


def test_headers_are_a_column() -> None:
    schema = pa.schema([("n", pa.int64()), RAW_TOPIC.field("headers").with_name("tags")])
    given = columns_of([b'{"n":1}', b'{"n":2}'], headers=[[("a", None), ("a", b"2")], None])

    found = read(given, record_table(schema, headers_column="tags"))

    assert found.rows.column("tags").to_pylist() == [
        [{"key": "a", "value": None}, {"key": "a", "value": b"2"}],
        None,
    ]


def test_a_timestamp_that_no_column_can_have_is_bad() -> None:
    found = read(columns_of([b"a", b"b"], ms=[1 << 62, 5]), record_table(RAW_TOPIC))

    assert reasons(found) == {0: f"the record's timestamp {1 << 62} is out of range"}
    assert found.rows.num_rows == 1


def test_few_bytes_do_not_become_many_rows_bytes() -> None:
    wide = pa.schema([(f"c{n}", pa.int64()) for n in range(1_000)])

    with pytest.raises(RequestTooLargeError, match=r"produce to 'default\.t': 20000 records"):
        read(columns_of([b"{}"] * 20_000), record_table(wide))


@pytest.mark.parametrize(
    "text", [b'{"l":[%s]}', b'{"m":[["k",[%s]]]}', b'{"op":"c","after":{"id":1,"l":[%s]}}']
)
def test_nulls_in_a_list_count_as_what_they_are_as_rows(text: bytes) -> None:
    wide = pa.list_(pa.struct([(f"c{n}", pa.int64()) for n in range(1_000)]))
    id_ = pa.field("id", pa.int64(), nullable=b"op" not in text)
    schema = pa.schema([id_, ("l", wide), ("m", pa.map_(pa.string(), wide))])
    info = record_table(schema)
    if b"op" in text:
        info = record_table(schema, ("id",), value_format="debezium-json")
    value = text % b",".join([b"null"] * 20_000)

    with pytest.raises(RequestTooLargeError, match="take more than"):
        rows_of(columns_of([value]), info, bytes_max=BYTES_MAX)


def test_no_records_are_no_rows() -> None:
    for info in (record_table(RAW_TOPIC), record_table(ORDERS), record_table(ORDERS, ("id",))):
        found = read(columns_of([]), info)

        assert (found.rows.num_rows, len(found.positions), found.misfits) == (0, 0, {})
        assert found.rows.schema.names == info.schema.to_arrow().names
