"""Debezium's envelopes as changes of a table with a primary key."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.storage_service.kafka.values import RecordRows
from streamhouse.storage_service.model.changelog import OPERATION_DELETE, OPERATION_UPSERT
from tests.support.kafka_records import columns_of, read_alone_and_among_many, record_table

PEOPLE: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("born", pa.date32()),
        pa.field("seen", pa.timestamp("us", tz="UTC")),
        pa.field("woke", pa.timestamp("us")),
        pa.field("sum", pa.decimal128(10, 2)),
        pa.field("data", pa.binary()),
    ]
)
ANN: Final = {
    "id": 1,
    "name": "Ann",
    "born": 19_000,
    "seen": "2024-05-01T10:00:00Z",
    "woke": 1_700_000_000_000_001,
    "sum": "12.50",
    "data": "AP8=",
}
IS_ANN: Final = {
    "id": 1,
    "name": "Ann",
    "born": datetime.date(2022, 1, 8),
    "seen": datetime.datetime(2024, 5, 1, 10, tzinfo=datetime.UTC),
    "woke": datetime.datetime(2023, 11, 14, 22, 13, 20, 1),
    "sum": Decimal("12.50"),
    "data": b"\x00\xff",
}


def _envelope(op: str, before: Any = None, after: Any = None) -> dict[str, Any]:
    source = {"connector": "postgresql", "lsn": 5, "snapshot": "false"}
    return {"op": op, "before": before, "after": after, "source": source, "ts_ms": 1}


def _read(
    *envelopes: Any, keys: list[bytes | None] | None = None, schema: pa.Schema = PEOPLE
) -> RecordRows:
    values = [None if e is None else json.dumps(e).encode() for e in envelopes]
    info = record_table(schema, ("id",), value_format="debezium-json")
    return read_alone_and_among_many(columns_of(values, keys), info)


def _reasons(found: RecordRows) -> dict[int, str]:
    return {row.position: row.reason for row in found.bad}


@pytest.mark.parametrize("op", ["c", "r", "u"])
def test_a_written_row_is_its_after(op: str) -> None:
    found = _read(_envelope(op, {"id": 1}, ANN))

    assert found.rows.to_pylist() == [IS_ANN]
    assert found.operations is not None
    assert found.operations.tolist() == [OPERATION_UPSERT]


def test_an_envelope_may_be_a_payload_beside_its_schema() -> None:
    schema = {"type": "struct", "fields": [{"field": "before", "type": "struct"}]}
    beside = {"schema": schema, "payload": _envelope("c", None, ANN)}

    found = _read(beside, _envelope("d", {**ANN, "id": 2}))

    assert found.rows.column("id").to_pylist() == [1, 2]
    assert found.rows.to_pylist()[0] == IS_ANN
    assert found.operations is not None
    assert found.operations.tolist() == [OPERATION_UPSERT, OPERATION_DELETE]


def test_times_may_be_numbers_or_texts() -> None:
    micros = {"seen": 1_714_557_600_000_000}
    texts = {"born": "2022-01-08", "woke": "2023-11-14T22:13:20.000001"}

    found = _read(
        _envelope("c", None, ANN | micros),
        _envelope("c", None, ANN | texts),
        _envelope("c", None, ANN | micros | {"woke": texts["woke"]}),
    )

    assert found.rows.to_pylist() == [IS_ANN] * 3


def _beside(envelope: Any, name: str) -> dict[str, Any]:
    row = [{"field": "id", "type": "int64"}, {"field": "woke", "type": "int64", "name": name}]
    fields = [{"field": part, "type": "struct", "fields": row} for part in ("before", "after")]
    return {"schema": {"type": "struct", "fields": fields}, "payload": envelope}


@pytest.mark.parametrize(
    ("name", "per_us"),
    [
        ("io.debezium.time.Timestamp", 0.001),
        ("org.apache.kafka.connect.data.Timestamp", 0.001),
        ("io.debezium.time.MicroTimestamp", 1),
        ("io.debezium.time.NanoTimestamp", 1_000),
    ],
)
def test_a_schema_says_what_times_count(name: str, per_us: float) -> None:
    counts = [int(us * per_us) for us in (1_700_000_000_001_000, -1_000)] + [None]
    envelopes = [_envelope("c", None, {"id": 1, "woke": count}) for count in counts]
    wanted = [1_700_000_000_001_000, -1_000, None]

    alike = _read(*(_beside(e, name) for e in envelopes))
    # The second has no schema, and so they are read one by one.
    mixed = _read(_beside(envelopes[0], name), _envelope("c", None, {"id": 2, "woke": 5}))

    assert alike.rows.column("woke").view(pa.int64()).to_pylist() == wanted
    assert mixed.rows.column("woke").view(pa.int64()).to_pylist() == [wanted[0], 5]


@pytest.mark.parametrize("key", [b'{"id":9}', b'{"schema":{"type":"struct"},"payload":{"id":9}}'])
def test_a_delete_without_before_has_the_key_of_its_record(key: bytes) -> None:
    found = _read(_envelope("d"), keys=[key])

    assert found.rows.column("id").to_pylist() == [9]
    assert found.operations is not None
    assert found.operations.tolist() == [OPERATION_DELETE]


def test_tombstones_and_messages_say_nothing() -> None:
    found = _read(
        _envelope("d", ANN), None, _envelope("m"), _envelope("c", None, ANN), keys=[None] * 4
    )

    assert found.records.tolist() == [0, 3]
    assert not found.bad


def test_columns_that_the_table_has_not_are_left_out() -> None:
    found = _read(_envelope("c", None, ANN | {"more": {"x": [1]}}))

    assert found.rows.to_pylist() == [IS_ANN]


@pytest.mark.parametrize(
    ("envelope", "said"),
    [
        (_envelope("t"), "the source's table was truncated"),
        (_envelope("x", None, ANN), "the value is no envelope of Debezium: its op is x"),
        ({"id": 1}, "the value is no envelope of Debezium"),
        ([1], "the value is no JSON object"),
        (_envelope("u", ANN), "the envelope of a change 'u' has no 'after'"),
        (_envelope("c", None, ANN | {"sum": "AMg="}), "'AMg=' is no decimal128(10, 2)"),
        (_envelope("c", None, ANN | {"data": "zz"}), "is no binary"),
        (_envelope("c", None, ANN | {"id": None}), "the key 'id' must not be null"),
        (_envelope("d"), "the record deletes a row, and its key does not say 'id'"),
    ],
)
def test_what_is_no_change_is_one_bad_record(envelope: Any, said: str) -> None:
    found = _read(_envelope("c", None, ANN), envelope, _envelope("c", None, ANN))

    assert found.records.tolist() == [0, 2]
    assert said in _reasons(found)[1]


def test_nested_columns_are_read_too() -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("tags", pa.list_(pa.string())),
            pa.field("map", pa.map_(pa.string(), pa.int32())),
        ]
    )
    row = {"id": 1, "tags": ["a", None], "map": {"k": 5}}

    found = _read(_envelope("c", None, row), schema=schema)

    assert found.rows.to_pylist() == [{"id": 1, "tags": ["a", None], "map": [("k", 5)]}]
