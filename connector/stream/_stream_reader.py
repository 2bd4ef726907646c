"""Spark's side of a stream: offsets from the service, ranges planned per micro-batch.

Invariants:
- `partitions(start, end)` gives exactly the rows of that range whenever it is called, from
  whichever tier has them then; so a replay after a restart is the same micro-batch
- a range that is still in the log is read from the log alone: live data never waits for the lake
- the constructor does nothing: Spark builds a second reader just to ship `read` to executors
- the service is told how far the stream has read beside the reading; what fails of that harms none
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from streamhouse.client import StorageClient
from streamhouse.connector._partition_reader import (
    SplitStreamReader,
    StreamhousePartition,
    spark_errors,
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
        """Of `client`, or of the one this process has for the options' endpoint."""
        self._given_client = client
        self._options = options
        own_name = f"spark-{uuid.uuid4().hex[:12]}"
        self._follower = TableFollower(options, state, output, self._client, own_name=own_name)
        self._schema = schema
        self._initial: StreamPosition | None = None
        self._last: Mapping[int, int] | None = None

    # -- offsets -------------------------------------------------------------------------------

    @spark_errors
    def initialOffset(self) -> dict[str, Any]:
        """Return where a stream without a checkpoint starts; repeated calls agree."""
        if self._initial is None:
            self._initial = self._follower.start()
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much one micro-batch reads unless its trigger says otherwise."""
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    @spark_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; waits briefly at the service for new rows.

        All before `start` is through: Spark asks when a micro-batch is committed, and again while
        there is none.
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
            # The query ends, and this process with it.
            self._follower.flush_reports()
        return end.to_json()

    @spark_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix what is there now as the end of the query."""
        self._last = high_watermarks(self._follower.refresh())

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the newest end seen, for progress reports; it asks nobody."""
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
        """Nothing to do: the next micro-batch begins where this one ended, and reports that."""

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
        return self._given_client or client_for(connection.endpoint, connection.token)


class RefusedStreamReader(DataSourceStreamReader):
    """Stands for a stream that cannot be read: whatever Spark asks first gets the reason."""

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
        """Return a limit; Spark asks for it before anything may fail."""
        return ReadAllAvailable()

    @spark_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raise the reason."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Never called: there are no partitions."""
        raise self._error


def _rows_of(limit: ReadLimit) -> int | None:
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None
