"""Writes whose DataFrame has other columns than the table."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streamhouse.connector.write._write_options import write_options
from streamhouse.connector.write._write_target import WriteTarget, resolve_target
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnknownColumnError,
)
from tests.support.described_tables import DescribedTables

ID = pa.field("id", pa.int64(), nullable=False)
SIZE = pa.field("size", pa.int32())
NAME = pa.field("name", pa.string())


def _tables() -> DescribedTables:
    tables = DescribedTables()
    tables.create_table("db.log", pa.schema([ID, SIZE]))
    tables.create_table("db.keyed", pa.schema([ID, SIZE]), primary_key=["id"])
    return tables


def _resolve(
    tables: DescribedTables, table: str, fields: list[pa.Field], **options: str
) -> WriteTarget:
    given = write_options({"path": f"db.{table}", **options})
    return resolve_target(tables, given, pa.schema(fields), is_stream=False)


@pytest.mark.parametrize("table", ["log", "keyed"])
def test_new_columns_are_added_types_widened_and_missing_ones_null(table: str) -> None:
    tables = _tables()
    wide = pa.field("size", pa.int64())

    target = _resolve(tables, table, [NAME, ID, wide], mergeSchema="true")

    schema = tables.describe_table(f"db.{table}").schema
    assert [(c.name, c.type) for c in schema.columns] == [
        ("id", pa.int64()),
        ("size", pa.int64()),
        ("name", pa.string()),
    ]
    assert target.shape.filled == ()
    again = _resolve(tables, table, [ID, NAME], mergeSchema="true")
    assert tables.describe_table(f"db.{table}").schema_id == 1
    rows = pa.record_batch([pa.array([1]), pa.array(["a"])], schema=pa.schema([ID, NAME]))
    assert again.shape.apply(rows).to_pylist() == [{"id": 1, "name": "a", "size": None}]


def test_types_are_widened_inside_structs_arrays_and_maps() -> None:
    def place(number: pa.DataType, price: pa.DataType) -> pa.Field:
        spots = pa.list_(pa.struct([("x", number)]))
        return pa.field("place", pa.struct([("spots", spots), ("m", pa.map_(number, price))]))

    tables = DescribedTables()
    tables.create_table("db.log", pa.schema([ID, place(pa.int32(), pa.decimal128(5, 2))]))

    wider = place(pa.int64(), pa.decimal128(7, 2))
    target = _resolve(tables, "log", [wider, ID], mergeSchema="true")

    merged = pa.struct(
        [
            ("spots", pa.list_(pa.field("element", pa.struct([("x", pa.int64())])))),
            ("m", pa.map_(pa.int32(), pa.decimal128(7, 2))),
        ]
    )
    assert target.shape.types.field("place").type == merged
    assert tables.describe_table("db.log").schema_id == 1
    narrower = [place(pa.int16(), pa.decimal128(3, 1)), ID]
    assert _resolve(tables, "log", narrower, mergeSchema="true").shape.types == target.shape.types
    assert tables.describe_table("db.log").schema_id == 1


def test_without_the_option_the_columns_must_be_the_tables() -> None:
    with pytest.raises(UnknownColumnError, match="has no column 'name'"):
        _resolve(_tables(), "log", [ID, SIZE, NAME])
    with pytest.raises(SchemaMismatchError, match="column 'size' is missing"):
        _resolve(_tables(), "log", [ID])


def test_a_program_older_than_an_added_column_goes_on() -> None:
    tables = _tables()
    tables.alter_schema("db.log", [{"add": "name", "type": "string"}])

    target = _resolve(tables, "log", [ID, SIZE])

    assert [column.name for column in target.shape.filled] == [NAME.name]
    with pytest.raises(SchemaMismatchError, match="column 'size' is missing"):
        _resolve(tables, "log", [ID, NAME])


def test_whoever_comes_second_finds_it_done() -> None:
    tables = _tables()
    stale = tables.describe_table("db.log")
    tables.alter_schema("db.log", [{"add": "name", "type": "string"}])
    fresh = tables.infos["db.log"]
    tables.stale.append(stale)

    target = _resolve(tables, "log", [ID, SIZE, NAME], mergeSchema="true")

    assert tables.infos["db.log"] is fresh
    assert target.shape.types.names == ["id", "size", "name"]


def test_a_type_that_is_no_wider_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="column 'size' is int, and string is not"):
        _resolve(_tables(), "log", [ID, pa.field("size", pa.string())], mergeSchema="true")


STRICT = pa.schema([ID, pa.field("size", pa.int32(), nullable=False)])


def test_merging_drops_not_null_where_the_data_may_be_null_but_of_no_key() -> None:
    tables = DescribedTables()
    tables.create_table("db.keyed", STRICT, primary_key=["id"])
    loose = [pa.field("id", pa.int64()), pa.field("size", pa.int64())]

    _resolve(
        tables, "keyed", [ID, pa.field("size", pa.int32(), nullable=False)], mergeSchema="true"
    )
    assert tables.describe_table("db.keyed").schema_id == 0
    _resolve(tables, "keyed", loose, mergeSchema="true")

    info = tables.describe_table("db.keyed")
    assert [(c.name, c.nullable) for c in info.schema.columns] == [("id", False), ("size", True)]
    assert info.schema.columns[1].type == pa.int64()
    _resolve(tables, "keyed", loose, mergeSchema="true")
    assert tables.describe_table("db.keyed") == info


def test_a_column_that_must_be_there_is_named_with_how_to_free_it() -> None:
    tables = DescribedTables()
    tables.create_table("db.log", STRICT)

    with pytest.raises(SchemaMismatchError, match=r"alter db\.log --drop-not-null size"):
        _resolve(tables, "log", [ID], mergeSchema="true")


NESTED = pa.schema(
    [
        ID,
        pa.field(
            "tags", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False
        ),
        pa.field("at", pa.struct([pa.field("zone", pa.int8(), nullable=False)]), nullable=False),
        pa.field(
            "counts",
            pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False)),
            nullable=False,
        ),
    ]
)


def test_a_new_tables_columns_may_be_null_at_every_depth_but_for_its_key() -> None:
    tables = DescribedTables()

    target = _resolve(tables, "made", list(NESTED), **{"primary.key": "id"})

    found = tables.describe_table("db.made").schema.to_arrow()
    assert found == pa.schema(
        [
            ID,
            pa.field("tags", pa.list_(pa.field("element", pa.string()))),
            pa.field("at", pa.struct([pa.field("zone", pa.int8())])),
            pa.field("counts", pa.map_(pa.string(), pa.int32())),
        ]
    )
    row = {"id": 1, "tags": ["a"], "at": {"zone": 2}, "counts": [("a", 3)]}
    rows = pa.RecordBatch.from_pylist([row], schema=NESTED)
    assert target.shape.apply(rows).to_pylist() == [row]


def test_a_new_table_keeps_the_nullability_of_the_data_if_told_so() -> None:
    tables = DescribedTables()

    _resolve(tables, "made", list(NESTED), keepNullability="true")

    assert tables.describe_table("db.made").schema.to_arrow() == NESTED


def _placed(*names: str, element: tuple[str, ...] = ("x",)) -> list[pa.Field]:
    spot = pa.struct([(name, pa.int32()) for name in element])
    inner = [(name, pa.string()) for name in names]
    return [ID, pa.field("place", pa.struct([*inner, ("spots", pa.list_(spot))]))]


def _placed_tables() -> DescribedTables:
    tables = DescribedTables()
    tables.create_table("db.log", pa.schema(_placed("city")))
    return tables


def test_new_fields_of_structs_are_added_and_missing_ones_null() -> None:
    tables = _placed_tables()
    given = _placed("street", "CITY", element=("y", "X"))
    row = {"id": 1, "place": {"street": "s", "CITY": "c", "spots": [{"y": 2, "X": 1}, None]}}

    target = _resolve(tables, "log", given, mergeSchema="true")

    found = tables.describe_table("db.log").schema.columns[1].type
    assert [field.name for field in found] == ["city", "spots", "street"]
    assert [field.name for field in found.field("spots").type.value_type] == ["x", "y"]
    rows = pa.RecordBatch.from_pylist([row], schema=pa.schema(given))
    assert target.shape.apply(rows).to_pylist() == [
        {"id": 1, "place": {"city": "c", "spots": [{"x": 1, "y": 2}, None], "street": "s"}}
    ]
    again = _resolve(tables, "log", _placed("street"), mergeSchema="true")
    assert tables.describe_table("db.log").schema_id == 1
    row = {"id": 1, "place": {"street": "s", "spots": [{"x": 1}]}}
    rows = pa.RecordBatch.from_pylist([row, {"id": 2}], schema=pa.schema(_placed("street")))
    assert again.shape.apply(rows.slice(1)).to_pylist() == [{"id": 2, "place": None}]
    assert again.shape.apply(rows).to_pylist()[0] == {
        "id": 1,
        "place": {"city": None, "spots": [{"x": 1, "y": None}], "street": "s"},
    }


def test_without_the_option_structs_have_the_tables_fields_or_those_of_an_earlier_version() -> None:
    tables = _placed_tables()
    with pytest.raises(SchemaMismatchError, match=r"field 'place\.street' is new: add it with"):
        _resolve(tables, "log", _placed("city", "street"))
    with pytest.raises(SchemaMismatchError, match=r"field 'place\.city' is missing"):
        _resolve(tables, "log", _placed())

    tables.alter_schema("db.log", [{"add": ["place", "street"], "type": "string"}])
    tables.alter_schema("db.log", [{"add": ["place", "spots", "element", "y"], "type": "int"}])
    target = _resolve(tables, "log", _placed("CITY"))

    row = {"id": 1, "place": {"CITY": "c", "spots": [{"x": 1}]}}
    rows = pa.RecordBatch.from_pylist([row], schema=pa.schema(_placed("CITY")))
    assert target.shape.apply(rows).to_pylist() == [
        {"id": 1, "place": {"city": "c", "spots": [{"x": 1, "y": None}], "street": None}}
    ]
    with pytest.raises(SchemaMismatchError, match=r"field 'place\.street' is missing"):
        _resolve(tables, "log", _placed("city", element=("x", "y")))


def test_a_new_column_of_an_aggregation_table_gets_the_function_that_the_write_names() -> None:
    tables = DescribedTables()
    tables.create_table(
        "db.sums",
        pa.schema([ID, SIZE]),
        primary_key=["id"],
        properties={"table.merge-engine": "aggregation", "fields.size.agg": "sum"},
    )
    columns = [ID, SIZE, pa.field("Count", pa.int64()), NAME]
    options = {"fields.count.agg": "count", "fields.size.agg": "sum"}

    for _ in range(2):
        _resolve(tables, "sums", columns, mergeSchema="true", **options)

    table = tables.describe_table("db.sums")
    assert table.schema_id == 1
    assert table.descriptor.properties["fields.Count.agg"] == "count"
    assert "fields.name.agg" not in table.descriptor.properties
    with pytest.raises(InvalidRequestError, match=r"exists with fields\.size\.agg = sum"):
        _resolve(tables, "sums", columns, mergeSchema="true", **{"fields.size.agg": "max"})
    with pytest.raises(InvalidRequestError, match=r"fields\.other\.agg"):
        _resolve(tables, "sums", columns, **{"fields.other.agg": "max"})
