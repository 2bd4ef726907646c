"""Appending rows: conform, route to buckets, cut into requests, number, send."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.client.append_writer import AppendWriter, WriterPool
from streamhouse.storage_service.client.request_batches import bounded_batches
from streamhouse.storage_service.client.transport import HttpTransport
from streamhouse.storage_service.errors import InternalError
from streamhouse.storage_service.model.bucketing import split_by_bucket, split_evenly
from streamhouse.storage_service.model.conform import check_schema, conform
from streamhouse.storage_service.model.schema import Schema
from streamhouse.storage_service.model.schema_change import version_of
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.wire.arrow_body import encode_append_body

__all__ = ["Appender"]

SPREAD_ROWS_MIN: Final = 8_192


class Appender:
    """Appends to tables for a client. Thread-safe: concurrent calls use separate writers."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._writers = WriterPool()
        self._next_bucket: dict[int, int] = {}

    def append(
        self,
        table: TableInfo,
        data: pa.Table | pa.RecordBatch,
        *,
        writer: AppendWriter | None,
    ) -> dict[int, tuple[int, int]]:
        """Append all of `data`; see `StorageClient.append`."""
        name = str(table.path)
        schema_id = version_of(table, data.schema)
        schema = table.schema_version(schema_id)
        check_schema(data.schema, schema, table=name)
        own = writer or self._writers.take(table.table_id)
        offsets: dict[int, tuple[int, int]] = {}
        # A call that fails leaves its writer's sequences unknown: the writer is dropped with it.
        for batch in bounded_batches(data):
            rows = conform(batch, schema, table=name)
            parts = self._route(table, rows, schema_id)
            for bucket, span in self._send(table, parts, own, schema).items():
                start = offsets.get(bucket, span)[0]
                offsets[bucket] = (start, span[1])
        if writer is None:
            self._writers.give_back(table.table_id, own)
        return offsets

    def _route(
        self, table: TableInfo, rows: pa.RecordBatch, schema_id: int
    ) -> Mapping[int, pa.RecordBatch]:
        key = table.bucket_key_of(schema_id)
        if key:
            return split_by_bucket(rows, key, table.bucket_count)
        with self._lock:
            first = self._next_bucket.get(table.table_id, -1)
            if first < 0:
                first = secrets.randbelow(table.bucket_count)
            parts = split_evenly(
                rows, table.bucket_count, first_bucket=first, rows_min=SPREAD_ROWS_MIN
            )
            self._next_bucket[table.table_id] = (first + len(parts)) % table.bucket_count
        return parts

    def _send(
        self,
        table: TableInfo,
        parts: Mapping[int, pa.RecordBatch],
        writer: AppendWriter,
        schema: Schema,
    ) -> dict[int, tuple[int, int]]:
        by_node: dict[str, list[tuple[int | None, int, pa.RecordBatch]]] = {}
        for bucket, rows in parts.items():
            part = (bucket, writer.next_sequence(bucket), rows)
            by_node.setdefault(table.nodes.get(bucket, ""), []).append(part)
        offsets: dict[int, tuple[int, int]] = {}
        for node, node_parts in by_node.items():
            answer = self._transport.request(
                "POST",
                f"/v1/tables/{table.path}/append",
                query={"writer_id": f"{writer.writer_id:x}"},
                body=encode_append_body(schema.to_arrow(), node_parts),
                is_repeatable=True,
                node=node,
            )
            for bucket_text, (start, end) in json.loads(answer)["buckets"].items():
                offsets[int(bucket_text)] = (int(start), int(end))
        for bucket, rows in parts.items():
            start, end = offsets.get(bucket, (0, -1))
            if end - start != rows.num_rows:
                raise InternalError(
                    f"append to '{table.path}': bucket {bucket} acknowledged offsets"
                    f" [{start}, {end}) for {rows.num_rows} rows"
                )
            writer.advance(bucket)
        return offsets
