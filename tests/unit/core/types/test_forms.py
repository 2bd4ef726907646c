"""Every logical type has every form."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pytest

from streamhouse.core.types.logical_type import LogicalType
from streamhouse.core.types.registry import CLASSES, Other, type_of
from streamhouse.lake.snapshots import expressions
from streamhouse.reading.duckdb import _arrow_filter

FORMS: Final = frozenset(LogicalType.__annotations__) - {"arrow"}
TYPES: Final = (
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    *(pa.decimal128(9, 2), pa.string(), pa.binary(), pa.date32()),
    *(pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
    pa.list_(pa.date32()),
    pa.struct([pa.field("a", pa.binary())]),
    pa.map_(pa.string(), pa.int8()),
    pa.null(),
    pa.timestamp("ns"),
)


def missing_forms(t: LogicalType) -> list[str]:
    """Return a sentence for each form that a type lacks."""
    return [
        f"{type(t).__name__} has no form '{form}': add it as `LogicalType.{form}` says"
        for form in sorted(FORMS)
        if not hasattr(t, form)
    ]


@pytest.mark.parametrize("t", TYPES, ids=str)
def test_a_type_has_every_form(t: pa.DataType) -> None:
    assert missing_forms(type_of(t)) == []


def test_tables_by_name_have_every_simple_type() -> None:
    names = {type_of(t).iceberg_name for t in TYPES} - {None}

    assert names == expressions._LITERALS.keys(), "literals of Iceberg"
    # Arrow writes the booleans and binaries of a condition in forms that are not read.
    assert names - {"boolean", "binary"} == _arrow_filter._LITERALS.keys(), "literals of DuckDB"


def test_every_class_of_the_registry_is_among_the_types() -> None:
    assert {type(type_of(t)) for t in TYPES} == {*CLASSES.values(), Other}


def test_a_timestamp_of_another_unit_is_written_whole() -> None:
    column = pa.array([1_234_567_891], pa.timestamp("ns"))

    assert type_of(column.type).json_texts(column).to_pylist() == [
        '"1970-01-01T00:00:01.234567891"'
    ]


def test_a_form_that_a_new_type_lacks_is_named() -> None:
    complete = type(type_of(pa.bool_()))
    forms = {form: getattr(complete, form) for form in FORMS - {"key_bytes", "json_text"}}
    new_type = type("Uuid", (LogicalType,), forms)

    assert missing_forms(new_type(pa.binary(16))) == [
        "Uuid has no form 'json_text': add it as `LogicalType.json_text` says",
        "Uuid has no form 'key_bytes': add it as `LogicalType.key_bytes` says",
    ]
