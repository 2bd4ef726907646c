"""Changing a schema, and reading rows of one version as another."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    SchemaMismatchError,
    StreamhouseError,
    UnknownColumnError,
)
from streamhouse.core.model.casts.written_rows import in_current_version, version_of
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import change_schema, convert_rows
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath


def _info(**fields: Any) -> TableInfo:
    schema = pa.schema(
        [
            pa.field("id", pa.int32(), nullable=False),
            pa.field("price", pa.decimal128(8, 2)),
            pa.field("weight", pa.float32()),
        ]
    )
    descriptor = TableDescriptor(
        path=TablePath.parse("shop.items"), schema=Schema.from_arrow(schema), **fields
    )
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


def _rows(info: TableInfo, schema_id: int, *rows: tuple[Any, ...]) -> pa.RecordBatch:
    schema = info.log_schema_of(schema_id)
    by_column = zip(*rows, strict=True)
    columns = [pa.array(values, f.type) for values, f in zip(by_column, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _converted(info: TableInfo, rows: pa.RecordBatch, old: int, new: int) -> list[dict[str, Any]]:
    versions = info.schema_version(old), info.schema_version(new)
    converted = convert_rows(rows, *versions, table=str(info.path))
    assert converted.schema == info.log_schema_of(new)
    found: list[dict[str, Any]] = converted.to_pylist()
    return found


def test_columns_keep_their_ids_and_new_ones_get_ids_never_used() -> None:
    info = change_schema(_info(), [{"drop": "weight", "confirm": "weight"}])
    info = change_schema(
        info,
        [
            {"add": "weight", "type": "string", "after": "id", "comment": "with unit"},
            {"add": "first", "type": "bigint", "first": True},
            {"rename": "price", "to": "net_price"},
            {"comment": "id", "to": "the key"},
        ],
    )

    assert [(c.name, c.id) for c in info.schema.columns] == [
        ("first", 5),
        ("id", 1),
        ("weight", 4),
        ("net_price", 2),
    ]
    assert info.schema.columns[2].comment == "with unit"
    assert info.schema.columns[1].comment == "the key"
    assert info.schema_id == 2
    assert sorted(info.schema_versions) == [0, 1, 2]
    assert TableInfo.from_json(info.to_json()) == info


def test_rows_of_any_version_are_read_in_any_other() -> None:
    info = change_schema(
        _info(),
        [
            {"widen": "id", "to": "bigint"},
            {"widen": "price", "to": "decimal(12,2)"},
            {"widen": "weight", "to": "double"},
            {"rename": "weight", "to": "mass"},
            {"add": "note", "type": "string", "first": True},
        ],
    )
    old = _rows(info, 0, (1, Decimal("1.50"), 2.5), (2, None, None))

    assert _converted(info, old, 0, 1) == [
        {"note": None, "id": 1, "price": Decimal("1.50"), "mass": 2.5},
        {"note": None, "id": 2, "price": None, "mass": None},
    ]
    new = _rows(info, 1, ("n", 7, None, 0.5))
    assert _converted(info, new, 1, 0) == [{"id": 7, "price": None, "weight": 0.5}]
    with pytest.raises(SchemaMismatchError, match="newer value of column 'id' does not fit int,"):
        _converted(info, _rows(info, 1, ("n", 1 << 40, None, None)), 1, 0)


def test_a_column_that_may_be_null_again_is_refused_to_readers_that_know_it_not_null() -> None:
    info = change_schema(_info(), [{"drop_not_null": "id"}, {"rename": "id", "to": "number"}])
    column = info.schema.columns[0]
    assert (column.name, column.id, column.nullable) == ("number", 1, True)

    old = _rows(info, 0, (1, None, 2.5))
    assert _converted(info, old, 0, 1) == [{"number": 1, "price": None, "weight": 2.5}]
    full = _rows(info, 1, (7, None, None))
    assert _converted(info, full, 1, 0) == [{"id": 7, "price": None, "weight": None}]
    with pytest.raises(SchemaMismatchError, match="null in column 'id', which was NOT NULL"):
        _converted(info, _rows(info, 1, (None, None, None)), 1, 0)


def test_rows_of_an_earlier_version_may_be_null_where_the_current_one_allows_it() -> None:
    info = change_schema(_info(), [{"add": "note", "type": "string"}, {"drop_not_null": "id"}])
    types = [("id", pa.int32()), ("price", pa.decimal128(8, 2)), ("weight", pa.float32())]
    columns = [pa.array([value], t) for value, (_, t) in zip((None, None, 0.5), types, strict=True)]
    given = pa.record_batch(columns, schema=pa.schema(types))

    current = in_current_version(info, given, schema_id=0)

    assert current.to_pylist() == [{"id": None, "price": None, "weight": 0.5, "note": None}]


@pytest.mark.parametrize("names", [["id"], ["id", "price", "weight"]])
def test_of_rows_to_delete_the_key_alone_is_made_a_newer_versions(names: list[str]) -> None:
    changes = [{"rename": "id", "to": "number"}, {"drop": "weight", "confirm": "weight"}]
    info = change_schema(_info(primary_key=("id",)), changes)
    nothing = _rows(info, 0, (1, None, None, None, None)).select(names)

    current = in_current_version(info, nothing, schema_id=0, deletes=np.array([True]))

    assert current.to_pylist() == [{"number": 1, **({"price": None} if len(names) > 1 else {})}]


def test_a_dropped_column_that_allowed_no_null_cannot_be_read_from_newer_rows() -> None:
    info = change_schema(_info(), [{"drop": "id", "confirm": "id"}])

    rows = _rows(info, 1, (Decimal("1.00"), None))
    with pytest.raises(SchemaMismatchError, match="column 'id' was dropped"):
        _converted(info, rows, 1, 0)


def test_columns_of_the_changelog_stay_behind_the_tables_own() -> None:
    info = change_schema(_info(primary_key=("id",)), [{"add": "note", "type": "string"}])
    changes = _rows(info, 0, (1, None, None, 1, None))

    (row,) = _converted(info, changes, 0, 1)
    assert list(row) == ["id", "price", "weight", "note", "__change_type", "__retracts"]
    assert row["__change_type"] == 1


def test_renaming_follows_keys_partitioning_and_properties() -> None:
    info = _info(
        primary_key=("id",),
        bucket_key=("id",),
        partitioned_by=(PartitionField.parse("truncate(2, price)"),),
        properties={"table.merge-engine": "aggregation", "fields.price.agg": "sum"},
    )

    info = change_schema(info, [{"rename": "id", "to": "key"}, {"rename": "price", "to": "total"}])

    descriptor = info.descriptor
    assert descriptor.primary_key == descriptor.bucket_key == ("key",)
    assert [str(field) for field in descriptor.partitioned_by] == ["truncate(2, total)"]
    assert descriptor.properties["fields.total.agg"] == "sum"
    assert info.bucket_key_of(0) == ("id",)
    assert info.bucket_key_of(1) == ("key",)


def test_rows_with_the_columns_of_an_earlier_version_are_of_that_version() -> None:
    info = change_schema(_info(), [{"add": "note", "type": "string"}])

    def version(*names: str) -> int:
        columns = pa.schema([(name, pa.string()) for name in names])
        return version_of(info, columns, stated=1)

    assert version("price", "id", "weight") == 0
    assert version("id", "price", "weight", "note") == 1
    # Fits none: refused as rows of the current one.
    assert version("id", "price") == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ([], InvalidRequestError, "there is no change"),
        ([{"alter": "id"}], InvalidRequestError, "must name a column under one of add, rename"),
        ([{"add": "note"}], InvalidRequestError, "new column 'note' needs a type"),
        ([{"add": "x", "type": "text"}], InvalidSchemaError, "unknown type 'text'"),
        ([{"add": "ID", "type": "int"}], InvalidSchemaError, "have the same name"),
        ([{"add": "x", "type": "int", "nullable": False}], InvalidRequestError, "no field 'null"),
        ([{"add": "x", "type": "int", "after": "y"}], UnknownColumnError, "has no column 'y'"),
        ([{"rename": "price"}], InvalidRequestError, "renaming column 'price' needs 'to'"),
        ([{"rename": "prise", "to": "p"}], UnknownColumnError, "did you mean 'price'"),
        ([{"rename": "price", "to": "id"}], InvalidSchemaError, "have the same name"),
        ([{"rename": "price", "to": "__offset"}], StreamhouseError, "is reserved"),
        ([{"widen": "weight", "to": "float"}], InvalidSchemaError, "cannot become float"),
        ([{"widen": "price", "to": "decimal(12,4)"}], InvalidSchemaError, "of the same scale"),
        ([{"widen": "id", "to": "bigint"}], InvalidSchemaError, "part of the primary key"),
        ([{"drop_not_null": "id"}], InvalidSchemaError, "part of the primary key, which is never"),
        ([{"drop_not_null": "price"}], InvalidSchemaError, "'price' is not NOT NULL"),
        ([{"drop_not_null": "id", "to": "x"}], InvalidRequestError, "has no field 'to'"),
        ([{"drop": "weight"}], InvalidRequestError, "repeat its name as 'confirm'"),
        ([{"drop": "id", "confirm": "id"}], InvalidSchemaError, "used by the primary key"),
        ([{"drop": "price", "confirm": "price"}], InvalidSchemaError, "the lake partitioning"),
    ],
)
def test_a_wrong_change_is_refused_in_a_sentence(
    changes: list[dict[str, Any]], error: type[StreamhouseError], message: str
) -> None:
    info = _info(primary_key=("id",), partitioned_by=(PartitionField.parse("price"),))

    with pytest.raises(error, match=message.replace("(", r"\(")) as caught:
        change_schema(info, changes)
    assert "shop.items" in caught.value.message or "column" in caught.value.message


def test_the_batch_layout_follows_a_renamed_column_and_keeps_its_columns() -> None:
    info = _info(
        properties={
            "table.datalake.batch-layout.partition": "truncate(10, id)",
            "table.datalake.batch-layout.sort": "zorder(price, id)",
        }
    )

    renamed = change_schema(info, [{"rename": "id", "to": "number"}]).descriptor

    assert dict(renamed.properties) == {
        "table.datalake.batch-layout.partition": "truncate(10, number)",
        "table.datalake.batch-layout.sort": "zorder(price, number)",
    }
    with pytest.raises(InvalidSchemaError, match=r"'price' cannot be dropped: .* the batch layout"):
        change_schema(info, [{"drop": "price", "confirm": "price"}])
