"""Tables that no lake table can be made of are refused when they are made or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidSchemaError
from streamhouse.core.model.lake.limits import check_lake_schema
from streamhouse.core.model.partitioning import PartitionField
from streamhouse.core.model.schema import Column, Schema
from streamhouse.core.model.table import TableDescriptor, TablePath
from tests.support.tiering_world import TieringWorld

STRUCT = pa.struct([("b", pa.int64())])
CLASHES = [
    [("a.b", pa.int64()), ("a", STRUCT)],
    [("A.B", pa.int64()), ("a", STRUCT)],
    [("s", pa.struct([("a.b", pa.int64()), ("a", STRUCT)]))],
    [("l.element", pa.int64()), ("l", pa.list_(pa.int64()))],
    [("m.key", pa.int64()), ("m", pa.map_(pa.string(), pa.int64()))],
    [("m.value", pa.int64()), ("m", pa.map_(pa.string(), pa.int64()))],
]


def _table(*fields: tuple[str, pa.DataType], **more: Any) -> TableDescriptor:
    return TableDescriptor(
        path=TablePath.parse("db.t"), schema=Schema.from_arrow(pa.schema(fields)), **more
    )


@pytest.mark.parametrize("fields", CLASHES, ids=str)
def test_two_fields_with_one_name_in_the_lake_are_refused(
    fields: list[tuple[str, pa.DataType]],
) -> None:
    with pytest.raises(InvalidSchemaError, match=r"table 'db.t': two fields are called"):
        check_lake_schema(_table(*fields))


@pytest.mark.parametrize(
    "names",
    [
        ("a.b", "a", "a.b.c"),
        ("q\"`'", " ", "ü😀", "a/b%", "a=b&c", "1a", "a,b", "\x7f", "\u2028", "😀" * 255),
        tuple(f"c{i}" for i in range(500)),
    ],
    ids=["dots", "odd", "many"],
)
def test_names_that_the_lake_can_hold_are_taken_and_tiered(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    schema = pa.schema([pa.field(name, pa.int64()) for name in names])
    check_lake_schema(_table(*((name, pa.int64()) for name in names)))

    with TieringWorld(tmp_path) as world:
        world.create_table("db.t", schema)
        world.service.append("db.t", 0, pa.record_batch([[1]] * len(names), schema=schema))
        world.tier("db.t")
        (found,) = world.lake_table("db.t").scan(selected_fields=names).to_arrow().to_pylist()

    assert found == dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", ["_row_id", "_ROW_ID", "_last_updated_sequence_number"])
def test_names_of_format_version_3_are_refused_in_it(tmp_path: Path, name: str) -> None:
    schema = pa.schema([("id", pa.int64()), (name, pa.int64())])
    version_3 = {"table.datalake.format-version": "3"}
    with pytest.raises(InvalidSchemaError, match=f"of its own; rename column '{name}'"):
        check_lake_schema(_table(*((f.name, f.type) for f in schema), properties=version_3))

    with TieringWorld(tmp_path) as world:
        world.create_table("db.t", schema)
        world.service.append("db.t", 0, pa.record_batch([[1], [2]], schema=schema))
        world.tier("db.t")
        assert world.lake_table("db.t").scan().to_arrow()[name].to_pylist() == [2]


@pytest.mark.parametrize("ids", [(1, 1), (0, 1), (1, 10_000), (1, -5), (1, 2**40)])
def test_ids_that_are_no_column_ids_are_refused(ids: tuple[int, int]) -> None:
    columns = tuple(Column(id=i, name=n, type=pa.int64()) for i, n in zip(ids, "xy", strict=True))
    descriptor = TableDescriptor(path=TablePath.parse("db.t"), schema=Schema(columns))

    with pytest.raises(InvalidSchemaError, match=r"'db.t': column.* id "):
        check_lake_schema(descriptor)


@pytest.mark.parametrize("field", ["bucket(2147483648, x)", "truncate(9999999999, x)"])
def test_parameters_beyond_32_bits_are_refused(field: str) -> None:
    partitioned = _table(("x", pa.int64()), partitioned_by=(PartitionField.parse(field),))
    layout = {"table.datalake.batch-layout.partition": field}

    for descriptor in (partitioned, _table(("x", pa.int64()), properties=layout)):
        with pytest.raises(InvalidSchemaError, match="has a parameter above 2147483647"):
            check_lake_schema(descriptor)
