"""One bucket's log: segments in offset order, the last of them active.

Invariants:
- log_start_offset <= high_watermark <= log_end_offset; every row below log_end_offset is durable
- offsets are dense; an offset is given to a row once and never changes
- frame timestamps never decrease, whatever the clock does
- sealed segments are durable and whole before the next segment exists

Appending (`append`, `take_back`, `write`, `sync`, `rollback`, `flush`) belongs to one thread, the
committer. `publish` belongs to whoever makes rows visible. The rest may run on any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamhouse.core.errors import (
    CorruptDataError,
    OffsetOutOfRangeError,
    StorageFailedError,
    UnknownOutcomeError,
)
from streamhouse.core.model.records.record_sequence import Continuity
from streamhouse.storage_service.log._recovery import LogRecovery, RecoveredLog
from streamhouse.storage_service.log.append_queue import (
    AppendQueue,
    AppendResult,
    RoutedBatch,
    checked_payload,
)
from streamhouse.storage_service.log.filesystem import Filesystem
from streamhouse.storage_service.log.segments._segment_chain import SegmentChain
from streamhouse.storage_service.log.segments.segment import Extent, StoredBatch
from streamhouse.storage_service.log.segments.segment_format import PAYLOAD_BYTES_LIMIT, LogIdentity
from streamhouse.storage_service.log.segments.segment_roll import RollFailedError, SegmentRoll

__all__ = ["AppendResult", "Extent", "LogOptions", "LogTablet", "StoredBatch"]

_logger = logging.getLogger(__name__)

_MIB: Final = 1024 * 1024
_DAY_US: Final = 24 * 60 * 60 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Limits of one log. Changing them never makes stored data unreadable."""

    # A segment exceeds this by one commit group at most.
    segment_bytes_max: int = 128 * _MIB
    index_interval_bytes: int = 4096
    # Payload of one frame.
    frame_bytes_max: int = 64 * _MIB
    # Batches remembered per idempotent writer, and writers: the longest idle is forgotten first.
    writer_window: int = 5
    writers_max: int = 20_000
    writer_expiry_us: int = 7 * _DAY_US

    def __post_init__(self) -> None:
        if not 0 < self.frame_bytes_max <= PAYLOAD_BYTES_LIMIT:
            raise ValueError(f"frame_bytes_max is {self.frame_bytes_max}, not in (0, 1 GiB]")
        for name in ("segment_bytes_max", "index_interval_bytes", "writer_window", "writers_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, not positive")


class LogTablet:
    """See the module. To store: `append` some batches, `flush`, `publish`."""

    def __init__(
        self,
        recovered: RecoveredLog,
        *,
        roll: SegmentRoll,
        queue: AppendQueue,
        options: LogOptions,
    ) -> None:
        self._roll_segment = roll
        self._identity = roll.identity
        self._options = options
        self._active = recovered.active
        self._chain = SegmentChain(
            (*recovered.sealed, recovered.active),
            directory=roll.directory,
            filesystem=roll.filesystem,
        )
        self._writers = recovered.writers
        self._mark = recovered.mark
        self._queue = queue
        self._high_watermark = recovered.active.end_offset
        self._read_only_reason = ""
        self._closed = False
        self._truncated_offset = 0
        # Held by everything that changes segments or writer state; never by readers.
        self._lock = threading.RLock()
        self._retention_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        table_id: int,
        bucket: int,
        filesystem: Filesystem,
        options: LogOptions,
        clock_us: Callable[[], int],
        end_offset_min: int = 0,
        must_exist: bool = False,
    ) -> LogTablet:
        """Recover the log in `directory`, or create it; all its rows are durable and visible.

        `end_offset_min` is an end that is known to have been durable, such as the tiered offset:
        a log that ends before it has lost acknowledged rows. With `must_exist` the log was open
        before, and files that it had then are missing if they are not there. Raises
        CorruptDataError when rows or such files are damaged or missing (the log stays as it is),
        StorageFailedError when the disk fails.
        """
        identity = LogIdentity(table_id, bucket)
        recovery = LogRecovery(
            directory,
            identity=identity,
            filesystem=filesystem,
            index_interval_bytes=options.index_interval_bytes,
            writer_window=options.writer_window,
            writers_max=options.writers_max,
            must_exist=must_exist,
        )
        try:
            recovered = recovery.run(end_offset_min=end_offset_min, now_us=clock_us())
        except OSError as error:
            raise StorageFailedError(f"cannot open the log of {identity}: {error}") from error
        roll = SegmentRoll(
            directory,
            identity=identity,
            filesystem=filesystem,
            index_interval_bytes=options.index_interval_bytes,
        )
        queue = AppendQueue(
            writers=recovered.writers,
            next_offset=recovered.active.end_offset,
            last_timestamp_us=recovered.active.last_timestamp_us,
            clock_us=clock_us,
        )
        return cls(recovered, roll=roll, queue=queue, options=options)

    def __str__(self) -> str:
        return str(self._identity)

    @property
    def log_start_offset(self) -> int:
        """The first offset that readers may ask for."""
        return max(self._truncated_offset, self._chain.segments[0].base_offset)

    @property
    def first_stored_offset(self) -> int:
        """The first offset in the log's files."""
        return self._chain.segments[0].base_offset

    @property
    def forgotten_offset(self) -> int:
        """Rows below it may be neither in the log nor in the lake."""
        return self._mark.facts.forgotten_offset

    @property
    def log_end_offset(self) -> int:
        """The first offset that is not durable yet."""
        return self._active.end_offset

    @property
    def high_watermark(self) -> int:
        """The first offset that readers may not see yet."""
        return self._high_watermark

    @property
    def size_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.size_bytes for segment in self._chain.segments)

    def bytes_estimate(self, row_count: int) -> int:
        """Return about how many bytes so many of the rows take."""
        rows = self.log_end_offset - self.log_start_offset
        return self.size_bytes * row_count // max(rows, 1)

    def extent(self, offset: int) -> Extent:
        """Return what the batch that holds `offset` has at most, with some small ones before it.

        However few bytes a read is to have, it is of one batch at least. Reads no row.
        """
        try:
            return self._chain.extent(offset)
        except OSError as error:
            raise StorageFailedError(f"cannot read offset {offset} of {self}: {error}") from error

    def durable_files(self) -> list[tuple[Path, int]]:
        """Return the segments' files, and of each how many bytes are durable: these stay.

        Retention may remove the oldest of them meanwhile.
        """
        return [(segment.path, segment.size_bytes) for segment in self._chain.segments]

    @property
    def segment_count(self) -> int:
        """How many segment files the log has; at least one."""
        return len(self._chain.segments)

    @property
    def queued_count(self) -> int:
        """How many batches were appended since the last flush."""
        return len(self._queue)

    @property
    def is_read_only(self) -> bool:
        """Whether a failed sync made it unsafe to append until the service restarts."""
        return bool(self._read_only_reason)

    def append(self, batch: RoutedBatch, *, now_us: int = 0) -> AppendResult:
        """Queue one batch and say where it will be once `flush` has made it durable.

        The payload must not change until then. A batch without a time is stamped `now_us`, or now,
        but never earlier than the batch before it. With a writer, a repeated sequence is answered
        with its first offsets and not queued, and one out of order raises OutOfOrderSequenceError.
        A result that ends above `log_end_offset`, a duplicate's too, depends on the next flush.
        """
        payload = checked_payload(batch.payload, bytes_max=self._options.frame_bytes_max, log=self)
        timestamp_us = batch.timestamp_us or now_us
        with self._lock:
            if earlier_append := self._queue.find(
                batch.writer_id,
                sequence=batch.sequence,
                row_count=batch.row_count,
                continuity=batch.continuity,
            ):
                return earlier_append
            self._check_writable()
            if not self._queue and self._is_full(len(payload)):
                self._roll(created_timestamp_us=self._queue.stamp_us(timestamp_us))
            return self._queue.add(
                batch,
                payload,
                durable_offset=self._active.end_offset,
                timestamp_us=timestamp_us,
            )

    def now_us(self) -> int:
        """Return the time that a batch appended now would be stamped."""
        with self._lock:
            return self._queue.now_us()

    def find_batch(
        self, writer_id: int, *, sequence: int, continuity: Continuity = Continuity.EXACT
    ) -> AppendResult | None:
        """Return where the batch is that `sequence` repeats; else as `WriterStates.find`.

        For a writer none of whose batches is on its way. It waits for no sync.
        """
        # What is known of a writer is replaced as a whole, and only by its own batches.
        return self._queue.find(writer_id, sequence=sequence, continuity=continuity)

    def last_sequence(self, writer_id: int, *, since: int) -> int:
        """Return the sequence of a writer's latest batch, 0 if that begins below offset `since`.

        For who knows that none of its batches is on its way, as `find_batch`.
        """
        return self._writers.last_sequence(writer_id, since=since)

    def last_batch_us(self, writer_id: int) -> int:
        """Return the time of a writer's latest batch, 0 if it is not remembered."""
        return self._writers.last_timestamp_us(writer_id)

    def change_segment_bytes_max(self, segment_bytes_max: int) -> None:
        """Start new segments at another size, from the next append on."""
        self._options = replace(self._options, segment_bytes_max=segment_bytes_max)

    def take_back(self, *, keep: int) -> None:
        """Forget the latest appends until `keep` are queued; before `write` only."""
        with self._lock:
            assert self._active.unsynced_count == 0
            self._queue.take_back(keep=keep)

    def write(self) -> None:
        """Hand what is queued to the operating system. Raises StorageFailedError after `rollback`.

        Nothing is durable or visible before `sync`.
        """
        with self._lock:
            if not self._queue:
                return
            if self._closed:
                self._queue.take_back(keep=0)
                raise StorageFailedError(f"{self} was closed; nothing was stored")
            try:
                self._active.write(self._queue.buffers(), self._queue.frames())
            except OSError as error:
                self.rollback()
                raise StorageFailedError(
                    f"the disk refused a write to {self}: {error}; nothing was stored"
                ) from error

    def sync(self) -> None:
        """Make what `write` or `rollback` did durable; then `log_end_offset` moves.

        Raises UnknownOutcomeError when the disk cannot say what it kept: the rows may come back at
        the next start. The log is read-only until then, because a later sync could not tell either.
        """
        with self._lock:
            if not self._active.needs_sync:
                return
            if self._closed:
                raise UnknownOutcomeError(f"{self} was closed while rows were being stored")
            assert self._active.unsynced_count == len(self._queue)
            try:
                self._active.sync()
            except OSError as error:
                self._make_read_only(f"sync failed: {error}")
                self.rollback()
                raise UnknownOutcomeError(
                    f"the disk failed to sync {self}: {error}; the rows may or may not be stored,"
                    " repeat the append with the same writer id and sequence after a restart"
                ) from error
            self._queue.clear()
            self._mark.advance(self._active.end_offset)

    def rollback(self) -> None:
        """Take back what was appended since the last sync, durably at the next; or go read-only."""
        with self._lock:
            self._queue.take_back(keep=0)
            try:
                self._active.rollback()
            except OSError as error:
                self._make_read_only(f"truncating failed: {error}")

    def flush(self) -> None:
        """Make everything appended durable: one write, one sync, each raising as it does alone."""
        try:
            self.write()
        finally:
            # After a failed write this makes the truncation durable: refused rows never come back.
            self.sync()

    def publish(self, end_offset: int | None = None) -> None:
        """Let readers see rows below `end_offset`; without it, all durable rows."""
        durable = self._active.end_offset
        end = durable if end_offset is None else end_offset
        assert end <= durable
        self._high_watermark = max(self._high_watermark, end)

    def truncate(self, offset: int) -> None:
        """Let nobody read rows below `offset` any more; they stay stored until retention."""
        self._truncated_offset = max(self._truncated_offset, offset)

    def _check_writable(self) -> None:
        if self._closed:
            raise StorageFailedError(f"{self} is closed")
        if reason := self._read_only_reason:
            raise StorageFailedError(f"{self} is read-only, {reason}; check the disk and restart")

    def _make_read_only(self, reason: str) -> None:
        if not self._read_only_reason:
            _logger.error("event=bucket_read_only log=%s reason=%r", self, str(reason))
            self._read_only_reason = reason

    def _is_full(self, payload_bytes: int) -> bool:
        active = self._active
        # A truncation that is not durable yet must be so before the segment is sealed.
        return (
            not active.is_empty
            and not active.needs_sync
            and active.size_bytes + payload_bytes > self._options.segment_bytes_max
        )

    def _roll(self, *, created_timestamp_us: int) -> None:
        """Seal the active segment and begin a new one, not after its first batch's time."""
        assert not self._queue
        assert not self._active.needs_sync
        self._writers.expire(self._queue.now_us() - self._options.writer_expiry_us)
        try:
            sealed, active = self._roll_segment.run(
                self._active, self._writers, timestamp_us=created_timestamp_us
            )
        except RollFailedError as error:
            if error.is_half_done:
                self._make_read_only(str(error))
            raise StorageFailedError(
                f"the disk refused a new segment of {self}: {error}; nothing was stored"
            ) from error
        self._chain.roll(sealed, active)
        self._active.close()
        self._active = active

    def read(
        self, offset: int, *, bytes_max: int, end_offset: int | None = None
    ) -> list[StoredBatch]:
        """Return whole batches from the one that holds `offset` on, each checksum verified.

        Up to `bytes_max` bytes of payload but at least one batch; none beginning at `end_offset` or
        later, none past the high watermark; none at all at the high watermark itself. Raises
        OffsetOutOfRangeError, and CorruptDataError once a read begins at a damaged batch.
        """
        # The watermark is read before the segments: its rows are in whatever is seen afterwards.
        high_watermark = self._high_watermark
        self._check_in_range(offset, high_watermark)
        offset_max = high_watermark if end_offset is None else min(end_offset, high_watermark)
        try:
            return self._chain.read(offset, offset_max=offset_max, bytes_max=bytes_max)
        except (CorruptDataError, OSError) as error:
            # Retention may have removed the file since the range was checked.
            self._check_in_range(offset, high_watermark)
            if isinstance(error, OSError):
                raise StorageFailedError(
                    f"cannot read offset {offset} of {self}: {error}"
                ) from error
            raise

    def _check_in_range(self, offset: int, high_watermark: int) -> None:
        start = self.log_start_offset
        if not start <= offset <= high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {offset} of {self} is outside the stored range [{start}, {high_watermark}]"
            )

    def offset_for_timestamp(self, timestamp_us: int) -> int:
        """Return the first offset of the first batch stamped so late; else the high watermark."""
        high_watermark = self._high_watermark
        try:
            offset = self._chain.offset_for_timestamp(timestamp_us, offset_max=high_watermark)
        except OSError as error:
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error
        return high_watermark if offset is None else max(offset, self._truncated_offset)

    def removed_until_us(self) -> int:
        """Return a time: every row below `first_stored_offset` was written then or before."""
        try:
            return self._chain.created_us(self._identity)
        except OSError as error:
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error

    def fingerprint(self, offset: int) -> bytes | None:
        """Return the fingerprint at a durable offset (`segment_format.py`); None if none is known.

        That is below the log's first segment, above its end, where an earlier release wrote, and
        behind a damaged frame header in the few that are read. Not for the event loop.
        """
        try:
            return self._chain.fingerprint(offset)
        except CorruptDataError as error:
            _logger.warning(
                "event=no_fingerprint log=%s offset=%d why=%r", self, offset, str(error)
            )
            return None
        except OSError as error:
            if offset < self._chain.segments[0].base_offset:
                # Removed by retention meanwhile.
                return None
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error

    def apply_retention(
        self, *, timestamp_us_before: int, offset_max: int, tiered_offset: int = 0
    ) -> int:
        """Delete the oldest segments that are older and end at or below `offset_max`; count them.

        Rows below `tiered_offset` are in the lake. How far the log is deleted is durable before.

        An active segment whose first batch is that old is sealed first, so that rows of a quiet log
        go too, within twice the age. Readers that hold batches of a deleted segment keep them.
        Raises StorageFailedError when the disk refuses; the next call goes on from there.
        """
        with self._retention_lock:
            with self._lock:
                if self._closed:
                    raise StorageFailedError(f"{self} is closed")
                self._roll_if_older(timestamp_us_before)
                self._chain.expire(
                    timestamp_us_before=timestamp_us_before,
                    offset_max=min(offset_max, self._high_watermark),
                )
            try:
                with self._lock:
                    start = self.first_stored_offset
                    forgotten = start if start > tiered_offset else 0
                    self._mark.begin_at(start, forgotten_offset=forgotten)
                return self._chain.remove_expired()
            except OSError as error:
                raise StorageFailedError(f"cannot remove a segment of {self}: {error}") from error

    def _roll_if_older(self, timestamp_us: int) -> None:
        active = self._active
        if self._queue or active.needs_sync or active.is_empty or self._read_only_reason:
            return
        if active.first_timestamp_us < timestamp_us:
            # The next batch may be of a transaction that is decided already, and has its time.
            self._roll(created_timestamp_us=self._queue.last_timestamp_us)

    def close(self) -> None:
        """Release the files, once; a flush under way fails, views that readers hold stay valid."""
        with self._retention_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            self._active.close()
            self._mark.close()
            self._chain.let_go()
