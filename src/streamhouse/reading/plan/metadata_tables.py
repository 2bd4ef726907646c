"""Tables about a table: `$buckets`, `$snapshots`, `$files`, `$history`, made while planning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.core.errors import UnknownColumnError, suggestion
from streamhouse.core.extras import require
from streamhouse.core.model.table_state import TableState
from streamhouse.core.model.transaction import TransactionStatus
from streamhouse.lake.files.lake_filesystem import lake_file_properties
from streamhouse.reading.options.connection import BUCKETS, FILES, HISTORY, SNAPSHOTS
from streamhouse.reading.plan._lake_cut import LakeCut, open_lake
from streamhouse.reading.plan.row_request import RowRequest

__all__ = ["METADATA_SCHEMAS", "metadata_rows", "metadata_schema"]

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

METADATA_SCHEMAS: Final[dict[str, pa.Schema]] = {
    BUCKETS: pa.schema(
        [
            pa.field("bucket", pa.int32(), nullable=False),
            pa.field("log_start_offset", pa.int64(), nullable=False),
            pa.field("high_watermark", pa.int64(), nullable=False),
            pa.field("tiered_offset", pa.int64(), nullable=False),
            pa.field("node", pa.string()),
        ]
    ),
    SNAPSHOTS: pa.schema(
        [
            pa.field("snapshot_id", pa.int64(), nullable=False),
            pa.field("parent_snapshot_id", pa.int64()),
            pa.field("committed_at", _TIMESTAMP, nullable=False),
            pa.field("operation", pa.string()),
            pa.field("is_current", pa.bool_(), nullable=False),
            pa.field("is_readable_tier", pa.bool_(), nullable=False),
            pa.field("tiered_offsets", pa.map_(pa.int32(), pa.int64())),
            pa.field("summary", pa.map_(pa.string(), pa.string())),
        ]
    ),
    FILES: pa.schema(
        [
            pa.field("path", pa.string(), nullable=False),
            pa.field("partition", pa.string()),
            pa.field("bucket", pa.int32()),
            pa.field("row_count", pa.int64(), nullable=False),
            pa.field("file_bytes", pa.int64(), nullable=False),
            pa.field("start_offset", pa.int64()),
            pa.field("end_offset", pa.int64()),
            pa.field("min_timestamp", _TIMESTAMP),
            pa.field("max_timestamp", _TIMESTAMP),
            pa.field("delete_files", pa.int32(), nullable=False),
        ]
    ),
    HISTORY: pa.schema(
        [
            pa.field("kind", pa.string(), nullable=False),
            pa.field("at", _TIMESTAMP, nullable=False),
            pa.field("operation", pa.string()),
            pa.field("status", pa.string(), nullable=False),
            pa.field("row_count", pa.int64()),
            pa.field("app_id", pa.string()),
            pa.field("app_version", pa.int64()),
            pa.field("transaction_id", pa.string()),
            pa.field("snapshot_id", pa.int64()),
            pa.field("reason", pa.string()),
        ]
    ),
}
"""What each metadata table looks like. Ends are exclusive, as everywhere."""


def metadata_schema(part: str, columns: Sequence[str] | None) -> pa.Schema:
    """Return the schema of `table$part`, of only `columns` if given."""
    schema = METADATA_SCHEMAS[part]
    if columns is None:
        return schema
    for name in columns:
        if name not in schema.names:
            raise UnknownColumnError(
                f"'${part}' has no column '{name}'{suggestion(name, schema.names)}"
                f" (columns: {', '.join(schema.names)})"
            )
    return pa.schema([schema.field(name) for name in columns])


def metadata_rows(client: StorageClient, state: TableState, part: str) -> pa.Table:
    """Return the rows of `table$part` at the cut of `state`."""
    makers = {BUCKETS: _buckets, SNAPSHOTS: _snapshots, FILES: _files, HISTORY: _history}
    rows = makers[part](client, state)
    return pa.Table.from_pylist(rows, schema=METADATA_SCHEMAS[part])


def _buckets(client: StorageClient, state: TableState) -> list[dict[str, Any]]:
    return [
        {
            "bucket": bucket,
            "log_start_offset": at.log_start_offset,
            "high_watermark": at.high_watermark,
            "tiered_offset": at.tiered_offset,
            "node": state.table.nodes.get(bucket) or client.endpoint_of(str(state.table.path)),
        }
        for bucket, at in sorted(state.positions.items())
    ]


def _snapshots(client: StorageClient, state: TableState) -> list[dict[str, Any]]:
    if state.lake.snapshot_id is None:
        return []
    rows = []
    for snapshot in open_lake(client.lake_catalog(), state.table, state.lake).snapshots():
        offsets = json.loads(snapshot["tiered_offsets"] or "null")
        rows.append(
            {
                "snapshot_id": snapshot["snapshot_id"],
                "parent_snapshot_id": snapshot["parent_snapshot_id"],
                "committed_at": snapshot["committed_at_ms"] * 1_000,
                "operation": snapshot["operation"],
                "is_current": snapshot["is_current"],
                "is_readable_tier": snapshot["snapshot_id"] == state.lake.snapshot_id,
                "tiered_offsets": None
                if offsets is None
                else sorted((int(b), int(end)) for b, end in offsets.items()),
                "summary": sorted(snapshot["properties"].items()),
            }
        )
    return rows


def _files(client: StorageClient, state: TableState) -> list[dict[str, Any]]:
    if state.lake.snapshot_id is None:
        return []
    require("lake", f"'{state.table.path}${FILES}'")
    catalog = client.lake_catalog()
    cut = LakeCut(
        lake=open_lake(catalog, state.table, state.lake),
        file_properties=lake_file_properties(catalog.properties),
        snapshot_id=state.lake.snapshot_id,
        successor_of=state.table,
    )
    lake_files = cut.files(state.table, RowRequest())
    return [
        {
            "path": file.path,
            "partition": file.partition,
            "bucket": file.bucket,
            "row_count": file.row_count,
            "file_bytes": file.file_bytes,
            "start_offset": file.offset_start,
            "end_offset": file.offset_end,
            "min_timestamp": file.timestamp_min_us,
            "max_timestamp": file.timestamp_max_us,
            "delete_files": len(file.deletes),
        }
        for file in lake_files.files
    ]


def _history(client: StorageClient, state: TableState) -> list[dict[str, Any]]:
    """Return transactions and lake snapshots, oldest first."""
    transactions = client.transactions(str(state.table.path))
    rows: list[dict[str, Any]] = [
        {
            "kind": "snapshot",
            "at": entry["committed_at"],
            "operation": entry["operation"],
            "status": str(TransactionStatus.COMMITTED),
            "snapshot_id": entry["snapshot_id"],
        }
        for entry in _snapshots(client, state)
    ]
    for entry in reversed(transactions):
        ended_us = entry["timestamp_us"]
        rows.append(
            {
                "kind": "transaction",
                "at": entry["begun_timestamp_us"] if ended_us is None else ended_us,
                "operation": entry["operation"],
                "status": entry["status"],
                "row_count": entry["row_count"],
                "app_id": entry["app_id"],
                "app_version": entry["version"],
                "transaction_id": entry["transaction_id"],
                "reason": entry["reason"] or None,
            }
        )
    return sorted(rows, key=lambda row: int(row["at"]))
