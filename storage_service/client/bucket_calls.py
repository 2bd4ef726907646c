"""One numbered batch to one bucket of a table: what the producer sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.client.append_writer import AppendWriter
from streamhouse.storage_service.client.request_batches import rows_by_bucket
from streamhouse.storage_service.client.storage_client import StorageClient
from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.model.bucketing import split_by_bucket
from streamhouse.storage_service.model.conform import check_schema, conform
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.transaction import TransactionOperation
from streamhouse.storage_service.wire.arrow_body import encode_append_body

__all__ = ["BucketCalls"]


class BucketCalls:
    """Routing and sending rows of one table, one operation. Thread-safe."""

    def __init__(
        self,
        client: StorageClient,
        path: str,
        *,
        operation: str,
        columns: Sequence[str] | None,
    ) -> None:
        self._client = client
        self._verb: Final = TransactionOperation(operation)
        self._columns = columns
        self.table: Final = client.describe_table(path)
        if self.table.is_primary_key_table is self.is_append:
            raise UnsupportedError(
                f"table '{path}' has {'a' if self.is_append else 'no'} primary key: it cannot be"
                f" written by {operation}"
            )

    @property
    def is_append(self) -> bool:
        """Whether the rows are stored as they are, each with an offset of its own."""
        return self._verb is TransactionOperation.APPEND

    def route(self, rows: pa.RecordBatch, *, any_bucket: int) -> Mapping[int, pa.RecordBatch]:
        """Check rows and return them by bucket; those that may go anywhere go to `any_bucket`."""
        table = self.table
        name = str(table.path)
        if not self.is_append:
            self._check(rows.schema)
            return rows_by_bucket(table, rows)
        conformed = conform(rows, table.schema, table=name)
        key = table.descriptor.effective_bucket_key
        if not key:
            return {any_bucket: conformed}
        return split_by_bucket(conformed, key, table.bucket_count)

    def _check(self, given: pa.Schema) -> None:
        if CHANGE_TYPE_COLUMN in given.names:
            return
        table, name = self.table, str(self.table.path)
        wanted = table.schema
        if self._verb is TransactionOperation.DELETE:
            wanted = table.schema.select(table.descriptor.primary_key, table=name)
        elif self._columns is not None:
            wanted = table.schema.select(self._columns, table=name)
        check_schema(given, wanted, table=name)

    def send(self, bucket: int, rows: pa.RecordBatch, writer: AppendWriter) -> tuple[int, int]:
        """Send a batch under the writer's next sequence of the bucket; return its offsets.

        After an error that may pass, send the same batch again: it is stored once.
        """
        query = {"writer_id": f"{writer.writer_id:x}"}
        if self._columns is not None:
            query["columns"] = json.dumps(list(self._columns))
        body = encode_append_body(rows.schema, [(bucket, writer.next_sequence(bucket), rows)])
        answer = self._client.transport.request(
            "POST",
            f"/v1/tables/{self.table.path}/{self._verb}",
            query=query,
            body=body,
            is_repeatable=True,
            node=self.table.nodes.get(bucket, ""),
        )
        start, end = json.loads(answer)["buckets"][str(bucket)]
        # What changed nothing was not stored, and its sequence is still the next.
        if end > start:
            writer.advance(bucket)
        return int(start), int(end)
