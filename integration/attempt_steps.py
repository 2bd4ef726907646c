"""What tasks of test programs need to meet each other, and what they have staged so far."""

from __future__ import annotations

from pyspark import TaskContext

from streamhouse.api.client import StreamhouseClient

__all__ = ["staged_rows"]


def staged_rows(client: StreamhouseClient, table: str, *, app_id: str, version: int) -> int:
    """Return how many rows all attempts have staged in the transaction of that version.

    Runs in a task: a stream's transaction is joined only by tasks of the same query.
    """
    context = TaskContext.get()
    assert context is not None
    query_id = context.getLocalProperty("sql.streaming.queryId")
    # Not left as a context: that would abort what the job has begun.
    joined = client.begin_transaction(
        table, operation="append", app_id=app_id, version=version, join=True, source=query_id
    )
    return int(joined.status()["row_count"])
