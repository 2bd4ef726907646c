"""Fields inside columns: added by path, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import SchemaMismatchError, StreamhouseError
from streamhouse.core.model.casts.written_rows import version_of
from streamhouse.core.model.nested_fields import wider_parts
from streamhouse.core.model.schema import Schema, type_to_json
from streamhouse.core.model.schema_change import change_schema, convert_rows
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath

PLACE = pa.struct(
    [
        pa.field("city", pa.string()),
        pa.field("spots", pa.list_(pa.field("element", pa.struct([("x", pa.int32())])))),
        pa.field("sizes", pa.map_(pa.struct([("k", pa.string())]), pa.struct([("x", pa.int32())]))),
    ]
)


def _info() -> TableInfo:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("place", PLACE)])
    descriptor = TableDescriptor(path=TablePath.parse("db.t"), schema=Schema.from_arrow(schema))
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


def _place(info: TableInfo) -> pa.DataType:
    return info.schema.columns[1].type


def _add(*path: str, **more: Any) -> dict[str, Any]:
    return {"add": list(path), "type": "string", **more}


def _widen(*path: str, to: str = "bigint") -> dict[str, Any]:
    return {"widen": list(path), "to": to}


def test_a_field_is_added_where_its_path_leads() -> None:
    info = change_schema(
        _info(),
        [
            _add("place", "street", after="city"),
            _add("place", "spots", "element", "y", type="int", first=True),
            _add("place", "sizes", "value", "y", type={"type": "array", "element": "date"}),
            {"rename": "place", "to": "address"},
            _add("address", "street.no"),
        ],
    )

    place = _place(info)
    assert [field.name for field in place] == ["city", "street", "spots", "sizes", "street.no"]
    assert [field.name for field in place.field("spots").type.value_type] == ["y", "x"]
    assert [field.name for field in place.field("sizes").type.item_type] == ["x", "y"]
    assert info.schema.columns[1].id == 2
    assert TableInfo.from_json(info.to_json()) == info


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_add("place", "City"), "'place' has a field 'city' already"),
        (_add("place", "spot", "element", "y"), "'place' has no field 'spot'; did you mean"),
        (_add("place", "spots", "y"), "'place.spots' is an array: a field of its elements is"),
        (_add("place", "sizes", "y"), "'place.sizes' is a map: a field of its values is"),
        (_add("place", "sizes", "key", "y"), "the type of a map's keys is fixed"),
        (_add("place", "city", "y"), "'place.city' is string, no struct"),
        (_add("place", "y", after="town"), "'place' has no field 'town'"),
        (_add("place", "y", comment="why"), "cannot have a comment, only columns can; column"),
        (_add("place", "y", default="x"), "cannot have a default, only columns can; column"),
        (_add("nothing", "y"), "table 'db.t' has no column 'nothing'"),
        (_add("place", ""), "must have 1 to 255 characters"),
        (_add("place", "y", type="strin"), "column 'place.y': unknown type 'strin'"),
        ({"add": ["place", "y"]}, "new field 'place.y' needs a type"),
        ({"add": "place.y", "type": "int"}, r'by the list ["place", "y"], not by'),
        ({"add": ["place", 1], "type": "int"}, "must name a column under one of"),
        ({"add": [], "type": "int"}, "must name a column under one of"),
        ({"drop": ["place", "city"], "confirm": "city"}, "where fields can only be added"),
        ({"rename": ["place", "city"], "to": "town"}, "where fields can only be added"),
        (_widen("place", "city"), "'place.city' of type string cannot become int64: integers"),
        (_widen("place", "spots", "element", "x", to="smallint"), "cannot become int16"),
        (_widen("place", "spots", "x"), "'place.spots' is an array: a field of its elements is"),
        (_widen("place", "sizes", "key", "k"), "the type of a map's keys is fixed"),
        (_widen("place", "spots", "element", "y"), "'place.spots.element' has no field 'y'"),
        (_widen("place", "spots", "element"), "of type struct<x: int32> cannot become int64"),
        (_widen("place", "x", to="bigin"), "column 'place.x': unknown type 'bigin'"),
    ],
)
def test_what_cannot_be_added_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamhouseError) as refused:
        change_schema(_info(), [change])

    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_a_type_is_widened_where_its_path_leads() -> None:
    numbers = pa.field("numbers", pa.list_(pa.field("element", pa.decimal128(5, 2))))
    before = _info()
    added = change_schema(before, [{"add": "numbers", "type": type_to_json(numbers.type)}])

    info = change_schema(
        added,
        [
            _widen("place", "spots", "element", "x"),
            _widen("place", "sizes", "value", "x"),
            _widen("numbers", "element", to="decimal(9,2)"),
        ],
    )

    place = _place(info)
    assert place.field("spots").type.value_type == pa.struct([("x", pa.int64())])
    assert place.field("sizes").type.item_type == pa.struct([("x", pa.int64())])
    assert info.schema.columns[2].type.value_type == pa.decimal128(9, 2)
    assert TableInfo.from_json(info.to_json()) == info
    found = dict(wider_parts(_place(before), place))
    assert found == {
        ("spots", "element", "x"): pa.int64(),
        ("sizes", "value", "x"): pa.int64(),
    }
    assert not list(wider_parts(place, _place(before)))
    assert version_of(info, added.schema.to_arrow(), stated=info.schema_id) == info.schema_id


def test_rows_of_a_wider_type_are_no_rows_of_a_narrower_one_unless_they_fit() -> None:
    old = _info()
    new = change_schema(old, [_widen("place", "spots", "element", "x")])
    rows = [{"id": n, "place": {"city": "c", "spots": [{"x": 1 << 30 + n}]}} for n in range(2)]
    versions = new.schema, old.schema

    def converted(count: int) -> pa.RecordBatch:
        batch = pa.RecordBatch.from_pylist(rows[:count], schema=new.schema.to_arrow())
        return convert_rows(batch, *versions, table="db.t")

    assert converted(1).column("place").to_pylist()[0]["spots"] == [{"x": 1 << 30}]
    with pytest.raises(SchemaMismatchError, match="a newer value of column 'place' does not fit"):
        converted(2)


def test_rows_are_of_the_newest_version_with_their_fields() -> None:
    first = _info()
    second = change_schema(first, [_add("place", "street")])
    third = change_schema(second, [_add("place", "spots", "element", "y", type="int")])
    last = change_schema(third, [{"comment": "id", "to": "a number"}])

    assert version_of(last, first.schema.to_arrow(), stated=3) == 0
    assert version_of(last, second.schema.to_arrow(), stated=3) == 1
    assert version_of(last, third.schema.to_arrow(), stated=3) == 3
    untyped = pa.schema([("place", pa.null()), ("id", pa.int64())])
    assert version_of(last, untyped, stated=3) == 3
    other = pa.schema([("id", pa.int64()), ("place", pa.struct([("odd", pa.int8())]))])
    assert version_of(last, other, stated=3) == 3
