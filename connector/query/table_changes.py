"""`streamhouse.changes`: the changes of a table, as `spark.read.changes` of Spark 4.2 and later."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

from streamhouse.connector.format.registration import register
from streamhouse.connector.names._name_loads import load_changes
from streamhouse.reading.options.connection import CHANGES, TableName
from streamhouse.reading.options.options import as_options

__all__ = ["changes"]


def changes(spark: SparkSession, table: str, *, stream: bool = False, **options: Any) -> DataFrame:
    """Return the changes of a table, each with `_change_type`, `_commit_version` and its time.

    The options and their defaults are those of Spark's `changes`, on every version of Spark.

        changes(spark, "shop.accounts", startingVersion=v, deduplicationMode="netChanges")

    Args:
        spark: the session.
        table: `database.table`.
        stream: whether the result is a streaming DataFrame, without an end.
        options: `startingVersion`, `endingVersion`, `startingTimestamp`, `endingTimestamp`,
            `startingBoundInclusive` and `endingBoundInclusive` (true), `deduplicationMode`
            (`none`, or `netChanges` for one change a key), `computeUpdates` (false: an update is a
            `delete` and an `insert`), and the format's options.
    """
    register(spark)
    path = f"{TableName.parse(table).path}${CHANGES}"
    frame: DataFrame = load_changes(spark, path, as_options(options), is_stream=stream)
    return frame
