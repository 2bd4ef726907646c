"""A schema is the same one as Arrow's, as pairs and as Spark's DDL; what is none says where."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.client.values._ddl import schema_of_ddl
from streamhouse.client.values._schema_forms import arrow_schema, arrow_type
from streamhouse.core.errors import InvalidNameError, InvalidSchemaError
from streamhouse.core.model.schema import Schema, type_name

_SIMPLE = st.sampled_from(
    [
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
        *(pa.decimal128(38, 18), pa.decimal128(5, 0)),
    ]
)
_FIELD_NAMES = st.text("abcxyz_1", min_size=1, max_size=4).map(lambda text: f"f{text}")
_TYPES = st.recursive(
    _SIMPLE,
    lambda inner: (
        inner.map(lambda t: pa.list_(pa.field("element", t)))
        | st.tuples(_SIMPLE, inner).map(lambda pair: pa.map_(*pair))
        | st.dictionaries(_FIELD_NAMES, inner, min_size=1, max_size=3).map(
            lambda fields: pa.struct(list(fields.items()))
        )
    ),
    max_leaves=6,
)
_NAMES = st.text(st.characters(categories=["L", "N"], include_characters=" `'"), min_size=1)
_COLUMNS = st.dictionaries(
    _NAMES, st.tuples(_TYPES, st.booleans(), st.text("ab '\\\"", max_size=4)), min_size=1
)


def _ddl(name: str, t: pa.DataType, is_nullable: bool, comment: str) -> str:
    quoted = name.replace("`", "``")
    said = comment.replace("\\", "\\\\").replace("'", "\\'")
    rest = "" if is_nullable else " not null"
    return f"`{quoted}` {type_name(t)}{rest}" + (f" COMMENT '{said}'" if comment else "")


@given(columns=_COLUMNS)
def test_ddl_gives_the_columns_that_it_was_written_for(columns: dict[str, Any]) -> None:
    text = ", ".join(_ddl(name, *column) for name, column in columns.items())

    found = schema_of_ddl(text)

    assert found.names == list(columns)
    for field, (t, is_nullable, comment) in zip(found, columns.values(), strict=True):
        assert (field.type, field.nullable) == (t, is_nullable)
        assert (field.metadata or {}).get(b"comment", b"").decode() == comment


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("id LONG", [("id", pa.int64())]),
        ("id: integer, n: short", [("id", pa.int32()), ("n", pa.int16())]),
        ("b byte, r real", [("b", pa.int8()), ("r", pa.float32())]),
        ("d dec, e numeric(4), f decimal( 5 , 2 )", None),
        ("v VARCHAR(10), c char(2)", [("v", pa.string()), ("c", pa.string())]),
        ("t timestamp_ltz", [("t", pa.timestamp("us", "UTC"))]),
        ("s struct<a:int,b:struct<c:array<string>>>", None),
    ],
)
def test_aliases_are_those_of_spark(text: str, wanted: list[tuple[str, pa.DataType]]) -> None:
    found = schema_of_ddl(text)

    if wanted is None:
        decimals = [("d", (10, 0)), ("e", (4, 0)), ("f", (5, 2))]
        struct = pa.struct(
            [("a", pa.int32()), ("b", pa.struct([("c", pa.list_(pa.string()))]))],
        )
        is_decimals = text.startswith("d")
        wanted = (
            [(name, pa.decimal128(*digits)) for name, digits in decimals]
            if is_decimals
            else [("s", struct)]
        )
    assert [(field.name, field.type) for field in found] == wanted


@given(text=st.text("id bigint,<>()`':;struct arry1not null", max_size=30))
def test_what_is_no_ddl_is_refused_as_such(text: str) -> None:
    with contextlib.suppress(InvalidSchemaError, InvalidNameError):
        Schema.from_arrow(schema_of_ddl(text))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("id bigint,", "the name of a column must be at character 11, where the end is"),
        ("id bigint; n int", "character 10, ';', is not of a column or a type"),
        ("id array<int", "'>' must be at character 13"),
        ("id bigint not", "NULL must be at character 14"),
        ("id bigint comment x", "the text of the comment in quotation marks"),
        ("id decimal(a)", "a number must be at character 12"),
        ("id decimal(99,1)", "column 'id': decimal(99,1) is no type: a decimal has 1 to 38 digits"),
        ("id decimal(2,4)", "column 'id': decimal(2,4) is no type: a decimal has 1 to 38 digits"),
        ("id list<int>", "unknown type 'list'; did you mean 'array<T>'? (types: boolean, tinyint"),
        ("id text", "unknown type 'text'; did you mean 'string'? (types: boolean, tinyint, "),
        ("id int64", "did you mean 'bigint'?"),
        ("id bigin", "did you mean 'bigint'?"),
        ("id " + "array<" * 60, "nested too deep"),
    ],
)
def test_ddl_says_where_it_is_wrong(schema: str, words: str) -> None:
    with pytest.raises(InvalidSchemaError) as refused:
        arrow_schema(schema)

    assert words in refused.value.message


def test_every_form_gives_one_schema() -> None:
    wanted = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])

    class Lent:
        def __arrow_c_schema__(self) -> object:
            return wanted.__arrow_c_schema__()

    forms: list[Any] = [
        wanted,
        Lent(),
        "id BIGINT, name STRING",
        [("id", pa.int64()), ("name", "string")],
        {"id": "bigint", "name": pa.string()},
        [pa.field("id", pa.int64()), ["name", "string"]],
    ]
    for form in forms:
        assert arrow_schema(form, not_null=["id"]).equals(wanted)
    assert arrow_type("map<string,int>", where="m") == pa.map_(pa.string(), pa.int32())
    with pytest.raises(InvalidSchemaError, match="is no type"):
        arrow_type("int, b int", where="a")
