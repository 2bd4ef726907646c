"""Spark's side of a stream of an Iceberg table: first the rows of a snapshot, later appended rows.

Invariants:
- a micro-batch is a range of whole files, always planned alike; so a replay after a restart is the
  same micro-batch
- at least one file is read at a time, however many rows the file has
- the constructor does nothing: Spark builds a second reader just to ship `read` to executors
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from streamhouse.client import StorageClient
from streamhouse.connector._partition_reader import (
    SplitStreamReader,
    StreamhousePartition,
    spark_errors,
)
from streamhouse.connector._spark_versions import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.files.append_position import AppendPosition
from streamhouse.reading.options.connection import client_for
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan.iceberg_read import open_source, plan_appends
from streamhouse.reading.plan.row_request import RowRequest

if TYPE_CHECKING:
    from streamhouse.reading.files.appends import SourceTable

__all__ = ["AppendStreamReader", "advanced"]


class AppendStreamReader(SplitStreamReader, SupportsTriggerAvailableNow):
    """Follows one Iceberg table from a snapshot's rows into later appends."""

    def __init__(
        self,
        options: ReadOptions,
        table: TableInfo,
        rows: RowRequest,
        schema: pa.Schema,
        client: StorageClient | None = None,
    ) -> None:
        """Use `client`, or else this process's client for the options' endpoint."""
        self._client = client
        self._options = options
        self._table = table
        self._rows = rows
        self._schema = schema
        self._initial: AppendPosition | None = None
        self._newest: SourceTable | None = None
        self._last: SourceTable | None = None

    # -- offsets -------------------------------------------------------------------------------

    @spark_errors
    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a stream without a checkpoint; repeated calls agree."""
        if self._initial is None:
            source = self._last or self._open()
            start = source.start(source.snapshot_id)
            is_latest = self._options.starting.kind == "latest"
            self._initial = start.at(start.file_count) if is_latest else start
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the size of a micro-batch whose trigger sets no limit."""
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    @spark_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; pause briefly if nothing is new."""
        source = self._last or self._open()
        position = self._position(start, source)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = advanced(source, position, rows_max, self._options)
        if end == position and self._last is None:
            # A catalog sends no notice of a change, so the stream polls with a pause.
            time.sleep(self._options.long_poll_ms / 1000)
        return end.to_json()

    @spark_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the current snapshot as the end of the query."""
        self._last = self._open()

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the owner of the table decides how long its snapshots stay."""

    # -- one micro-batch -----------------------------------------------------------------------

    @spark_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the rows from `start` to `end`."""
        source = self._newest or self._open()
        first, last = self._position(start, source), self._position(end, source)
        if first == last:
            return []
        plan = plan_appends(source, first, last, self._table, self._rows, self._options)
        return [StreamhousePartition(split, plan.context) for split in plan.splits]

    # -- the table -----------------------------------------------------------------------------

    def _open(self) -> SourceTable:
        connection = self._options.connection
        client = self._client or client_for(connection.endpoint, connection.token)
        self._newest = open_source(client, connection.name)
        return self._newest

    def _position(self, value: Mapping[str, Any], source: SourceTable) -> AppendPosition:
        table = str(self._options.connection.name)
        return AppendPosition.from_json(value, table=table, table_uuid=source.uuid)


def advanced(
    source: SourceTable, position: AppendPosition, rows_max: int | None, options: ReadOptions
) -> AppendPosition:
    """Return the end of a read: whole files with at most `rows_max` rows, and at least one file."""
    end, rows = position, 0
    until, skipped = source.snapshot_id, options.skipped_snapshots
    for start, counts in source.unread(position, until=until, skipped=skipped):
        file_count = 0
        for count in counts:
            if rows and rows_max is not None and rows + count > rows_max:
                return start.at(start.files_read + file_count) if file_count else end
            rows += count
            file_count += 1
        end = start.at(start.files_read + file_count)
    return end
