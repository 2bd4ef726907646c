"""`write_batch`: what `foreachBatch` calls to write its micro-batch once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamhouse.connector.format.registration import register
from streamhouse.connector.format.service_connection import client_for
from streamhouse.connector.options.options import as_options
from streamhouse.connector.options.write_options import WriteOptions, write_options
from streamhouse.storage_service.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["write_batch"]

_QUERY_ID = "sql.streaming.queryId"


def write_batch(
    df: DataFrame, batch_id: int, *, table: str, app_id: str | None = None, **options: Any
) -> None:
    """Write the rows of a micro-batch to a table, all of them once; for use in `foreachBatch`.

    A micro-batch that Spark runs again writes nothing. With `sequence.column` the rows are sorted
    where the table does not compare them itself.

    Args:
        table: `database.table`.
        app_id: who writes, the same after every restart; default: the query's id, which its
            checkpoint keeps. Two calls for one table in one micro-batch need two ids.
        options: options of a write, as in `**{"write.mode": "partial"}`.
    """
    register(df.sparkSession)
    given = as_options(options) | {
        "table": table,
        "app.id": app_id or _query_id(df.sparkSession),
        "app.version": str(batch_id),
    }
    parsed = write_options(given)
    column = parsed.sequence_column
    if column is not None and not _compares_versions(parsed):
        df = df.orderBy(df[column])
    df.write.format("streamhouse").options(**given).mode("append").save()


def _query_id(spark: SparkSession) -> str:
    try:
        query_id = spark.sparkContext.getLocalProperty(_QUERY_ID)
    except Exception:  # noqa: BLE001 - Spark Connect has no context, and says so in its own ways
        query_id = None
    if query_id is None:
        raise InvalidRequestError(
            "write_batch does not know which query it writes for (outside foreachBatch, or under"
            " Spark Connect): give app_id"
        )
    return query_id


def _compares_versions(options: WriteOptions) -> bool:
    client = client_for(options.connection.endpoint, options.connection.token)
    try:
        info = client.describe_table(str(options.connection.name.path))
    except NotFoundError:
        return options.properties.get("table.merge-engine", "").strip().lower() == "versioned"
    return info.descriptor.merge_rules().version_column is not None
