"""Spark's side of a stream: offsets from the service, ranges planned per micro-batch.

Invariants:
- `partitions(start, end)` gives exactly the rows of that range at every call, from whichever tier
  has them at the time; so a replay after a restart is the same micro-batch
- a range still in the log is read from the log alone: live data never waits for the lake
- the constructor does nothing: Spark builds a second reader just to ship `read` to executors
- reports of the stream's progress to the service run beside the reading; a failed report harms none
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from streamhouse.client import StorageClient
from streamhouse.connector._partition_reader import (
    SplitStreamReader,
    StreamhousePartition,
    spark_errors,
)
from streamhouse.connector._spark_versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.follow.stream_lag import LAG_MEMBER, log_batch
from streamhouse.reading.follow.stream_position import StreamPosition
from streamhouse.reading.follow.table_follower import TableFollower, high_watermarks
from streamhouse.reading.options.connection import client_for
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.scan.scan import ScanColumn

__all__ = ["RefusedStreamReader", "StreamhouseStreamReader"]


class StreamhouseStreamReader(SplitStreamReader, SupportsTriggerAvailableNow):
    """Follows one table from history into live data."""

    def __init__(
        self,
        options: ReadOptions,
        state: TableState,
        output: Sequence[ScanColumn],
        schema: pa.Schema,
        client: StorageClient | None = None,
    ) -> None:
        """Use `client`, or else this process's client for the options' endpoint."""
        self._fixed_client = client
        self._options = options
        member_name = f"spark-{uuid.uuid4().hex[:12]}"
        self._follower = TableFollower(options, state, output, self._client, own_name=member_name)
        self._schema = schema
        self._initial: StreamPosition | None = None
        self._last: Mapping[int, int] | None = None

    # -- offsets -------------------------------------------------------------------------------

    @spark_errors
    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a stream without a checkpoint; repeated calls agree."""
        if self._initial is None:
            self._initial = self._follower.start()
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the size of a micro-batch whose trigger sets no limit."""
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    @spark_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; wait briefly at the service for new rows.

        All rows before `start` are processed: Spark calls the method after the commit of a
        micro-batch, and again while nothing is new.
        """
        end = self._follower.next_end(
            start,
            rows_max=None if isinstance(limit, ReadAllAvailable) else _rows_of(limit),
            until=self._last,
            max_wait_ms=self._options.long_poll_ms,
        )
        position = self._follower.position(start)
        self._follower.reached(position)
        if self._last is not None and end == position:
            # The query ends, and this process may end with the query.
            self._follower.flush_reports()
        return end.to_json()

    @spark_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the current end of the table as the end of the query."""
        self._last = high_watermarks(self._follower.refresh())

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the newest end seen, for progress reports, without a request."""
        follower = self._follower
        if not follower.is_current:
            return None
        latest = StreamPosition(
            table_id=follower.state.table.table_id,
            offsets=high_watermarks(follower.state),
            table=follower.table,
        )
        return latest.to_json() | {LAG_MEMBER: follower.lag_ms()}

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the next micro-batch begins at this end, and reports the end."""

    # -- one micro-batch -----------------------------------------------------------------------

    @spark_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the rows from `start` to `end`."""
        plan = self._follower.plan(start, end)
        log_batch(
            self._follower.table,
            self._follower.position(start).offsets,
            self._follower.position(end).offsets,
            latest=high_watermarks(self._follower.state),
            lag_ms=self._follower.lag_ms(),
        )
        return [StreamhousePartition(split, plan.context) for split in plan.splits]

    def _client(self) -> StorageClient:
        connection = self._options.connection
        return self._fixed_client or client_for(connection.endpoint, connection.token)


class RefusedStreamReader(DataSourceStreamReader):
    """Stands for a stream that cannot be read: every call of Spark raises the reason."""

    def __init__(self, error: StreamhouseError) -> None:
        self._error = error

    @spark_errors
    def initialOffset(self) -> dict[str, Any]:
        """Raise the reason."""
        raise self._error

    @spark_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Raise the reason."""
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return a limit; Spark asks for a limit before a call may fail."""
        return ReadAllAvailable()

    @spark_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raise the reason."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Never called: a refused stream has no partitions."""
        raise self._error


def _rows_of(limit: ReadLimit) -> int | None:
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None
