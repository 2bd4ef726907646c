"""Words of row statements: comments, casts, dots, literals, and names that a view hides."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.core.errors import StreamhouseError

__all__ = ["world"]

pytestmark = pytest.mark.spark

ROWS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("v", pa.int32()),
        ("place", pa.struct([("zone", pa.int32())])),
        ("a.b", pa.int32()),
    ]
)


@pytest.fixture
def acc(world: SparkWorld) -> Iterator[str]:
    """An attached name of a table with the keys 0 to 4."""
    path = "default.words"
    world.client.create_table(path, ROWS, primary_key=("id",))
    rows = [{"id": i, "v": 10 * i, "place": {"zone": i}, "a.b": None} for i in range(5)]
    world.client.upsert(path, rows)
    streamhouse.attach(world.spark, path, "words", endpoint=world.endpoint)
    yield path
    world.spark.sql("DROP TABLE words")
    world.client.drop_table(path)


def _values(world: SparkWorld, column: str) -> dict[int, int | None]:
    return {row["id"]: row[column] for row in world.client.read("default.words").to_pylist()}


def test_the_end_of_a_comment_and_a_cast_are_sparks(world: SparkWorld, acc: str) -> None:
    sql = world.spark.sql
    assert sql("DELETE FROM words -- the old one\rWHERE id = 4").collect() == [(1,)]
    assert sql("DELETE FROM words WHERE id = 3 -- \\\nOR true").collect() == [(1,)]
    sql("UPDATE words SET v = :int::int WHERE id > 1.", args={"int": "7"})
    assert _values(world, "v") == {0: 0, 1: 10, 2: 7}
    with pytest.raises(AnalysisException, match="generator is not supported"):
        sql("UPDATE words SET v = explode(array(1, 2))")
    assert _values(world, "v") == {0: 0, 1: 10, 2: 7}


def test_a_column_with_a_dot_is_changed(world: SparkWorld, acc: str) -> None:
    sql = world.spark.sql
    sql("UPDATE words SET `a.b` = id WHERE id < 2")
    sql("MERGE INTO words USING (SELECT 2L AS id, 5 AS `a.b`) s ON words.id = s.id WHEN MATCHED"
        " THEN UPDATE SET `a.b` = s.`a.b` + 1")  # fmt: skip
    assert _values(world, "a.b") == {0: 0, 1: 1, 2: 6, 3: None, 4: None}


def test_a_literal_of_any_type_is_compared(world: SparkWorld, acc: str) -> None:
    struct = "named_struct('zone', 3)"
    assert world.spark.sql(f"DELETE FROM words WHERE place = {struct}").collect() == [(1,)]
    query = f"SELECT id FROM {acc} WHERE place IN ({struct}, named_struct('zone', 2))"
    assert streamhouse.sql(world.spark, query, endpoint=world.endpoint).collect() == [(2,)]
    collated = f"SELECT id FROM {acc} WHERE string(v) COLLATE UTF8_LCASE = '10'"
    assert streamhouse.sql(world.spark, collated, endpoint=world.endpoint).collect() == [(1,)]


def test_a_view_that_hides_the_name_is_refused(world: SparkWorld, acc: str) -> None:
    spark = world.spark
    spark.range(3).createOrReplaceTempView("words")
    try:
        # Spark itself has no better error: "Unexpected table relation: Range".
        for text in (
            "DELETE FROM words",
            "UPDATE words SET v = 1",
            "EXPLAIN DELETE FROM words",
            "ALTER TABLE words ADD COLUMN w INT",
            "COMMENT ON COLUMN words.v IS 'x'",
        ):
            with pytest.raises(StreamhouseError, match=r"view of this name hides.*default\.words"):
                spark.sql(text)
        assert spark.sql("DELETE FROM default.words WHERE id = 4").collect() == [(1,)]
    finally:
        spark.catalog.dropTempView("words")
    assert set(_values(world, "v")) == {0, 1, 2, 3}
