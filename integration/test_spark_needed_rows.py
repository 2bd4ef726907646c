"""What merge, update and delete read in real Spark: the rows under their keys, not the table."""

from __future__ import annotations

from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import streamhouse
from integration.spark_world import SentRows, SparkWorld, world
from streamhouse.core.errors import InvalidRequestError

__all__ = ["world"]

pytestmark = pytest.mark.spark

ROWS = 400
SCHEMA = pa.schema(
    [
        pa.field("shop", pa.int32(), nullable=False),
        pa.field("item", pa.string(), nullable=False),
        pa.field("stock", pa.int64()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.string())),
    ]
)
_tables = iter(range(1000))


def _table(world: SparkWorld) -> streamhouse.Table:
    path = f"default.stock_{next(_tables)}"
    world.client.create_table(path, SCHEMA, primary_key=("shop", "item"), bucket_count=2)
    data = {
        "shop": [i % 4 for i in range(ROWS)],
        "item": [f"i{i // 4}" for i in range(ROWS)],
        "stock": [i if i % 7 else None for i in range(ROWS)],
        "at": [i * 1_000_000 for i in range(ROWS)],
        "tags": [["a", "b"][: i % 3] for i in range(ROWS)],
    }
    world.client.upsert(path, pa.table([pa.array(data[f.name], f.type) for f in SCHEMA], SCHEMA))
    return streamhouse.Table(world.spark, path, endpoint=world.endpoint)


def _rows(table: streamhouse.Table) -> list[tuple[Any, ...]]:
    found = table.to_df().withColumn("at", F.unix_micros("at")).collect()
    return sorted((tuple(row) for row in found), key=lambda row: row[:2])


def _source(world: SparkWorld, seed: int) -> DataFrame:
    """Return rows some of which the table has; their key's types are wider than the table's."""
    random = Random(seed)
    keys = random.sample([(shop, f"i{n}") for shop in range(6) for n in range(120)], 60)
    rows = [(shop, item, random.choice([-1, 0, 5, None])) for shop, item in keys]
    rows += [(1 << 40, "i1", 5), (-(1 << 31) - 1, "i2", 5)]
    frame = world.spark.createDataFrame(rows, "shop bigint, item string, amount int")
    return frame.where("amount = -1 OR shop < 1000").withColumn("nothing", F.lit(None))


def _merge(table: streamhouse.Table, source: DataFrame, *, is_joined: bool = False) -> Any:
    # A column of a DataFrame is known to a join only.
    positive = source["amount"] > 0 if is_joined else F.col("source.amount") > 0
    return (
        table.merge(source)
        .when_matched_delete("amount < 0 AND target.stock % 2 = 0")
        .when_matched_update(
            {"stock": "coalesce(target.stock, 0) + amount", "tags": "array(target.item, 'x')"},
            condition=positive,
        )
        .when_matched_update({"AT": "target.at + INTERVAL 1 DAY"}, "stock IS NOT NULL")
        .when_not_matched_insert(
            {"shop": "source.shop", "item": "source.item", "stock": "amount"},
            "amount >= 0 AND source.shop BETWEEN 0 AND 9",
        )
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_merge_by_key_looks_rows_up_and_does_what_a_join_does(
    world: SparkWorld, seed: int
) -> None:
    looked_up, joined = _table(world), _table(world)
    source = _source(world, seed)
    with SentRows(world) as sent:
        changes = _merge(looked_up, source).execute()
    assert sent.rows <= 62
    with SentRows(world) as sent:
        assert _merge(joined, source, is_joined=True).execute() == changes
    assert sent.rows >= ROWS
    assert min(changes.rows_inserted, changes.rows_updated, changes.rows_deleted) > 0
    assert _rows(looked_up) == _rows(joined)


def test_a_merge_that_only_inserts_and_one_that_only_deletes_look_rows_up(
    world: SparkWorld,
) -> None:
    table = _table(world)
    source = world.spark.sql(
        "SELECT * FROM VALUES (1, 'i3', 7L), (1, 'new', 8L), (2, 'i4', 9L) AS s(shop, item, stock)"
    )
    ambiguous = {"shop": "shop", "item": "item", "stock": "stock"}
    with pytest.raises(AnalysisException, match="AMBIGUOUS_REFERENCE"):
        table.merge(source).when_not_matched_insert(ambiguous).execute()
    named = {"shop": "source.shop", "item": "source.item", "stock": "source.stock"}
    with SentRows(world) as sent:
        changes = table.merge(source).when_not_matched_insert(named).execute()
        assert changes.rows_inserted == 1
        changes = table.merge(source, ["item", "shop"]).when_matched_delete("target.shop = 1")
        assert changes.execute().rows_deleted == 2
    assert sent.rows <= 2 * 3
    with pytest.raises(InvalidRequestError, match=r"several rows of the source .* shop = 2"):
        table.merge(source.union(source)).when_matched_delete().execute()


def test_columns_of_a_data_frame_and_conditions_beside_the_key_still_join(
    world: SparkWorld,
) -> None:
    table = _table(world)
    source = world.spark.sql("SELECT 1 AS shop, 'i3' AS item, 7L AS amount")
    merge = table.merge(source).when_matched_update({"stock": source["amount"]})
    assert merge.execute().rows_updated == 1
    by_condition = table.merge(
        source, "target.shop = source.shop AND target.item = source.item AND target.stock = 7"
    )
    assert by_condition.when_matched_delete().execute().rows_deleted == 1
    assert len(_rows(table)) == ROWS - 1


def test_updates_and_deletes_look_up_the_keys_that_their_condition_names(
    world: SparkWorld,
) -> None:
    table = _table(world)
    with SentRows(world) as sent:
        one = table.update({"stock": "stock + 1000"}, "shop = 1 AND item IN ('i1', 'i2', 'absent')")
        assert one.rows_updated == 2
        several = (F.col("shop") == 2) & (F.col("item") == "i3") | (F.col("shop") == 3) & F.col(
            "item"
        ).isin("i5", "i6")
        assert table.delete(several & (F.coalesce("stock", F.lit(1)) > 0)).rows_deleted == 3
        assert table.delete("shop = 1 AND shop = 2 AND item = 'i1'").rows_deleted == 0
    assert sent.rows <= 3 + 3
    found = {row[:2]: row[2:] for row in _rows(table)}
    assert found[1, "i1"] == (1005, 5_000_000, ["a", "b"])
    assert len(found) == ROWS - 3
    assert table.delete("stock BETWEEN 1000 AND 1100").rows_deleted == 2


def test_a_row_that_changes_after_it_was_looked_up_is_a_conflict(world: SparkWorld) -> None:
    """A condition changes the row that was looked up for it, the first time only."""
    table = _table(world)
    endpoint, path = world.endpoint, table.path
    schema = pa.schema([SCHEMA.field(name) for name in ("shop", "item", "stock")])

    def interrupting(looked_up: int) -> bool:
        if looked_up < 1000:
            row = pa.table([[1], ["i1"], [looked_up + 1000]], schema=schema)
            with streamhouse.StreamhouseClient(endpoint) as client:
                client.upsert(path, row, columns=schema.names)
        return True

    is_interrupted = F.udf(lambda looked_up: interrupting(looked_up), "boolean")
    source = world.spark.sql("SELECT 1 AS shop, 'i1' AS item, 1L AS amount")
    with SentRows(world) as sent:
        changes = (
            table.merge(source)
            .when_matched_update(
                {"stock": "target.stock + source.amount"}, is_interrupted(F.col("target.stock"))
            )
            .execute()
        )
    assert (changes.attempts, changes.rows_updated) == (2, 1)
    assert sent.rows == 2
    assert {row[2] for row in _rows(table) if row[:2] == (1, "i1")} == {1006}
