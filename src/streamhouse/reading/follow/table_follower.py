"""One reader's way through a table: the start, the end of the next step, and the plan of a step.

Spark's stream reader and the client's `subscribe(start="full")` use the same follower. A step is a
range between two positions; a step has the same rows whenever it is planned.

Invariants:
- of a primary key table: first the rows of one pinned lake snapshot, then changes; no step has both
- a position beyond the table's rows, or of another table, is refused
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from streamhouse.client import PositionReports, StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.offsets import offsets_in
from streamhouse.core.model.table_state import TableState
from streamhouse.reading.follow._stream_plan import plan_bootstrap_range, plan_stream_range
from streamhouse.reading.follow._stream_start import SnapshotPin, start_of_stream
from streamhouse.reading.follow.stream_position import StreamPosition, advance
from streamhouse.reading.options.connection import LOG
from streamhouse.reading.options.options import ReadOptions
from streamhouse.reading.plan._read_cut import ReadPlan
from streamhouse.reading.scan.scan import ScanColumn

__all__ = ["TableFollower"]

_logger = logging.getLogger(__name__)


class TableFollower:
    """Follows one table. A new follower sends no request before its first use."""

    def __init__(
        self,
        options: ReadOptions,
        state: TableState,
        output: Sequence[ScanColumn],
        client: Callable[[], StorageClient],
        *,
        own_name: str | None = None,
    ) -> None:
        """`own_name` is the consumer's default name; a follower without a name reports nothing."""
        self.table = str(options.connection.name.path)
        self.state = state
        """The table as it was seen last, in the schema of the first time."""
        self.is_current = False
        """Whether `state` was asked for by this follower."""
        self._options = options
        self._output = tuple(output)
        self._client = client
        self._pin = SnapshotPin(client, self.table)
        self._is_change_told = False
        self._own_name = own_name
        self._reports: PositionReports | None = None

    # -- positions -----------------------------------------------------------------------------

    def start(self) -> StreamPosition:
        """Return where a reader without a position begins."""
        first = start_of_stream(self._client(), self.refresh(), self._options, self._pin)
        return self._named(first)

    def position(self, value: Any) -> StreamPosition:
        """Read a position; raises unless the position belongs to the last seen table."""
        table = self.state.table
        return StreamPosition.from_json(
            value, table=self.table, table_id=table.table_id, adopted_from=table.adopted_from
        )

    def next_end(
        self,
        start: Any,
        *,
        rows_max: int | None,
        until: Mapping[int, int] | None = None,
        max_wait_ms: int,
    ) -> StreamPosition:
        """Return the end of the next step after `start`, at most `rows_max` rows on.

        Waits briefly at the service for new rows, unless the rows end at the offsets `until`.
        """
        # Checked first: of a table created again, the service knows other buckets.
        position = self.position(start)
        if until is None:
            state = self._wait_for_rows(position, max_wait_ms)
            available: Mapping[int, int] = high_watermarks(state)
        else:
            # Asked again each time: tiering and retention go on while the reader catches up.
            state, available = self.refresh(), until
        position = self.position(start)
        position.check_not_beyond(high_watermarks(state), table=self.table)
        if position.bootstrap is None:
            self._pin.release()
        else:
            self._pin.hold(position.bootstrap)
            available = position.bootstrap.ends
        ends = advance(position.offsets, available, rows_max=rows_max)

        def fingerprint_at(bucket: int, offset: int) -> str | None:
            if not state.may_lose_rows or not _is_log_only(state, bucket, offset):
                return None
            return self._fingerprint_at(bucket, offset)

        end = position.advanced(ends, fingerprint_at)
        # One that stays is the same JSON, also if an earlier release wrote it.
        return end if end == position else self._named(end)

    def _named(self, position: StreamPosition) -> StreamPosition:
        consumer = position.consumer
        if self._options.consumer is None and consumer is None:
            consumer = self._own_name
        return replace(position, table=self.table, consumer=consumer)

    # -- a step --------------------------------------------------------------------------------

    def plan(self, start: Any, end: Any) -> ReadPlan:
        """Plan the rows from `start` to `end`."""
        state = self._state_covering(end)
        first, last = self.position(start), self.position(end)
        if first.bootstrap is not None:
            self._pin.hold(first.bootstrap)
            return plan_bootstrap_range(
                self._client(),
                state,
                self._options,
                self._output,
                first.bootstrap,
                start=first.offsets,
                end=last.offsets,
            )
        self._check_history(first, last, state)
        return plan_stream_range(
            self._client(),
            state,
            self._options,
            self._output,
            start=first.offsets,
            end=last.offsets,
        )

    def _check_history(
        self, first: StreamPosition, last: StreamPosition, state: TableState
    ) -> None:
        """Raise `LogCutError` if the log has other rows than at the time of the positions."""
        for at in (first, last):
            for bucket, fingerprint in at.fingerprints.items():
                offset = at.offsets[bucket]
                is_read = first.offsets.get(bucket, 0) < last.offsets.get(bucket, 0)
                if is_read and _is_log_only(state, bucket, offset):
                    self._fingerprint_at(bucket, offset, expected=fingerprint)

    def _fingerprint_at(
        self, bucket: int, offset: int, *, expected: str | None = None
    ) -> str | None:
        table_id = self.state.table.table_id
        return self._client().fingerprint_at(
            self.table, bucket, offset, table_id=table_id, expected=expected
        )

    def found_again(
        self, start: StreamPosition, end: StreamPosition, error: StreamhouseError
    ) -> tuple[StreamPosition, StreamPosition]:
        """Return the step for a reader that failed with `error` because rows were moved meanwhile.

        A step of an expired snapshot continues in the current snapshot, which has the unchanged
        rows. The log has the changes from the end of the first snapshot on; an unread row that has
        changed comes only as its changes. Raises `error` if the changes are gone.
        """
        state = self.refresh()
        if start.bootstrap is None:
            return start, end
        ends, current = start.bootstrap.ends, state.lake.snapshot_id
        has_changes = all(
            at.log_start_offset <= ends.get(bucket, 0) for bucket, at in state.positions.items()
        )
        if current is None or not (has_changes or state.lake.changelog is not None):
            raise error
        bootstrap = replace(start.bootstrap, snapshot_id=current, pin=f"stream-{uuid.uuid4()}")
        self._pin.hold(bootstrap)
        if end.bootstrap is not None:
            end = replace(end, bootstrap=bootstrap)
        return replace(start, bootstrap=bootstrap), end

    # -- what the service is told --------------------------------------------------------------

    def reached(self, position: StreamPosition) -> None:
        """Note that everything before a position was read; the service is told beside that."""
        consumer = self._options.consumer or position.consumer or self._own_name
        if consumer is None:
            return
        if self._reports is None:
            self._reports = self._client().position_reports(
                self.table,
                consumer,
                reads_lake=self._options.connection.name.part != LOG,
            )
        self._reports.reached(offsets_in(position.table_id, position.offsets))

    def flush_reports(self) -> None:
        """Tell the service now what was reached; wait for it, but not for long."""
        if self._reports is not None:
            self._reports.flush()

    def lag_ms(self) -> int | None:
        """Return the present age of the oldest row that was unread at the last report."""
        lag = None if self._reports is None else self._reports.lag
        if lag is None:
            return None
        if lag.lag_ms is None or not lag.rows:
            return lag.lag_ms
        return lag.lag_ms + round(1_000 * (time.monotonic() - lag.at_s))

    def close(self) -> None:
        """End the reports; a pin lasts a while for a reader that continues. Idempotent."""
        if self._reports is not None:
            self._reports.close()
        self._pin.leave()

    # -- the table -----------------------------------------------------------------------------

    def refresh(self) -> TableState:
        """Return the table as it is now."""
        return self._seen(self._client().table_state(self.table))

    def _wait_for_rows(self, position: StreamPosition, max_wait_ms: int) -> TableState:
        offsets = offsets_in(position.table_id, position.offsets)
        return self._seen(
            self._client().table_state(self.table, after=offsets, max_wait_ms=max_wait_ms)
        )

    def _seen(self, state: TableState) -> TableState:
        self.state = self._in_schema(state)
        self.is_current = True
        return self.state

    def _in_schema(self, state: TableState) -> TableState:
        """Return `state` with the schema the reader began with, which it keeps.

        A table created again under the name has another history; its positions are refused later.
        """
        first_table = self.state.table
        if state.table.table_id != first_table.table_id:
            return state
        if state.table.schema_id != first_table.schema_id and not self._is_change_told:
            self._is_change_told = True
            _logger.warning(
                "table %s has schema version %d now; this stream goes on with version %d: start it"
                " again to read the new one",
                *(self.table, state.table.schema_id, first_table.schema_id),
            )
        return state.in_version(first_table.schema_id)

    def _state_covering(self, end: Mapping[str, Any]) -> TableState:
        """Return the state the end was taken from; after a restart, a fresh one."""
        ends = end["offsets"].items()
        if self.is_current:
            at = self.state.positions
            if all(int(b) in at and int(o) <= at[int(b)].high_watermark for b, o in ends):
                return self.state
        return self.refresh()


def _is_log_only(state: TableState, bucket: int, offset: int) -> bool:
    """Whether the rows before an offset are in the log alone: what the lake has is never lost."""
    at = state.positions[bucket]
    return offset > max(at.tiered_offset, at.log_start_offset)


def high_watermarks(state: TableState) -> dict[int, int]:
    """Return the end of every bucket's rows."""
    return {bucket: at.high_watermark for bucket, at in state.positions.items()}
