"""Spark's side of a stream: offsets from the service, ranges planned per micro-batch.

Invariants:
- `partitions(start, end)` gives exactly the rows of that range whenever it is called, from
  whichever tier has them then; so a replay after a restart is the same micro-batch
- a range that is still in the log is read from the log alone: live data never waits for the lake
- of a primary key table: first the rows of one pinned lake snapshot, in offset order, then changes;
  a micro-batch never holds both
- the constructor does nothing: Spark builds a second reader just to ship `read` to executors
"""

from __future__ import annotations

import logging
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

from streamhouse.connector.options.connection import client_for
from streamhouse.connector.options.options import ReadOptions
from streamhouse.connector.scan.scan import ScanColumn
from streamhouse.connector.scan.spark_reader import (
    SplitStreamReader,
    StreamhousePartition,
    spark_errors,
)
from streamhouse.connector.stream.stream_plan import plan_bootstrap_range, plan_stream_range
from streamhouse.connector.stream.stream_position import StreamPosition, advance
from streamhouse.connector.stream.stream_start import SnapshotPin, start_of_stream
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.model.table_state import TableState

__all__ = ["RefusedStreamReader", "StreamhouseStreamReader"]

_logger = logging.getLogger(__name__)


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
        self._table = str(options.connection.name.path)
        self._state = state
        self._output = tuple(output)
        self._schema = schema
        self._initial: StreamPosition | None = None
        self._last: Mapping[int, int] | None = None
        self._is_current = False
        self._is_change_told = False
        self._pin = SnapshotPin(self._client, self._table)

    # -- offsets -------------------------------------------------------------------------------

    @spark_errors
    def initialOffset(self) -> dict[str, Any]:
        """Return where a stream without a checkpoint starts; repeated calls agree."""
        if self._initial is None:
            state = self._refresh()
            self._initial = start_of_stream(self._client(), state, self._options, self._pin)
        return self._initial.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much one micro-batch reads unless its trigger says otherwise."""
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    @spark_errors
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; waits briefly at the service for new rows."""
        # Checked first: of a table created again, the service knows other buckets.
        position = self._position(start, self._state)
        if self._last is None:
            state = self._wait_for_rows(position)
            available: Mapping[int, int] = _high_watermarks(state)
        else:
            # Asked again each time: tiering and retention go on while the query catches up.
            state, available = self._refresh(), self._last
        position = self._position(start, state)
        position.check_not_beyond(_high_watermarks(state), table=self._table)
        if position.bootstrap is None:
            self._pin.release()
        else:
            self._pin.hold(position.bootstrap)
            available = position.bootstrap.ends
        rows_max = None if isinstance(limit, ReadAllAvailable) else _rows_of(limit)
        ends = advance(position.offsets, available, rows_max=rows_max)

        def fingerprint_at(bucket: int, offset: int) -> str | None:
            if not state.may_lose_rows or not _is_log_only(state, bucket, offset):
                return None
            return self._client().fingerprint_at(self._table, bucket, offset)

        return position.advanced(ends, fingerprint_at).to_json()

    @spark_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix what is there now as the end of the query."""
        self._last = _high_watermarks(self._refresh())

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the newest end seen, for progress reports; it asks nobody."""
        if not self._is_current:
            return None
        state = self._state
        return StreamPosition(
            table_id=state.table.table_id, offsets=_high_watermarks(state)
        ).to_json()

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: retention goes by age and tiering, not by readers."""

    # -- one micro-batch -----------------------------------------------------------------------

    @spark_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the rows from `start` to `end`."""
        state = self._state_covering(end)
        first, last = self._position(start, state), self._position(end, state)
        if first.bootstrap is None:
            self._check_history(first, last, state)
            plan = plan_stream_range(
                self._client(),
                state,
                self._options,
                self._output,
                start=first.offsets,
                end=last.offsets,
            )
        else:
            self._pin.hold(first.bootstrap)
            plan = plan_bootstrap_range(
                self._client(),
                state,
                self._options,
                self._output,
                first.bootstrap,
                start=first.offsets,
                end=last.offsets,
            )
        return [StreamhousePartition(split, plan.context) for split in plan.splits]

    def _check_history(
        self, first: StreamPosition, last: StreamPosition, state: TableState
    ) -> None:
        """Raise `LogCutError` if the log has other rows than when the positions were taken."""
        for at in (first, last):
            for bucket, said in at.fingerprints.items():
                offset = at.offsets[bucket]
                is_read = first.offsets.get(bucket, 0) < last.offsets.get(bucket, 0)
                if is_read and _is_log_only(state, bucket, offset):
                    self._client().fingerprint_at(self._table, bucket, offset, expected=said)

    # -- the table -----------------------------------------------------------------------------

    def _client(self) -> StorageClient:
        connection = self._options.connection
        return self._given_client or client_for(connection.endpoint, connection.token)

    def _refresh(self) -> TableState:
        self._state = self._in_schema(self._client().table_state(self._table))
        self._is_current = True
        return self._state

    def _wait_for_rows(self, position: StreamPosition) -> TableState:
        state = self._client().table_state(
            self._table, after=position.offsets, max_wait_ms=self._options.long_poll_ms
        )
        self._state = self._in_schema(state)
        self._is_current = True
        return self._state

    def _in_schema(self, state: TableState) -> TableState:
        """Return `state` with the schema the stream was loaded with, which it keeps.

        A table created again under the name has another history; its positions are refused later.
        """
        before = self._state.table
        if state.table.table_id != before.table_id:
            return state
        if state.table.schema_id != before.schema_id and not self._is_change_told:
            self._is_change_told = True
            _logger.warning(
                "table %s has schema version %d now; this stream goes on with version %d: start it"
                " again to read the new one",
                *(self._table, state.table.schema_id, before.schema_id),
            )
        return state.in_version(before.schema_id)

    def _state_covering(self, end: Mapping[str, Any]) -> TableState:
        """Return the state the end was taken from; after a restart, a fresh one."""
        ends = end["offsets"].items()
        if self._is_current:
            at = self._state.positions
            if all(int(b) in at and int(o) <= at[int(b)].high_watermark for b, o in ends):
                return self._state
        return self._refresh()

    def _position(self, value: Mapping[str, Any], state: TableState) -> StreamPosition:
        return StreamPosition.from_json(
            value,
            table=self._table,
            table_id=state.table.table_id,
            adopted_from=state.table.adopted_from,
        )


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


def _is_log_only(state: TableState, bucket: int, offset: int) -> bool:
    """Whether the rows before an offset are in the log alone: what the lake has is never lost."""
    at = state.positions[bucket]
    return offset > max(at.tiered_offset, at.log_start_offset)


def _high_watermarks(state: TableState) -> dict[int, int]:
    return {bucket: at.high_watermark for bucket, at in state.positions.items()}


def _rows_of(limit: ReadLimit) -> int | None:
    return limit.max_rows if isinstance(limit, ReadMaxRows) else None
