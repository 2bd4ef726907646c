"""Debezium's envelopes as changes of a table with a primary key."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import uuid
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.core.model.changelog import OPERATION_DELETE, OPERATION_UPSERT
from streamhouse.core.model.records.unavailable_value import UNAVAILABLE_VALUE
from streamhouse.core.rows.checked_rows import CheckedRows
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
) -> CheckedRows:
    values = [None if e is None else json.dumps(e).encode() for e in envelopes]
    info = record_table(schema, ("id",), value_format="debezium-json")
    return read_alone_and_among_many(columns_of(values, keys), info)


def _reasons(found: CheckedRows) -> dict[int, str]:
    return {at: misfit.reason for at, misfit in found.misfits.items()}


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

    assert found.positions.tolist() == [0, 3]
    assert not found.misfits


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
        (_envelope("c", None, ANN | {"sum": "AMg="}), "'AMg=' is no decimal(10,2)"),
        (_envelope("c", None, ANN | {"data": "zz"}), "is no binary"),
        (_envelope("c", None, ANN | {"id": None}), "the key 'id' must not be null"),
        (_envelope("d"), "the record deletes a row, but its key lacks 'id'"),
    ],
)
def test_what_is_no_change_is_one_bad_record(envelope: Any, said: str) -> None:
    found = _read(_envelope("c", None, ANN), envelope, _envelope("c", None, ANN))

    assert found.positions.tolist() == [0, 2]
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


def _with_schema(number: int, kind: str, moment: int) -> dict[str, Any]:
    fields = [{"field": "id"}, {"field": "payload"}, {"field": "woke", "name": kind}]
    parts = [{"field": part, "fields": fields} for part in ("before", "after")]
    row = {"id": number, "payload": "x", "woke": moment}
    return {"schema": {"fields": parts}, "payload": _envelope("c", None, row)}


def test_times_count_what_their_own_schema_says_also_beside_a_column_payload() -> None:
    fields = [PEOPLE.field("id"), pa.field("payload", pa.string()), PEOPLE.field("woke")]
    ms, us = "io.debezium.time.Timestamp", "io.debezium.time.MicroTimestamp"
    in_ms = [_with_schema(i, ms, 1_700_000_000_000) for i in range(10)]
    in_us = [_with_schema(i, us, 1_700_000_000_000_000) for i in range(10, 20)]

    found = _read(*in_ms, *in_us, schema=pa.schema(fields))

    assert not found.misfits
    assert set(found.rows.column("woke").to_pylist()) == {
        datetime.datetime(2023, 11, 14, 22, 13, 20)
    }


def test_a_schema_behind_its_payload_is_read_too() -> None:
    ms = _with_schema(1, "io.debezium.time.Timestamp", 1_000)
    behind = {"payload": ms["payload"], "schema": ms["schema"]}

    found = _read(*[behind] * 20)

    assert set(found.rows.column("woke").to_pylist()) == {datetime.datetime(1970, 1, 1, 0, 0, 1)}


BAD_ENVELOPES: Final = {
    "half a pair as op": (b'{"op":"\\ud800","after":{"id":9}}', "its op is '\\ud800'"),
    "infinity left out": (b'{"op":"c","ts_ms":Infinity,"after":{"id":9}}', "Infinity is none"),
    "nan left out": (b'{"op":"c","after":{"id":9,"zz":[1,-NaN]}}', "is no JSON"),
    "no UTF-8 left out": (b'{"op":"c","source":"\xff","after":{"id":9}}', "is not UTF-8; convert"),
    "deep and left out": (
        b'{"op":"c","source":' + b"[" * 64 + b"]" * 64 + b',"after":{"id":9}}',
        "is nested deeper than 64",
    ),
    "deeper than Python reads": (
        b'{"op":"c","source":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b',"after":{"id":9}}',
        "is nested deeper than 64",
    ),
}


@pytest.mark.parametrize("name", BAD_ENVELOPES)
def test_what_is_no_json_is_bad_among_few_and_among_many(name: str) -> None:
    value, reason = BAD_ENVELOPES[name]
    good = json.dumps(_envelope("c", None, {"id": 1})).encode()
    info = record_table(PEOPLE, ("id",), value_format="debezium-json", on_error="reject")

    for values in ([good, value], [value] * 2):
        found = read_alone_and_among_many(columns_of(values), info)

        assert found.rows.column("id").to_pylist() == [1] * values.count(good)
        assert reason in _reasons(found)[1]


def test_what_only_looks_like_it_is_good_among_few_and_among_many() -> None:
    texts = ["x: Infinity", '\\" :NaN', "[" * 100, "]" * 100 + "{" * 70, "\\"]
    flat = {"l": [{"a": 1}] * 100}

    found = _read(*[{**_envelope("c", None, {"id": 1, "name": t}), "source": flat} for t in texts])

    assert found.rows.column("name").to_pylist() == texts


@pytest.mark.parametrize("name", [["y"], {"y": 1}, None, 5])
def test_a_schema_with_names_that_are_none_says_nothing_of_times(name: Any) -> None:
    fields = [{"field": "after", "fields": [{"field": ["x"], "name": name}]}]
    beside = {"schema": {"fields": fields}, "payload": _envelope("c", None, {"id": 1})}

    assert _read(beside).rows.column("id").to_pylist() == [1]


def test_fields_that_structs_have_not_are_left_out_as_columns_are() -> None:
    pairs = pa.map_(pa.string(), pa.struct([("x", pa.int64())]))
    has_x = pa.struct([("x", pa.int64())])
    fields = [PEOPLE.field("id"), pa.field("s", has_x), pa.field("m", pairs)]
    row = {"id": 1, "s": {"x": 1, "y": 2}, "m": [["a", {"x": 3, "z": 4}]]}

    found = _read(_envelope("c", None, row), schema=pa.schema(fields))

    assert found.rows.to_pylist() == [{"id": 1, "s": {"x": 1}, "m": [("a", {"x": 3})]}]


_RAW: Final = UNAVAILABLE_VALUE.encode()
_AS_UUID: Final = str(uuid.UUID(bytes=hashlib.md5(_RAW).digest(), version=3))


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (pa.string(), UNAVAILABLE_VALUE),
        (pa.binary(), base64.b64encode(_RAW).decode()),
        (pa.string(), json.dumps({UNAVAILABLE_VALUE: UNAVAILABLE_VALUE}, separators=(",", ":"))),
        (pa.map_(pa.string(), pa.string()), {UNAVAILABLE_VALUE: UNAVAILABLE_VALUE}),
        (pa.list_(pa.string()), [UNAVAILABLE_VALUE]),
        (pa.list_(pa.string()), [base64.b64encode(_RAW).decode()]),
        (pa.list_(pa.int32()), list(_RAW)),
        (pa.list_(pa.string()), [_AS_UUID]),
        (pa.decimal128(10, 2), UNAVAILABLE_VALUE),
    ],
)
def test_debeziums_placeholder_is_no_value(kind: pa.DataType, sent: Any) -> None:
    schema = pa.schema([PEOPLE.field("id"), pa.field("doc", kind)])
    good = _envelope("u", None, {"id": 1})
    envelope = _envelope("u", None, {"id": 2, "doc": sent, "not a column": UNAVAILABLE_VALUE})

    found = _read(good, envelope, {"schema": {}, "payload": envelope}, schema=schema)

    assert found.positions.tolist() == [0]
    assert [misfit.column for misfit in found.misfits.values()] == ["doc", "doc"]
    for reason in _reasons(found).values():
        assert "the update left the value alone" in reason
        assert "REPLICA IDENTITY FULL" in reason


def test_a_placeholder_where_the_table_has_no_column_is_left_out() -> None:
    found = _read(_envelope("u", None, {"id": 1, "name": "x", "other": UNAVAILABLE_VALUE}))

    assert found.rows.column("name").to_pylist() == ["x"]


def test_an_update_of_the_key_deletes_the_row_of_the_old_key() -> None:
    found = _read(
        _envelope("c", None, {"id": 1, "name": "a"}),
        _envelope("u", {"id": 1, "name": "a"}, {"id": 2, "name": "b"}),
        _envelope("u", {"id": 2, "name": "b"}, {"id": 2, "name": "c"}),
        _envelope("u", {"id": None, "name": "b"}, {"id": 4, "name": "d"}),
        _envelope("u", {"id": 5}, {"id": 6, "data": "no base64"}),
        _envelope("u", {"id": 7}, {"id": None}),
    )

    assert found.operations is not None
    rows = zip(
        found.positions.tolist(),
        found.operations.tolist(),
        found.rows.column("id").to_pylist(),
        found.rows.column("name").to_pylist(),
        strict=True,
    )
    assert list(rows) == [
        (0, OPERATION_UPSERT, 1, "a"),
        (1, OPERATION_DELETE, 1, None),
        (1, OPERATION_UPSERT, 2, "b"),
        (2, OPERATION_UPSERT, 2, "c"),
        (3, OPERATION_UPSERT, 4, "d"),
    ]
    assert sorted(_reasons(found)) == [4, 5]


def test_a_key_of_several_columns_is_old_as_a_whole() -> None:
    schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("a", "b", "c")])
    envelopes = [
        _envelope("u", {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "x"}),
        _envelope("u", {"a": "1"}, {"a": "9", "b": "3", "c": "y"}),
    ]
    info = record_table(schema, ("a", "b"), value_format="debezium-json")

    found = read_alone_and_among_many(
        columns_of([json.dumps(envelope).encode() for envelope in envelopes]), info
    )

    assert found.rows.select(["a", "b"]).to_pylist() == [
        {"a": "1", "b": "2"},
        {"a": "1", "b": "3"},
        {"a": "9", "b": "3"},
    ]
    assert found.positions.tolist() == [0, 0, 1]


def test_a_count_of_time_beyond_the_years_is_bad_and_names_its_column() -> None:
    ns = 1_700_000_000_000_000_000
    rows = [{"woke": ns}, {"seen": -ns}, {"born": 2_932_897}, {"woke": 1.5}, {"born": 2_932_896}]

    found = _read(*[_envelope("c", None, {"id": 1, **row}) for row in rows])

    assert [misfit.column for misfit in found.misfits.values()] == ["woke", "seen", "born", "woke"]
    assert "outside of the years 1 to 9999" in _reasons(found)[0]
    assert found.positions.tolist() == [4]


def test_bytes_and_times_in_arrays_have_the_forms_of_columns() -> None:
    fields = [("blobs", pa.list_(pa.binary())), ("times", pa.list_(pa.timestamp("us")))]
    schema = pa.schema([PEOPLE.field("id"), *fields])
    kind = {"field": "times", "items": {"name": "io.debezium.time.Timestamp"}}
    beside = {"fields": [{"field": "after", "fields": [kind]}]}
    row = {"id": 1, "blobs": ["AAAA", None], "times": [1, None]}

    found = _read({"schema": beside, "payload": _envelope("c", None, row)}, schema=schema)

    moment = datetime.datetime(1970, 1, 1, 0, 0, 0, 1_000)
    assert found.rows.to_pylist() == [{"id": 1, "blobs": [bytes(3), None], "times": [moment, None]}]


@pytest.mark.parametrize("numbers", [list(_RAW), [str(number) for number in _RAW]])
def test_a_placeholder_of_numbers_is_seen_between_blanks_too(numbers: list[Any]) -> None:
    kind = pa.list_(pa.string() if isinstance(numbers[0], str) else pa.int32())
    schema = pa.schema([PEOPLE.field("id"), pa.field("doc", kind)])

    found = _read(_envelope("u", None, {"id": 2, "doc": numbers}), schema=schema)

    assert [misfit.column for misfit in found.misfits.values()] == ["doc"]
