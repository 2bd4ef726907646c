"""Fields inside columns: added by path, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.schema_change import change_schema, version_of
from streamhouse.storage_service.model.table import TableDescriptor, TableInfo, TablePath

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
        (_add("place", "y", comment="why"), "only columns have; comment on column 'place'"),
        (_add("nothing", "y"), "table 'db.t' has no column 'nothing'"),
        (_add("place", ""), "must have 1 to 255 characters"),
        (_add("place", "y", type="strin"), "column 'place.y': unknown type 'strin'"),
        ({"add": ["place", "y"]}, "new field 'place.y' needs a type"),
        ({"add": "place.y", "type": "int"}, r'by the list ["place", "y"], not by'),
        ({"add": ["place", 1], "type": "int"}, "must name a column under one of"),
        ({"add": [], "type": "int"}, "must name a column under one of"),
        ({"drop": ["place", "city"], "confirm": "city"}, "where fields can only be added"),
        ({"rename": ["place", "city"], "to": "town"}, "where fields can only be added"),
        ({"widen": ["place", "city"], "to": "bigint"}, "where fields can only be added"),
    ],
)
def test_what_cannot_be_added_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamhouseError) as refused:
        change_schema(_info(), [change])

    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_rows_are_of_the_newest_version_with_their_fields() -> None:
    first = _info()
    second = change_schema(first, [_add("place", "street")])
    third = change_schema(second, [_add("place", "spots", "element", "y", type="int")])
    last = change_schema(third, [{"comment": "id", "to": "a number"}])

    assert version_of(last, first.schema.to_arrow()) == 0
    assert version_of(last, second.schema.to_arrow()) == 1
    assert version_of(last, third.schema.to_arrow()) == 3
    untyped = pa.schema([("place", pa.null()), ("id", pa.int64())])
    assert version_of(last, untyped) == 3
    other = pa.schema([("id", pa.int64()), ("place", pa.struct([("odd", pa.int8())]))])
    assert version_of(last, other) == 3
