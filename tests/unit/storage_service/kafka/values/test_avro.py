"""Avro in Confluent's framing as rows, and rows as Avro."""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    SchemaMismatchError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.storage_service.kafka.avro_schema import _SchemaCache, avro_schema
from streamhouse.storage_service.kafka.values import records_of, rows_of
from tests.support.kafka_records import columns_of, record_table

BYTES_MAX: Final = 64 << 20
TIME: Final = {"type": "long", "logicalType": "timestamp-millis"}
DECIMAL: Final = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
COLUMNS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("sum", pa.decimal128(12, 2)),
    ]
)


class Schemas:
    """A registry of a test: ids count from 1."""

    def __init__(self, *schemas: Any) -> None:
        self._texts = [json.dumps(schema) for schema in schemas]

    def schema(self, schema_id: int, /) -> str:
        if not 1 <= schema_id <= len(self._texts):
            raise NotFoundError(f"there is no schema {schema_id}")
        return self._texts[schema_id - 1]

    def table_schema(self, schema_id: int, /) -> int | None:
        return 0

    def latest(self, path: TablePath, part: str, /) -> tuple[int, str]:
        assert path.table == "t"
        at = len(self._texts) if part == "value" else 1
        return at, self._texts[at - 1]


def _record(**fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "r",
        "fields": [{"name": name, "type": t} for name, t in fields.items()],
    }


def _zigzag(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def _framed(schema_id: int, *parts: int | bytes) -> bytes:
    body = b"".join(_zigzag(part) if isinstance(part, int) else part for part in parts)
    return struct.pack(">BI", 0, schema_id) + body


def _text(text: str) -> bytes:
    return _zigzag(len(text.encode())) + text.encode()


def _read(
    values: list[bytes | None],
    schemas: Schemas,
    columns: pa.Schema = COLUMNS,
    *,
    keys: list[bytes | None] | None = None,
    key: tuple[str, ...] = (),
    properties: Mapping[str, str] | None = None,
) -> CheckedRows:
    info = record_table(columns, key, value_format="avro", **(properties or {}))
    return rows_of(columns_of(values, keys), info, bytes_max=BYTES_MAX, schemas=schemas)


def _reasons(found: CheckedRows) -> dict[int, str]:
    return {at: misfit.reason for at, misfit in found.misfits.items()}


def test_fields_are_columns_whatever_schema_wrote_them() -> None:
    schemas = Schemas(
        _record(id="int", name=["null", "string"]),
        _record(at=TIME, sum=["null", DECIMAL], id="long"),
    )

    found = _read(
        [
            _framed(2, 5_000, 1, 2, b"\xff\x38", 7),
            _framed(1, 1, 1, _text("ä")),
            _framed(2, -1, 0, 8),
            _framed(1, 2, 0),
        ],
        schemas,
    )

    utc = datetime.UTC
    assert not found.misfits
    assert found.rows.to_pylist() == [
        {
            "id": 7,
            "name": None,
            "at": datetime.datetime(1970, 1, 1, 0, 0, 5, tzinfo=utc),
            "sum": Decimal("-2.00"),
        },
        {"id": 1, "name": "ä", "at": None, "sum": None},
        {
            "id": 8,
            "name": None,
            "at": datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=utc),
            "sum": None,
        },
        {"id": 2, "name": None, "at": None, "sum": None},
    ]
    assert found.positions.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "the value is no Avro in Confluent's framing"),
        (b"\0\0\0\0", "the value is no Avro in Confluent's framing"),
        (b'{"id":1}', "the value is no Avro in Confluent's framing"),
        (_framed(1), "the value is no Avro of schema 1 that the table can have"),
        (_framed(1, 1, 9), "the value is no Avro of schema 1 that the table can have"),
        (_framed(1, 1, 1, 2, b"\xff\xfe"), "the value is no Avro of schema 1"),
        (_framed(1, 1, 1, 1 << 40, b"x"), "the value is no Avro of schema 1"),
        (_framed(2, 1), "the table has no column 'no', which schema 2 has"),
        (_framed(3, _text("x")), "field 'id' of schema 3 is string, and column 'id' is bigint"),
        (_framed(4, 0), "the value is no Avro of schema 4 that the table can have"),
        (_framed(9, 1), "there is no schema 9"),
    ],
)
def test_a_bad_value_is_one_bad_record(value: bytes, said: str) -> None:
    many = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    schemas = Schemas(
        _record(id="long", name=["null", "string"]),
        _record(no="long"),
        _record(id="string"),
        _record(sum=many),
    )
    good = _framed(1, 1, 0)

    found = _read([good, value, good], schemas)

    assert found.positions.tolist() == [0, 2]
    assert said in _reasons(found)[1]


def test_nested_values_are_columns() -> None:
    inner = {"type": "record", "name": "inner", "fields": [{"name": "at", "type": TIME}]}
    schemas = Schemas(
        _record(
            one=["null", inner],
            list={"type": "array", "items": ["null", "inner"]},
            map={"type": "map", "values": "int"},
            day={"type": "int", "logicalType": "date"},
            kind={"type": "enum", "name": "kind", "symbols": ["A", "B"]},
            code="bytes",
        )
    )
    struct_type = pa.struct([("at", pa.timestamp("us", tz="UTC"))])
    columns = pa.schema(
        [
            ("one", struct_type),
            ("list", pa.list_(struct_type)),
            ("map", pa.map_(pa.string(), pa.int64())),
            ("day", pa.date32()),
            ("kind", pa.string()),
            ("code", pa.binary()),
        ]
    )
    value = _framed(1, 1, 5, 2, 1, 6, 0, 0, 1, _text("k"), 9, 0, 3, 1, 2, b"\xff\0")

    found = _read([value, _framed(1, 0, 0, 0, 0, 0, 0)], schemas, columns)

    first, second = found.rows.to_pylist()
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    ms = datetime.timedelta(milliseconds=1)
    assert first == {
        "one": {"at": moment + 5 * ms},
        "list": [{"at": moment + 6 * ms}, None],
        "map": [("k", 9)],
        "day": datetime.date(1970, 1, 4),
        "kind": "B",
        "code": b"\xff\0",
    }
    assert second["one"] is None
    assert second["list"] == []


def test_a_key_may_be_a_record_or_one_value() -> None:
    schemas = Schemas("long", _record(id="long"), _record(name="string"))
    value = _framed(3, _text("a"))

    found = _read(
        [value, value, None, value],
        schemas,
        keys=[_framed(1, 4), _framed(2, 5), _framed(1, 6), b"7"],
        key=("id",),
    )

    assert found.rows.column("id").to_pylist() == [4, 5, 6]
    assert found.operations is not None
    assert found.operations.tolist() == [0, 0, 1]
    assert "the key is no Avro" in _reasons(found)[3]


def _enum(*symbols: str) -> dict[str, Any]:
    return {"type": "enum", "name": "e", "symbols": list(symbols)}


def _in_space(kind: Any) -> dict[str, Any]:
    """Return a record of a namespace with a field of a type."""
    return {**_record(a=kind), "name": "other", "namespace": "x"}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("{", "is no JSON"),
        (json.dumps(_record()), "a record without fields"),
        (json.dumps(_record(a="null")), "null only"),
        (json.dumps(_record(a=["null", "int", "string"])), "a union of several types"),
        (json.dumps(_record(a=["int"])), "a union of one type; write the type without"),
        (json.dumps([_record(a="int")]), "a union of one type; write the type without"),
        (json.dumps(_record(a=["null", ["null", "int"]])), "a union inside of a union"),
        (json.dumps(_record(a=[["null", "int"]])), "a union inside of a union"),
        (json.dumps(_record(a=["null", {"type": ["null", "int"]}])), "a union inside of a union"),
        (json.dumps(_record(e=_enum("A"), a=_in_space("e"))), "unknown type 'x.e'"),
        (json.dumps(_record(a="other")), "unknown type 'other'"),
        (json.dumps(_record(a=["null", "r"])), "contains itself"),
        (json.dumps(_record(a={"type": "array", "items": "null"})), "null only"),
        (json.dumps(_record(a={"type": "array", "items": _record()})), "defines 'r' again"),
        (json.dumps(_record(a={"type": "fixed", "name": "f", "size": 4})), "use bytes"),
        (json.dumps(_record(a={**DECIMAL, "precision": 50})), "up to 38 digits"),
        (json.dumps({"type": "record", "name": "r", "fields": [{}]}), "no name of its own"),
        (json.dumps({"type": "record", "fields": [1]}), "has no name"),
        (json.dumps({**_record(a="int"), "name": "a b"}), "called 'a b', which is no name"),
        (json.dumps({**_record(a="int"), "name": "x.1y"}), "called 'x.1y', which is no name"),
        (json.dumps({**_record(a="int"), "name": "string"}), "which is no name"),
        (json.dumps(_record(**{"a.b": "int"})), "field 'a.b' of schema is no name"),
        (json.dumps(_record(a=_enum("A", "b c"))), "a symbol of schema.a is there twice, or"),
        (json.dumps(_record(a=_enum("A", "A"))), "a symbol of schema.a is there twice, or"),
        (json.dumps(_record(a=_enum())), "without symbols"),
        (json.dumps(5), "is no type"),
        ("[" * 5_000, "is no JSON"),
    ],
)
def test_a_schema_that_no_column_can_have_is_refused(schema: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        avro_schema(schema)

    assert said in raised.value.message


def test_a_name_is_that_of_its_namespace_wherever_it_is_used() -> None:
    schemas = Schemas(
        _record(
            a=_in_space({**_enum("A", "B"), "namespace": ""}),
            b="e",
            c="x.other",
            d={**_enum("C"), "namespace": "x"},
            e="x.e",
        )
    )
    inner = pa.struct([("a", pa.string())])
    text = pa.string()
    columns = pa.schema([("a", inner), ("b", text), ("c", inner), ("d", text), ("e", text)])

    found = _read([_framed(1, 1, 0, 1, 0, 0)], schemas, columns)

    assert found.rows.to_pylist() == [
        {"a": {"a": "B"}, "b": "A", "c": {"a": "B"}, "d": "C", "e": "C"}
    ]


def test_a_decimal_around_a_union_is_none() -> None:
    field = avro_schema(json.dumps(_record(a={**DECIMAL, "type": ["null", "bytes"]}))).fields[0]

    assert (field.type.arrow, field.type.is_nullable) == (pa.binary(), True)


def test_schemas_stay_read_as_far_as_their_texts_are_short() -> None:
    texts = [json.dumps(_record(**{f"f{n}": "long"})) for n in range(3)]
    kept = _SchemaCache(characters_max=2 * len(texts[0]))
    first, second = kept.get(texts[0]), kept.get(texts[1])

    assert (kept.get(texts[0]), kept.get(texts[1])) == (first, second)
    assert kept.get(texts[0]) is first
    kept.get(texts[2])
    assert kept.get(texts[0]) is first
    assert kept.get(texts[1]) is not second
    # One that is longer than all that is kept drives the others out, and does not stay.
    large = json.dumps({**_record(a="long"), "doc": "x" * 500})
    assert kept.get(large) is not kept.get(large)
    assert kept.get(texts[0]) is not first


def _types_of_types(count: int, *, uses: int) -> str:
    """Return a schema of records, each of which has the one before it `uses` times."""
    fields = [{"name": "f0", "type": {**_record(x="int"), "name": "t0"}}]
    for number in range(1, count):
        inside = _record(**{f"x{use}": f"t{number - 1}" for use in range(uses)})
        fields.append({"name": f"f{number}", "type": {**inside, "name": f"t{number}"}})
    return json.dumps({"type": "record", "name": "all", "fields": fields})


def test_a_type_that_is_named_again_counts_as_if_it_were_written_again() -> None:
    assert len(avro_schema(_types_of_types(9, uses=2)).fields) == 9
    assert len(avro_schema(_types_of_types(30, uses=1)).fields) == 30

    # A thousand million columns, and one that is nested deeper than Python looks.
    with pytest.raises(InvalidRequestError, match="more than 2000 fields"):
        avro_schema(_types_of_types(30, uses=2))
    with pytest.raises(InvalidRequestError, match="nested too deep"):
        avro_schema(_types_of_types(900, uses=1))


def test_few_bytes_do_not_become_many_rows_bytes() -> None:
    wide = _record(**{f"c{n}": ["null", "long"] for n in range(200)})
    item = {**wide, "name": "item"}
    schemas = Schemas(_record(list={"type": "array", "items": ["null", item]}))
    struct_type = pa.struct([(f"c{n}", pa.int64()) for n in range(200)])
    columns = pa.schema([("list", pa.list_(struct_type))])
    bomb = _framed(1, 100_000, b"\0" * 100_000, 0)

    found = _read([bomb, _framed(1, 1, 1, b"\0" * 200, 0)], schemas, columns)

    assert "may be more than" in _reasons(found)[0]
    assert found.positions.tolist() == [1]


def test_many_records_may_not_be_more_than_their_bounds() -> None:
    item = _record(**{f"c{n}": ["null", "long"] for n in range(200)})
    schemas = Schemas(_record(list={"type": "array", "items": ["null", {**item, "name": "item"}]}))
    struct_type = pa.struct([(f"c{n}", pa.int64()) for n in range(200)])
    columns = pa.schema([("list", pa.list_(struct_type))])
    large = _framed(1, 10_000, b"\0" * 10_000, 0)

    with pytest.raises(RequestTooLargeError):
        _read([large] * 10, schemas, columns)


def test_rows_are_avro_of_the_newest_schema() -> None:
    schemas = Schemas(
        "long",
        _record(sum=["null", DECIMAL], id="long", name=["null", "string"], at=["null", TIME]),
    )
    info = record_table(COLUMNS, value_format="avro", key_columns="id")
    rows = pa.RecordBatch.from_pylist(
        [
            {"id": 1, "name": "ä", "at": 1_700_000_000_123_000, "sum": Decimal("-12.34")},
            {"id": 2},
        ],
        schema=info.schema.to_arrow(),
    )

    found = records_of(rows, info, commit_ms=1, schemas=schemas).columns
    again = rows_of(found, info, bytes_max=BYTES_MAX, schemas=schemas)

    assert found.keys.to_pylist() == [_framed(1, 1), _framed(1, 2)]
    assert [value[:5] for value in found.values.to_pylist()] == [struct.pack(">BI", 0, 2)] * 2
    assert again.rows.to_pylist() == rows.to_pylist()


def test_bytes_and_nested_rows_are_avro_too() -> None:
    inner = {"type": "record", "name": "inner", "fields": [{"name": "b", "type": "bytes"}]}
    schemas = Schemas(
        _record(
            b=["null", "bytes"],
            one=["null", inner],
            list={"type": "array", "items": "bytes"},
            map={"type": "map", "values": ["null", DECIMAL]},
        )
    )
    struct_type = pa.struct([pa.field("b", pa.binary())])
    columns = pa.schema(
        [
            ("b", pa.binary()),
            ("one", struct_type),
            ("list", pa.list_(pa.binary())),
            ("map", pa.map_(pa.string(), pa.decimal128(9, 2))),
        ]
    )
    info = record_table(columns, value_format="avro")
    rows = pa.RecordBatch.from_pylist(
        [
            {"b": b"\xff\0", "one": {"b": b""}, "list": [b"\xfe"], "map": [("k", Decimal("1.5"))]},
            {"b": None, "one": None, "list": [], "map": [("k", None)]},
        ],
        schema=info.schema.to_arrow(),
    )

    found = records_of(rows, info, commit_ms=1, schemas=schemas).columns
    again = rows_of(found, info, bytes_max=BYTES_MAX, schemas=schemas)

    assert again.rows.to_pylist() == rows.to_pylist()


@pytest.mark.parametrize(
    ("schema", "error", "said"),
    [
        (_record(id="long", name="string"), SchemaMismatchError, "the schema has no null there"),
        (_record(id="string"), SchemaMismatchError, "column 'id' is bigint"),
        (_record(id="int"), SchemaMismatchError, "without a loss"),
        (
            _record(id="long", name=["null", _enum("A", "B")]),
            SchemaMismatchError,
            r"table 'default.t', schema 1 of its value: column 'name': the text 'C' is no symbol",
        ),
    ],
)
def test_a_row_that_the_schema_cannot_say_is_an_error(
    schema: Any, error: type[Exception], said: str
) -> None:
    info = record_table(COLUMNS, value_format="avro")
    rows = [{"id": 1 << 40, "name": name} for name in ("A", None, "C")]
    rows = pa.RecordBatch.from_pylist(rows, schema=info.schema.to_arrow())

    with pytest.raises(error, match=said):
        records_of(rows, info, commit_ms=1, schemas=Schemas(schema))


def test_symbols_inside_of_other_values_are_looked_at_where_there_are_values() -> None:
    kinds = {"type": "array", "items": _enum("A")}
    inner = {**_record(e="e"), "name": "inner"}
    schemas = Schemas(_record(l=["null", kinds], s=["null", inner]))
    columns = pa.schema([("l", pa.list_(pa.string())), ("s", pa.struct([("e", pa.string())]))])
    info = record_table(columns, value_format="avro")
    hidden = pa.StructArray.from_arrays(
        [pa.array(["A", "C"])], fields=list(columns.field("s").type), mask=pa.array([False, True])
    )
    rows = pa.record_batch([pa.array([["A"], None], columns.field("l").type), hidden], columns)

    found = records_of(rows, info, commit_ms=1, schemas=schemas).columns

    assert found.values.to_pylist() == [_framed(1, 1, 1, 0, 0, 1, 0), _framed(1, 0, 0)]
    for wrong in ({"l": ["A", "C"], "s": None}, {"l": None, "s": {"e": "C"}}):
        rows = pa.RecordBatch.from_pylist([wrong], schema=columns)
        with pytest.raises(SchemaMismatchError, match="'C' is no symbol of the schema's enum"):
            records_of(rows, info, commit_ms=1, schemas=schemas)


@pytest.mark.parametrize("logical", ["timestamp-millis", "local-timestamp-millis"])
def test_the_first_and_the_last_time_have_milliseconds(logical: str) -> None:
    schemas = Schemas(_record(at=["null", {"type": "long", "logicalType": logical}]))
    zone = None if logical.startswith("local") else "UTC"
    columns = pa.schema([pa.field("at", pa.timestamp("us", zone))])
    us = [-(1 << 63), -1_001, -1_000, -1, 0, 999, 1_000, (1 << 63) - 1, None]
    rows = pa.record_batch([pa.array(us, pa.int64()).cast(columns.field(0).type)], columns)

    found = records_of(
        rows, record_table(columns, value_format="avro"), commit_ms=1, schemas=schemas
    )

    said = [_framed(1, 0) if one is None else _framed(1, 1, one // 1_000) for one in us]
    assert found.columns.values.to_pylist() == said
