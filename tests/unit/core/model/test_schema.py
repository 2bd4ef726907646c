"""Schemas: which types a table may have, their JSON form, and what the refusals say."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidNameError,
    InvalidSchemaError,
    UnknownColumnError,
)
from streamhouse.core.model.schema import Column, Schema, empty_batch

EVERY_TYPE = pa.schema(
    [
        pa.field("boolean", pa.bool_(), nullable=False),
        pa.field("tinyint", pa.int8()),
        pa.field("smallint", pa.int16()),
        pa.field("int", pa.int32()),
        pa.field("bigint", pa.int64()),
        pa.field("float", pa.float32()),
        pa.field("double", pa.float64()),
        pa.field("decimal", pa.decimal128(38, 10)),
        pa.field("string", pa.string()),
        pa.field("binary", pa.binary()),
        pa.field("date", pa.date32()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestamp_ntz", pa.timestamp("us")),
        pa.field("array", pa.list_(pa.field("element", pa.int32(), nullable=False))),
        pa.field("map", pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))),
        pa.field(
            "struct",
            pa.struct(
                [
                    pa.field("a", pa.int8(), nullable=False),
                    pa.field("b", pa.list_(pa.struct([pa.field("c", pa.string())]))),
                ]
            ),
        ),
    ]
)


def test_every_type_survives_json() -> None:
    schema = Schema.from_arrow(EVERY_TYPE)

    assert Schema.from_json(schema.to_json()) == schema
    assert [c.id for c in schema.columns] == list(range(1, 17))
    assert schema.to_arrow().field("struct").type == EVERY_TYPE.field("struct").type


@pytest.mark.parametrize(
    ("layout", "plain"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary(4), pa.binary()),
        (pa.large_list(pa.large_string()), pa.list_(pa.field("element", pa.string()))),
        (pa.timestamp("us", tz="+00:00"), pa.timestamp("us", tz="UTC")),
    ],
)
def test_layouts_of_one_type_become_the_plain_one(layout: pa.DataType, plain: pa.DataType) -> None:
    schema = Schema.from_arrow(pa.schema([pa.field("x", layout)]))

    assert schema.to_arrow().field("x").type == plain


@pytest.mark.parametrize(
    ("data_type", "instead"),
    [
        (pa.uint8(), "smallint"),
        (pa.uint32(), "bigint"),
        (pa.uint64(), "decimal(20,0)"),
        (pa.float16(), "float (float32)"),
        (pa.timestamp("ns"), "microseconds"),
        (pa.timestamp("us", tz="Europe/Paris"), "tz=UTC"),
        (pa.time64("us"), "bigint microseconds or a string"),
        (pa.duration("us"), "bigint microseconds"),
        (pa.date64(), "date32"),
        (pa.decimal256(50, 2), "decimal128"),
        (pa.decimal128(10, -2), "scale"),
        (pa.null(), "give the column a type"),
    ],
)
def test_other_types_are_refused_with_what_to_use_instead(
    data_type: pa.DataType, instead: str
) -> None:
    with pytest.raises(InvalidSchemaError) as refused:
        Schema.from_arrow(pa.schema([pa.field("price", data_type)]))

    assert refused.value.message.startswith("column 'price': type ")
    assert instead in refused.value.message


def test_an_unsupported_nested_type_is_named_by_its_path() -> None:
    nested = pa.struct([pa.field("inner", pa.list_(pa.uint16()))])

    with pytest.raises(InvalidSchemaError, match=r"column 'outer.inner.element': type uint16"):
        Schema.from_arrow(pa.schema([pa.field("outer", nested)]))


@pytest.mark.parametrize("name", ["__offset", "__BUCKET", "__timestamp", "__change_type"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidNameError, match="is reserved"):
        Schema.from_arrow(pa.schema([pa.field(name, pa.int64())]))


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="'Id' and 'id' have the same name"):
        Schema.from_arrow(pa.schema([pa.field("Id", pa.int64()), pa.field("id", pa.int64())]))


def test_fields_of_a_struct_have_distinct_names_too() -> None:
    twice = pa.struct([pa.field("x", pa.int64()), pa.field("X", pa.int64())])

    with pytest.raises(InvalidSchemaError, match="column 's': fields 'x' and 'X' have the same"):
        Schema.from_arrow(pa.schema([pa.field("s", twice)]))
    with pytest.raises(InvalidSchemaError, match="column 's': fields 'x' and 'x' have the same"):
        Schema.from_json(
            [
                {
                    "name": "s",
                    "type": {
                        "type": "struct",
                        "fields": [{"name": "x", "type": "int"}, {"name": "x", "type": "int"}],
                    },
                }
            ]
        )


def test_an_empty_schema_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="at least one column"):
        Schema.from_arrow(pa.schema([]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nope", "schema must be a list"),
        ([{"type": "int"}], "column 1 has no name"),
        ([{"name": "a"}], "column 'a' has no type"),
        ([{"name": "a", "type": "bigit"}], "did you mean 'bigint'"),
        ([{"name": "a", "type": "decimal(50,2)"}], "a decimal has 1 to 38 digits"),
        ([{"name": "a", "type": {"type": "array"}}], "malformed array type"),
        ([{"name": "a", "type": 3}], "not a type: 3"),
    ],
)
def test_malformed_json_schemas_say_what_is_wrong(value: object, message: str) -> None:
    with pytest.raises(InvalidSchemaError) as refused:
        Schema.from_json(value)

    assert message in refused.value.message


def test_an_unknown_column_is_refused_with_a_suggestion() -> None:
    schema = Schema((Column(id=1, name="customer", type=pa.string()),))

    with pytest.raises(
        UnknownColumnError, match=r"table 'a.b' has no column 'custmer'.*'customer'"
    ):
        schema.column("custmer", table="a.b")


def test_comments_are_kept() -> None:
    field = pa.field("x", pa.int64(), metadata={"comment": "metres"})

    assert Schema.from_json(Schema.from_arrow(pa.schema([field])).to_json()).columns[0].comment == (
        "metres"
    )


def test_no_rows_are_made_of_any_types() -> None:
    union = pa.sparse_union([pa.field("a", pa.int64()), pa.field("b", pa.string())])
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("either", union)])

    none = empty_batch(schema)

    assert none.num_rows == 0
    assert none.schema == schema


def test_nulls_are_looked_for_only_where_one_is_wrong() -> None:
    required = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    schema = Schema.from_arrow(
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("name", pa.string()),
                pa.field("headers", pa.list_(pa.struct([("key", pa.string())]))),
                pa.field("points", pa.list_(required)),
                pa.field("place", pa.struct([("deep", required)])),
                pa.field("tags", pa.map_(pa.string(), pa.string())),
            ]
        )
    )

    names = [column.name for _, column in schema.strict_columns]
    assert names == ["id", "points", "place", "tags"]
