"""Two uses of one table in one plan: each has its own options, or the statement is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.connector._spark_versions import SHOWS_OPTIONS_OF_USES
from streamhouse.core.errors import UnsupportedError

__all__ = ["world"]

pytestmark = pytest.mark.spark

FEW, MANY = "(where = 'id < 3')", "(where = 'id >= 8')"
VIEW = f"CREATE OR REPLACE TEMP VIEW few AS SELECT id FROM opt WITH {FEW}"
stores_views = pytest.mark.skipif(
    not SHOWS_OPTIONS_OF_USES, reason="a view with options is refused before PySpark 4.3"
)
OF_VIEWS = [
    "SELECT id FROM few UNION ALL SELECT id FROM many",
    "SELECT id FROM few UNION ALL SELECT id FROM opt",
    "INSERT INTO opt (id) SELECT id FROM few UNION ALL SELECT id FROM many",
    "BEGIN SELECT id FROM few UNION ALL SELECT id FROM many; END",
    "WITH c AS (SELECT id FROM few) INSERT INTO opt (id) SELECT id FROM c UNION SELECT id"
    " FROM many",
    "CREATE TABLE copied USING parquet AS SELECT * FROM few UNION ALL SELECT * FROM many",
    "CREATE TABLE copied USING streamhouse OPTIONS (endpoint = 'ENDPOINT')"
    " AS SELECT * FROM few UNION ALL SELECT * FROM many",
    f"CREATE TEMP VIEW both AS SELECT id FROM few UNION SELECT id FROM opt WITH {MANY}",
]


@pytest.fixture(scope="module")
def name(world: SparkWorld) -> Iterator[str]:
    """A name of a table with ids 0 to 9, and views of it; `few` is a DataFrame's before 4.3."""
    path = world.table(rows=10)
    streamhouse.attach(world.spark, path, "opt", endpoint=world.endpoint)
    spark = world.spark
    if SHOWS_OPTIONS_OF_USES:
        spark.sql(VIEW)
    else:
        spark.sql(f"SELECT id FROM opt WITH {FEW}").createOrReplaceTempView("few")
    spark.sql(f"SELECT id FROM opt WITH {MANY}").createOrReplaceTempView("many")
    spark.sql("CREATE OR REPLACE TEMP VIEW plain AS SELECT id FROM opt")
    world.load(path).createOrReplaceTempView("loaded")
    yield path
    for view in ("few", "many", "plain", "loaded"):
        spark.catalog.dropTempView(view)
    spark.sql("DROP TABLE opt")


def ids(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "statement",
    [
        f"SELECT id FROM opt WITH {FEW} UNION ALL SELECT id FROM opt WITH {MANY}",
        f"SELECT id FROM opt UNION ALL SELECT id FROM default.opt WITH {MANY}",
        f"SELECT n.id FROM opt n JOIN `opt` WITH {FEW} o ON n.id = o.id",
        f"WITH c AS (SELECT id FROM opt WITH {FEW}) SELECT id FROM c WHERE id IN"
        f" (SELECT id FROM opt WITH {MANY})",
        f"SELECT id, (SELECT count(*) FROM opt) AS n FROM opt WITH {FEW}",
        f"SELECT id FROM plain UNION ALL SELECT id FROM opt WITH {FEW}",
        f"SELECT id FROM opt WITH {FEW} WHERE id IN (SELECT id FROM plain)",
        "CREATE TABLE copied USING parquet AS SELECT id FROM plain"
        f" UNION ALL SELECT id FROM opt WITH {FEW}",
        f"INSERT INTO opt (id) SELECT id FROM opt WITH {FEW} UNION ALL SELECT id FROM opt",
        "CREATE TABLE copied USING streamhouse OPTIONS (endpoint = 'ENDPOINT')"
        f" AS SELECT id FROM plain UNION ALL SELECT id FROM opt WITH {FEW}",
        f"BEGIN INSERT INTO opt (id) SELECT id FROM opt WITH {FEW} UNION SELECT id FROM opt; END",
        f"BEGIN SELECT id FROM opt WITH {FEW} UNION ALL SELECT id FROM plain; END",
        f'EXECUTE IMMEDIATE "SELECT id FROM opt WITH {FEW} UNION ALL SELECT id FROM plain"',
        f'BEGIN DECLARE s STRING; SET s = "SELECT id FROM opt WITH {FEW} UNION ALL SELECT id FROM'
        ' opt"; EXECUTE IMMEDIATE s; END',
        *(pytest.param(statement, marks=stores_views) for statement in OF_VIEWS),
    ],
)
def test_a_name_with_two_sets_of_options_is_refused(
    world: SparkWorld, name: str, statement: str
) -> None:
    with pytest.raises(UnsupportedError, match=r"'(default\.)?opt' with different.*attach\(spark"):
        world.spark.sql(statement.replace("ENDPOINT", world.endpoint)).collect()
    assert ids(world.load(name)) == list(range(10))
    assert not world.spark.catalog.tableExists("copied")


@pytest.mark.skipif(SHOWS_OPTIONS_OF_USES, reason="PySpark 4.3 has views with options")
def test_before_4_3_a_view_has_options_only_as_a_dataframe(world: SparkWorld, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"view of 'default\.opt' WITH.*before 4\.3"):
        world.spark.sql(VIEW)
    queries = {
        "few UNION ALL SELECT id FROM many": [0, 1, 2, 8, 9],
        f"few UNION ALL SELECT id FROM opt WITH {MANY}": [0, 1, 2, 8, 9],
        "opt WHERE id IN (SELECT id FROM few)": [0, 1, 2],
        "few_2 UNION ALL SELECT id FROM opt WHERE id < 4": [0, 0, 1, 1, 2, 2, 3],
        "opt WHERE id < 4 UNION ALL SELECT id FROM few_2": [0, 0, 1, 1, 2, 2, 3],
        "few_2 UNION ALL SELECT id FROM plain WHERE id < 4": [0, 0, 1, 1, 2, 2, 3],
    }
    world.spark.sql("CREATE OR REPLACE TEMP VIEW few_2 AS SELECT id FROM few")
    for query, expected in queries.items():
        for command in "", "CREATE TABLE copied USING parquet AS ":
            # A view that Spark plans anew shares its source with the other use: from 4.1 on.
            try:
                frame = world.spark.sql(f"{command}SELECT id FROM {query}")
            except UnsupportedError:
                assert not world.spark.catalog.tableExists("copied")
            else:
                assert ids(world.spark.table("copied") if command else frame) == expected
                world.spark.sql("DROP TABLE IF EXISTS copied")


@pytest.mark.end_to_end
def test_uses_that_share_nothing_or_the_same_have_their_options(
    world: SparkWorld, name: str
) -> None:
    spark = world.spark
    few, many = [0, 1, 2], [8, 9]
    assert ids(spark.sql(f"SELECT id FROM opt WITH {FEW}")) == few
    same = spark.sql(f"SELECT a.id FROM opt WITH {FEW} a JOIN opt WITH {FEW} b ON a.id = b.id")
    assert ids(same) == few
    assert ids(spark.sql("SELECT id FROM few").union(spark.sql("SELECT id FROM many"))) == (
        few + many
    )
    streamhouse.attach(spark, name, "opt_2", endpoint=world.endpoint, where="id >= 8")
    two = f"SELECT id FROM opt WITH {FEW} UNION ALL SELECT id FROM opt_2"
    assert ids(spark.sql(two)) == few + many
    spark.sql("DROP TABLE opt_2")

    def table(where: str) -> DataFrame:
        return spark.read.option("where", where).table("opt")

    def load(where: str) -> DataFrame:
        return world.load(name, where=where)

    for read in (table, load):
        frame: Callable[[str], DataFrame] = read
        assert ids(frame("id < 3").union(frame("id >= 8"))) == few + many
        joined = (
            frame("id < 3")
            .repartition(2, "id")
            .join(frame("id < 2").repartition(2, "id").withColumnRenamed("region", "r"), "id")
        )
        assert ids(joined) == [0, 1]
        counts = frame("id < 3").groupBy().count().union(frame("id >= 8").groupBy().count())
        assert sorted(row[0] for row in counts.collect()) == [2, 3]
        kept = frame("id < 3").cache()
        assert (kept.count(), frame("id >= 8").count(), frame("id < 3").count()) == (3, 2, 3)
        kept.unpersist()
    with pytest.raises(UnsupportedError, match="with different options"):
        streamhouse.sql(spark, two.replace("opt_2", f"opt WITH {MANY}"))


def test_options_of_a_cached_name_or_of_a_view_are_refused(world: SparkWorld, name: str) -> None:
    spark = world.spark
    spark.sql("CACHE TABLE opt")
    for cached in (
        lambda: spark.sql(f"SELECT id FROM opt WITH {FEW}"),
        lambda: spark.read.option("where", "id < 3").table("opt"),
    ):
        if not spark.catalog.isCached("opt"):
            # PySpark 4.0 caches no table of a Python source: the options count.
            assert ids(cached()) == [0, 1, 2]
            continue
        with pytest.raises(UnsupportedError, match=r"'default.opt' is cached.*UNCACHE TABLE"):
            cached()
    assert spark.sql("SELECT id FROM opt").count() == 10
    spark.sql("UNCACHE TABLE opt")
    refused: list[Callable[[], Any]] = [
        lambda: spark.sql(f"SELECT id FROM loaded WITH {FEW}"),
        lambda: spark.sql(f"SELECT id FROM few WITH {MANY}"),
        lambda: spark.sql(f"WITH c AS (SELECT id FROM opt) SELECT id FROM c WITH {FEW}"),
        lambda: spark.read.option("where", "id < 3").table("loaded"),
    ]
    for call in refused:
        with pytest.raises(UnsupportedError, match=r"a view or a query: Spark drops them"):
            call()


def test_streams_of_one_name_are_looked_at_too(world: SparkWorld, name: str) -> None:
    with pytest.raises(UnsupportedError, match="with different options"):
        world.spark.sql(
            f"SELECT id FROM STREAM opt WITH {FEW} UNION ALL SELECT id FROM STREAM opt WITH {MANY}"
        )
