"""A statement that changes rows, sent again with the same `app.id` and `app.version`."""

from __future__ import annotations

import pyarrow as pa
import pytest

import streamhouse
from integration.spark_world import SparkWorld, world
from streamhouse.core.errors import StreamhouseError

__all__ = ["world"]

pytestmark = pytest.mark.spark


def test_an_attached_name_in_streamhouse_sql_happens_once(world: SparkWorld) -> None:
    table, name = "default.happens_once", "attached_once"
    pair = pa.struct([("v", pa.int64())])
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64()), ("s", pair)])
    world.client.create_table(table, schema, primary_key=["id"])
    world.client.upsert(table, [{"id": 1, "v": 1, "s": {"v": 5}}, {"id": 2, "v": 1, "s": {"v": 6}}])
    streamhouse.attach(world.spark, table, name, endpoint=world.endpoint)
    once = {"app.id": "nightly", "app.version": 1, "endpoint": world.endpoint}
    statement = f"UPDATE {name} SET v = v + 1"
    counts = [streamhouse.sql(world.spark, statement, **once).first()[0] for _ in range(2)]
    assert counts == [2, 0]
    assert world.client.lookup_one(table, id=1)["v"] == 2
    world.spark.range(1).createOrReplaceTempView("no_table_of_ours")
    with pytest.raises(StreamhouseError, match="no attached name"):
        streamhouse.sql(world.spark, "DELETE FROM no_table_of_ours", **once)

    # The source's alias is also a column of the table, which alone has a row here.
    world.spark.sql(
        f"MERGE INTO {name} AS t USING (SELECT 1L AS id, 9L AS v) s ON t.id = s.id"
        " WHEN MATCHED THEN UPDATE SET v = s.v"
        " WHEN NOT MATCHED BY SOURCE THEN UPDATE SET v = s.v"
    )
    rows = {row["id"]: row["v"] for row in world.client.read(table).to_pylist()}
    assert rows == {1: 9, 2: 6}
