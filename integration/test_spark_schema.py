"""Schemas that change under Spark: writes that merge, streams that go on with theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.core.errors import StreamhouseError

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.end_to_end
def test_a_stream_goes_on_with_the_schema_it_began_with(world: SparkWorld, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
    world.client.create_table("evolving", schema)
    world.client.append("evolving", pa.table({"id": [1], "name": ["a"]}, schema=schema))
    stream = (
        world.stream("evolving")
        .writeStream.format("memory")
        .queryName("evolving_seen")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        stream.processAllAvailable()
        world.client.alter_schema(
            "evolving", [{"rename": "name", "to": "title"}, {"add": "unit", "type": "string"}]
        )
        world.client.append("evolving", pa.table({"id": [2], "title": ["b"], "unit": ["kg"]}))
        world.tier("evolving")
        world.client.append("evolving", pa.table({"id": [3], "title": ["c"], "unit": ["m"]}))
        stream.processAllAvailable()
    finally:
        stream.stop()

    seen = world.spark.table("evolving_seen")
    assert seen.columns == ["id", "name"]
    assert sorted(map(tuple, seen.collect())) == [(1, "a"), (2, "b"), (3, "c")]
    rows = sorted(map(tuple, world.load("evolving").collect()))
    assert rows == [(1, "a", None), (2, "b", "kg"), (3, "c", "m")]


def test_a_write_that_merges_adds_columns_and_an_older_program_goes_on(world: SparkWorld) -> None:
    def write(*columns: str, **options: str) -> None:
        world.write(world.spark.range(1).selectExpr(*columns), "merging", **options)

    write("1 AS id", "'a' AS name", **{"primary.key": "id"})
    write("2 AS id", "'b' AS name", "2.5D AS size", mergeSchema="true")
    write("3 AS id", "'c' AS name")

    assert sorted(map(tuple, world.load("merging").collect())) == [
        (1, "a", None),
        (2, "b", 2.5),
        (3, "c", None),
    ]


def test_fields_are_added_inside_structs_by_sql_and_by_merging(world: SparkWorld) -> None:
    sql = world.spark.sql

    def write(select: str, **options: str) -> None:
        world.write(sql(select), "placed", **options)

    def found() -> list[dict[str, Any]]:
        rows = world.load("placed").orderBy("id").collect()
        return [row.asDict(recursive=True) for row in rows]

    first = "SELECT {} AS id, named_struct('city', 'c', 'spots', array(named_struct('x', 1))) AS at"
    write(first.format(1), **{"primary.key": "id"})
    world.tier("placed")
    streamhouse.attach(world.spark, "placed", "placed_name", endpoint=world.endpoint)
    sql("ALTER TABLE placed_name ADD COLUMNS (at.street STRING AFTER city)")
    write(
        "SELECT 2 AS id, named_struct('CITY', 'c', 'spots', array(named_struct('x', 1, 'y', 2L)),"
        " 'no', 5) AS at",
        mergeSchema="true",
    )
    sql(
        "INSERT INTO placed_name SELECT 3, named_struct('city', 'd', 'street', 's', 'spots',"
        " array(named_struct('x', 3, 'y', 4L)), 'no', 6)"
    )
    write(first.format(4))

    def at(city: str, street: str | None, x: int, y: int | None, no: int | None) -> dict[str, Any]:
        return {"city": city, "street": street, "spots": [{"x": x, "y": y}], "no": no}

    expected = [
        {"id": 1, "at": at("c", None, 1, None, None)},
        {"id": 2, "at": at("c", None, 1, 2, 5)},
        {"id": 3, "at": at("d", "s", 3, 4, 6)},
        {"id": 4, "at": at("c", None, 1, None, None)},
    ]
    assert found() == expected
    world.tier("placed")
    assert found() == expected
    street = sql("SELECT id FROM placed_name WHERE at.street = 's' AND at.spots[0].y > 3").collect()
    assert [row.id for row in street] == [3]
    with pytest.raises(StreamhouseError, match="a field inside a column can be added and widened"):
        sql("ALTER TABLE placed_name DROP COLUMN at.street")
    with pytest.raises(Exception, match=r"field 'at\.odd' is new: add it with mergeSchema"):
        write("SELECT 5 AS id, named_struct('odd', 1) AS at")
    assert found() == expected
    sql("DROP TABLE placed_name")


def test_types_are_widened_inside_structs_by_merging_and_by_sql(world: SparkWorld) -> None:
    sql = world.spark.sql

    def write(select: str, **options: str) -> None:
        world.write(sql(select), "widened", **options)

    row = (
        "SELECT {} AS id, named_struct('n', {}, 'r', 1.5F) AS at, array({}) AS tags,"
        " map('k', {}) AS m"
    )
    write(row.format(1, 1, 1, "1.25BD"), **{"primary.key": "id"})
    world.tier("widened")
    streamhouse.attach(world.spark, "widened", "widened_name", endpoint=world.endpoint)
    with pytest.raises(Exception, match=r"row 0 has .*does not fit"):
        write(row.format(2, 1 << 40, 1, "2.25BD"))
    write(row.format(2, 1 << 40, 1, "12345.25BD"), mergeSchema="true")
    sql("ALTER TABLE widened_name ALTER COLUMN tags.element TYPE bigint")
    sql("ALTER TABLE widened_name ALTER COLUMN at.r TYPE double")
    write(row.format(3, 3, 1 << 41, "3.25BD"))
    write(row.format(4, 4, 4, "4.25BD"))

    table = world.load("widened").orderBy("id")
    assert dict(table.dtypes)["at"] == "struct<n:bigint,r:double>"
    assert dict(table.dtypes)["tags"] == "array<bigint>"
    assert dict(table.dtypes)["m"] == "map<string,decimal(7,2)>"
    expected = [(1, 1, 1), (2, 1 << 40, 1), (3, 3, 1 << 41), (4, 4, 4)]
    query = "id", "at.n", "tags[0]"
    assert list(map(tuple, table.selectExpr(*query).collect())) == expected
    world.tier("widened")
    assert list(map(tuple, table.selectExpr(*query).collect())) == expected
    assert [str(found.v) for found in table.selectExpr("m['k'] AS v").collect()] == [
        *("1.25", "12345.25", "3.25", "4.25")
    ]
    sql("DROP TABLE widened_name")


def test_a_row_that_is_too_large_is_refused_with_its_table_and_row(world: SparkWorld) -> None:
    text = "SELECT id, repeat('x', IF(id = 1, {}, 3)) AS text FROM range(0, 3, 1, 1)"
    for path, megabytes, options in (("log", 32, {}), ("keyed", 8, {"primary.key": "id"})):
        size = (megabytes << 20) - 4_096
        world.write(world.spark.sql(text.format(size)), f"default.large_{path}", **options)
        table = world.load(f"default.large_{path}")
        assert sorted(row.n for row in table.selectExpr("length(text) AS n").collect()) == [
            3,
            3,
            size,
        ]

        with pytest.raises(Exception, match=rf"'default\.large_{path}': row 1 has \d+ bytes; at"):
            world.write(world.spark.sql(text.format(size + (1 << 20))), f"default.large_{path}")

        assert table.count() == 3
