"""Rows sent straight to the table, batch by batch: visible as they go, never taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from streamhouse.connector.format.service_connection import client_for
from streamhouse.connector.options.write_options import WriteMode
from streamhouse.connector.scan.split_reader import coalesce
from streamhouse.connector.write.write_target import WriteTarget
from streamhouse.storage_service.client import AppendWriter, StorageClient
from streamhouse.storage_service.errors import TableNotFoundError

__all__ = ["REQUEST_ROWS", "WrittenRows", "check_table", "write_directly"]

REQUEST_ROWS: Final = 65_536
"""Rows a request is filled up to: Spark's own batches have 10,000, too few for one fsync."""


@dataclass
class WrittenRows(WriterCommitMessage):
    """What one task wrote: its rows, and per bucket the offsets they lie between."""

    row_count: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, offsets: Mapping[int, tuple[int, int]]) -> None:
        """Take in what one request answered."""
        for bucket, (start, end) in offsets.items():
            self.offsets[bucket] = (self.offsets.get(bucket, (start, end))[0], end)


def write_directly(target: WriteTarget, batches: Iterator[pa.RecordBatch]) -> WrittenRows:
    """Write all rows of one task, in their order; what it wrote before it fails stays."""
    client = client_for(target.connection.endpoint, target.connection.token)
    check_table(client.describe_table(target.path).table_id, target)
    writer = AppendWriter()
    written = WrittenRows()
    shaped = (target.shape.apply(batch) for batch in batches if batch.num_rows)
    # One request is on its way while Spark makes the next batch; never two, so order holds.
    with ThreadPoolExecutor(1, thread_name_prefix="streamhouse-write") as sender:
        pending: Future[dict[int, tuple[int, int]]] | None = None
        for batch in coalesce(shaped, rows_max=REQUEST_ROWS):
            if pending is not None:
                written.add(pending.result())
            pending = sender.submit(_send, client, target, batch, writer)
            written.row_count += batch.num_rows
        if pending is not None:
            written.add(pending.result())
    return written


def check_table(table_id: int, target: WriteTarget) -> None:
    """Raise unless the table is still the one the write was planned for."""
    if table_id != target.table_id:
        raise TableNotFoundError(
            f"table '{target.path}' was dropped and created again while this job was writing to it"
        )


def _send(
    client: StorageClient, target: WriteTarget, batch: pa.RecordBatch, writer: AppendWriter
) -> dict[int, tuple[int, int]]:
    if target.mode is WriteMode.APPEND:
        return client.append(target.path, batch, writer=writer)
    if target.mode is WriteMode.DELETE:
        return client.delete(target.path, batch, writer=writer)
    return client.upsert(target.path, batch, columns=target.columns, writer=writer)
