"""Which columns a read returns and reads."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.schema import Schema
from streamhouse.reading.plan.scan_schema import check_types, output_columns

NESTED = pa.struct([("a", pa.list_(pa.int32())), ("b", pa.map_(pa.string(), pa.int64()))])
SCHEMA = Schema.from_arrow(
    pa.schema([pa.field("id", pa.int64(), False), ("Name", pa.string()), ("nested", NESTED)])
)


def names(columns: list[str] | None = None, *, include_metadata: bool = False) -> list[str]:
    found = output_columns(SCHEMA, columns=columns, include_metadata=include_metadata, table="db.t")
    return [column.name for column in found]


def test_all_columns_then_metadata() -> None:
    assert names() == ["id", "Name", "nested"]
    assert names(include_metadata=True) == [
        *names(),
        "__bucket",
        "__offset",
        "__timestamp",
    ]


def test_columns_in_the_order_asked_for() -> None:
    assert names(["nested", "id"]) == ["nested", "id"]
    assert names(["id"], include_metadata=True)[:2] == ["id", "__bucket"]


def test_metadata_columns_can_be_named_and_come_once() -> None:
    assert names(["__offset", "id"]) == ["__offset", "id"]
    assert names(["__offset", "id"], include_metadata=True) == [
        "__offset",
        "id",
        "__bucket",
        "__timestamp",
    ]


def test_names_match_without_case() -> None:
    assert names(["NAME", "ID"]) == ["Name", "id"]


def test_an_unknown_column_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UnknownColumnError, match="column 'nested_'; did you mean 'nested'"):
        names(["nested_"])


def test_types_that_spark_sees_as_one_are_one() -> None:
    """Spark names list elements differently and forgets nullability inside."""
    output = output_columns(SCHEMA, columns=["nested"], include_metadata=False, table="t")
    list_type = pa.list_(pa.field("item", pa.int32(), False))
    same = pa.struct([("a", list_type), ("b", pa.map_(pa.string(), pa.int64()))])
    other = pa.struct([("a", pa.list_(pa.int64())), ("b", pa.map_(pa.string(), pa.int64()))])

    check_types(output, pa.schema([("nested", same)]), table="t")
    with pytest.raises(SchemaMismatchError, match=r"column 'nested' is struct<.*asks\s+for struct"):
        check_types(output, pa.schema([("nested", other)]), table="t")
