"""Numbers of lake fields: the same every time, and never changed by what comes later."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.schema import Column, Schema
from streamhouse.lake.files._field_ids import (
    FIELD_ID_KEY,
    NESTED_FIELD_ID_FIRST,
    assign_nested_ids,
    lake_arrow_schema,
    lake_type,
)

NESTED = Schema.from_arrow(
    pa.schema(
        [
            ("id", pa.int64()),
            ("tags", pa.list_(pa.string())),
            ("counts", pa.map_(pa.string(), pa.int16())),
            ("place", pa.struct([("city", pa.string()), ("xy", pa.list_(pa.int8()))])),
        ]
    )
)


def test_nested_fields_are_numbered_depth_first_in_column_order() -> None:
    first = NESTED_FIELD_ID_FIRST

    assert assign_nested_ids(NESTED) == {
        (2, "element"): first,
        (3, "key"): first + 1,
        (3, "value"): first + 2,
        (4, "city"): first + 3,
        (4, "xy"): first + 4,
        (4, "xy", "element"): first + 5,
    }


def test_known_ids_stay_and_new_fields_get_unused_ones() -> None:
    known = assign_nested_ids(NESTED)
    columns = list(NESTED.columns)
    columns[1] = Column(id=2, name="labels", type=pa.list_(pa.field("element", pa.string())))
    columns[3] = Column(
        id=4,
        name="place",
        type=pa.struct([("zip", pa.string()), *columns[3].type]),
    )

    grown = assign_nested_ids(Schema(tuple(columns)), assigned_ids=known, highest_used=10_050)

    assert {path: grown[path] for path in known} == known
    assert grown[(4, "zip")] == 10_051


def test_the_file_schema_has_an_id_on_every_field_and_the_system_columns_last() -> None:
    schema = lake_arrow_schema(NESTED, assign_nested_ids(NESTED))

    assert [int(f.metadata[FIELD_ID_KEY]) for f in schema] == [
        1, 2, 3, 4, 1_000_000, 1_000_001, 1_000_002,
    ]  # fmt: skip
    assert schema.field("place").type.field("xy").type.value_field.metadata == {
        FIELD_ID_KEY: b"10005"
    }
    assert [f.name for f in schema][-3:] == ["__bucket", "__offset", "__timestamp"]
    assert not any(f.nullable for f in list(schema)[-3:])


@pytest.mark.parametrize(
    ("logged", "lake"),
    [
        (pa.int8(), pa.int32()),
        (pa.int16(), pa.int32()),
        (pa.int64(), pa.int64()),
        (pa.list_(pa.field("element", pa.int8())), pa.list_(pa.field("element", pa.int32()))),
        (pa.map_(pa.int16(), pa.int8()), pa.map_(pa.int32(), pa.int32())),
        (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int32())])),
    ],
)
def test_small_integers_are_int_in_the_lake_however_deep(
    logged: pa.DataType, lake: pa.DataType
) -> None:
    assert lake_type(logged) == lake


def test_a_column_id_that_would_meet_nested_ids_is_refused() -> None:
    schema = Schema((Column(id=10_000, name="late", type=pa.int64()),))

    with pytest.raises(InvalidSchemaError, match="'late' has id 10000"):
        assign_nested_ids(schema)
