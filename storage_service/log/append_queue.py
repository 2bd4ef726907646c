"""Batches with offsets, not durable yet, and how to undo them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.model.records.record_sequence import Continuity
from streamhouse.core.model.values.checks import CheckText
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.log.segments.segment import WrittenFrame
from streamhouse.storage_service.log.segments.segment_format import encode_frame, frame_bytes
from streamhouse.storage_service.log.writer_state import (
    TRANSACTION_WRITER,
    WriterStates,
)

__all__ = ["AppendQueue", "AppendResult", "RoutedBatch"]

_ROWS_MAX: Final = (1 << 32) - 1


class RoutedBatch(NamedTuple):
    """Rows for the log of one bucket: one record batch message, as stored.

    `schema_id` is the version of the table's schema. Without a `writer_id` the batch is never a
    repetition. `timestamp_us` 0 means the time of the commit. The rows hold the constraints
    `judged_by`.
    """

    bucket: int
    row_count: int
    payload: Buffer
    schema_id: int = 0
    writer_id: int = 0
    sequence: int = 0
    timestamp_us: int = 0
    continuity: Continuity = Continuity.EXACT
    judged_by: frozenset[CheckText] = frozenset()


class AppendResult(NamedTuple):
    """The offsets of appended rows; for a duplicate, the offsets of its first append."""

    base_offset: int
    end_offset: int
    timestamp_us: int
    is_duplicate: bool


class _Queued(NamedTuple):
    """One frame, and the state before its append."""

    buffers: list[Buffer]
    frame: WrittenFrame
    timestamp_us_before: int
    writer_id: int
    writer_window_before: bytes | None


class AppendQueue:
    """Assigns offsets and timestamps, and remembers writers. Not thread-safe.

    The writer state includes queued batches, so that a repetition within one group is recognised.
    """

    def __init__(
        self,
        *,
        writers: WriterStates,
        next_offset: int,
        last_timestamp_us: int,
        clock_us: Callable[[], int],
    ) -> None:
        self._writers = writers
        self._next_offset = next_offset
        self._last_timestamp_us = last_timestamp_us
        self._clock_us = clock_us
        self.queued: list[_Queued] = []
        """The queued batches, in order; cleared once durable."""

    def now_us(self) -> int:
        """Return the time, never before the last batch's.

        A clock going backwards stops the time, but never reverses it.
        """
        return max(self._last_timestamp_us, self._clock_us())

    def stamp_us(self, timestamp_us: int) -> int:
        """Return the timestamp for this time, 0 being now; timestamps never decrease."""
        self._last_timestamp_us = max(timestamp_us or self._clock_us(), self._last_timestamp_us)
        return self._last_timestamp_us

    @property
    def last_timestamp_us(self) -> int:
        """The time of the last batch; without batches, the log's creation time."""
        return self._last_timestamp_us

    def find(
        self,
        writer_id: int,
        *,
        sequence: int,
        row_count: int | None = None,
        continuity: Continuity = Continuity.EXACT,
    ) -> AppendResult | None:
        """Return the batch repeated by a writer; see `WriterStates.find`."""
        if writer_id in (0, TRANSACTION_WRITER):
            return None
        earlier_append = self._writers.find(
            writer_id, sequence=sequence, row_count=row_count, continuity=continuity
        )
        return (
            None if earlier_append is None else AppendResult(*earlier_append[1:], is_duplicate=True)
        )

    def checked(
        self, batch: RoutedBatch, *, bytes_max: int, log: object
    ) -> tuple[Buffer, AppendResult | None]:
        """Return the payload, as long as its bytes, and the earlier append of a repeated batch.

        Raises RequestTooLargeError, naming `log`, and as `WriterStates.find`.
        """
        payload = batch.payload
        if isinstance(payload, memoryview) and payload.format != "B":
            payload = payload.cast("B")
        if not 0 < len(payload) <= bytes_max:
            raise RequestTooLargeError(
                f"a batch of {len(payload)} bytes; {log} takes 1 to {bytes_max},"
                " send smaller batches"
            )
        earlier_append = self.find(
            batch.writer_id,
            sequence=batch.sequence,
            row_count=batch.row_count,
            continuity=batch.continuity,
        )
        return payload, earlier_append

    def add(
        self,
        batch: RoutedBatch,
        payload: Buffer,
        *,
        durable_offset: int,
        timestamp_us: int = 0,
    ) -> AppendResult:
        """Queue a batch unknown to `WriterStates.find`; stamped now without a time.

        `payload` is the batch's, as returned by `checked`.
        """
        assert 0 < batch.row_count <= _ROWS_MAX
        base_offset = self._next_offset
        end_offset = base_offset + batch.row_count
        writer_id = batch.writer_id
        timestamp_before = self._last_timestamp_us
        timestamp_us = self.stamp_us(timestamp_us)
        buffers = encode_frame(
            payload,
            base_offset=base_offset,
            row_count=batch.row_count,
            schema_id=batch.schema_id,
            timestamp_us=timestamp_us,
            writer_id=writer_id,
            sequence=batch.sequence,
            durable_offset=durable_offset,
        )
        window_before = None
        if writer_id:
            remembered = (batch.sequence, base_offset, end_offset, timestamp_us)
            window_before = self._writers.record(writer_id, remembered)
        size_bytes = frame_bytes(len(payload))
        frame = WrittenFrame(base_offset, end_offset, timestamp_us, size_bytes, buffers[0])
        self.queued.append(_Queued(buffers, frame, timestamp_before, writer_id, window_before))
        self._next_offset = end_offset
        return AppendResult(base_offset, end_offset, timestamp_us, False)

    def buffers(self) -> list[Buffer]:
        """Return the bytes of all queued frames, in order."""
        return [buffer for queued in self.queued for buffer in queued.buffers]

    def frames(self) -> list[WrittenFrame]:
        """Return the facts of all queued frames, in order."""
        return [queued.frame for queued in self.queued]

    def take_back(self, *, keep: int) -> None:
        """Undo the latest batches until `keep` are left."""
        while len(self.queued) > keep:
            queued = self.queued.pop()
            self._next_offset = queued.frame.base_offset
            self._last_timestamp_us = queued.timestamp_us_before
            if queued.writer_id:
                self._writers.put_back(queued.writer_id, queued.writer_window_before)
