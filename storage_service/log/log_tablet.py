"""One bucket's log: segments in offset order, the last segment active.

Invariants:
- log_start_offset <= high_watermark <= log_end_offset; every row below log_end_offset is durable
- offsets are dense; a row's offset is assigned once and never changes
- frame timestamps never decrease, even if the clock does
- sealed segments are durable and whole before the next segment exists

Appending (`append`, `take_back`, `write`, `sync`, `rollback`, `flush`) belongs to one thread, the
committer. `publish` belongs to the owner of visibility. All else may run on any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamhouse.core.errors import StorageFailedError, UnknownOutcomeError
from streamhouse.core.model.records.record_sequence import Continuity
from streamhouse.storage_service.log._recovery import LogRecovery, RecoveredLog
from streamhouse.storage_service.log.append_queue import (
    AppendQueue,
    AppendResult,
    RoutedBatch,
)
from streamhouse.storage_service.log.filesystem import Filesystem
from streamhouse.storage_service.log.readable_log import ReadableLog
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


class LogTablet(ReadableLog):
    """See the module. To store rows: `append` some batches, `flush`, `publish`."""

    def __init__(
        self,
        recovered: RecoveredLog,
        *,
        roll: SegmentRoll,
        queue: AppendQueue,
        options: LogOptions,
    ) -> None:
        active = recovered.active
        chain = SegmentChain(
            (*recovered.sealed, active), directory=roll.directory, filesystem=roll.filesystem
        )
        super().__init__(roll.identity, chain, start_offset=0, high_watermark=active.end_offset)
        self._roll_segment = roll
        self._options = options
        self._active = active
        self._writers = recovered.writers
        self._mark = recovered.mark
        self._queue = queue
        self.log_end_offset = active.end_offset
        """The first offset not durable yet; set by the committer."""
        self.is_read_only = False
        """Whether a failed sync forbids appends until the service restarts."""
        self._read_only_reason = ""
        self._closed = False
        # Held while changing segments or writer state; never by readers.
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
        """Recover the log in `directory`, or create a log; all its rows are durable and visible.

        `end_offset_min` is an offset known as durable, such as the tiered offset: a shorter log has
        lost acknowledged rows. With `must_exist` the log was open before, and all its files must
        exist. Raises CorruptDataError for damaged or missing rows or files (the log stays
        unchanged), and StorageFailedError when the disk fails.
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

    @property
    def forgotten_offset(self) -> int:
        """Rows below this offset may be missing from both the log and the lake."""
        return self._mark.facts.forgotten_offset

    def extent(self, offset: int) -> Extent:
        """Return an upper bound of the batch with `offset`, plus some small batches before.

        A read has one batch at least, for any limit of bytes. Reads no row.
        """
        try:
            return self._chain.extent(offset)
        except OSError as error:
            raise StorageFailedError(f"cannot read offset {offset} of {self}: {error}") from error

    def durable_files(self) -> list[tuple[Path, int]]:
        """Return the segments' files with the number of durable, immutable bytes.

        Retention may remove the oldest files meanwhile.
        """
        return [(segment.path, segment.size_bytes) for segment in self._chain.segments]

    @property
    def segment_count(self) -> int:
        """The number of segment files; at least one."""
        return len(self._chain.segments)

    @property
    def queued_count(self) -> int:
        """The number of batches appended since the last flush."""
        return len(self._queue.queued)

    def append(self, batch: RoutedBatch) -> AppendResult:
        """Queue one batch and return its offsets, durable after the next `flush`.

        The payload must not change until the flush. A batch without a time is stamped now; no
        batch is stamped earlier than the previous batch. With a writer, a repeated sequence returns
        its first offsets without a second append, and a sequence out of order raises
        OutOfOrderSequenceError. A result ending above `log_end_offset`, also of a duplicate,
        depends on the next flush.
        """
        queue, options = self._queue, self._options
        timestamp_us = batch.timestamp_us
        with self._lock:
            payload, earlier_append = queue.checked(
                batch, bytes_max=options.frame_bytes_max, log=self
            )
            if earlier_append is not None:
                return earlier_append
            if self._closed or self.is_read_only:
                self._check_writable()
            if (
                not queue.queued
                and self._active.size_bytes + len(payload) > options.segment_bytes_max
                and self._may_roll()
            ):
                self._roll(created_timestamp_us=queue.stamp_us(timestamp_us))
            return queue.add(
                batch, payload, durable_offset=self.log_end_offset, timestamp_us=timestamp_us
            )

    def now_us(self) -> int:
        """Return the timestamp of a batch appended now."""
        with self._lock:
            return self._queue.now_us()

    def find_batch(
        self, writer_id: int, *, sequence: int, continuity: Continuity = Continuity.EXACT
    ) -> AppendResult | None:
        """Return the batch repeated by `sequence`; otherwise as `WriterStates.find`.

        Only for a writer without batches in flight. Does not wait for a sync.
        """
        # A writer's state is replaced as a whole, and only by its own batches.
        return self._queue.find(writer_id, sequence=sequence, continuity=continuity)

    def last_sequence(self, writer_id: int, *, since: int) -> int:
        """Return the sequence of a writer's latest batch, 0 for a batch below offset `since`.

        Only for a writer without batches in flight, as `find_batch`.
        """
        return self._writers.last_sequence(writer_id, since=since)

    def last_batch_us(self, writer_id: int) -> int:
        """Return the time of a writer's latest batch, 0 for a forgotten writer."""
        return self._writers.last_timestamp_us(writer_id)

    def change_segment_bytes_max(self, segment_bytes_max: int) -> None:
        """Change the size of new segments, from the next append on."""
        self._options = replace(self._options, segment_bytes_max=segment_bytes_max)

    def take_back(self, *, keep: int) -> None:
        """Forget the latest appends until `keep` are queued; before `write` only."""
        with self._lock:
            assert self._active.unsynced_count == 0
            self._queue.take_back(keep=keep)

    def write(self) -> None:
        """Pass queued batches to the operating system. Raises StorageFailedError after `rollback`.

        Nothing is durable or visible before `sync`.
        """
        with self._lock:
            if not self._queue.queued:
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
        """Make the results of `write` or `rollback` durable, then advance `log_end_offset`.

        Raises UnknownOutcomeError if the disk fails: the rows may reappear after the next start.
        Until the restart the log is read-only, because a later sync could not prove the rows
        durable either.
        """
        with self._lock:
            if not self._active.needs_sync:
                return
            if self._closed:
                raise UnknownOutcomeError(f"{self} was closed while rows were being stored")
            assert self._active.unsynced_count == len(self._queue.queued)
            try:
                self._active.sync()
            except OSError as error:
                self._make_read_only(f"sync failed: {error}")
                self.rollback()
                raise UnknownOutcomeError(
                    f"the disk failed to sync {self}: {error}; the rows may or may not be stored,"
                    " repeat the append with the same writer id and sequence after a restart"
                ) from error
            self._queue.queued.clear()
            self.log_end_offset = self._active.end_offset
            self._mark.advance(self.log_end_offset)

    def rollback(self) -> None:
        """Remove batches written since the last sync, durably at the next sync; or go read-only."""
        with self._lock:
            self._queue.take_back(keep=0)
            try:
                self._active.rollback()
            except OSError as error:
                self._make_read_only(f"truncating failed: {error}")

    def flush(self) -> None:
        """Make all appended batches durable: one write, one sync, with the errors of both."""
        try:
            self.write()
        finally:
            # After a failed write this makes the truncation durable: refused rows never come back.
            self.sync()

    def publish(self, end_offset: int | None = None) -> None:
        """Show rows below `end_offset` to readers; without it, all durable rows."""
        end = self.log_end_offset if end_offset is None else end_offset
        assert end <= self.log_end_offset
        self.high_watermark = max(self.high_watermark, end)

    def truncate(self, offset: int) -> None:
        """Hide rows below `offset` from readers; the rows stay stored until retention."""
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
            self.is_read_only = True

    def _may_roll(self) -> bool:
        # A pending truncation must become durable before the segment is sealed.
        return not self._active.is_empty and not self._active.needs_sync

    def _roll(self, *, created_timestamp_us: int) -> None:
        """Seal the active segment and create its successor, not after its first batch's time."""
        assert not self._queue.queued
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

    def expired_offset(self, *, timestamp_us_before: int, offset_max: int) -> int:
        """Return where the log begins after `apply_retention` with these arguments."""
        with self._retention_lock, self._lock:
            return self._expired_offset(timestamp_us_before, offset_max)

    def _expired_offset(self, timestamp_us_before: int, offset_max: int) -> int:
        if self._closed:
            raise StorageFailedError(f"{self} is closed")
        self._roll_if_older(timestamp_us_before)
        return self._chain.expired_offset(
            timestamp_us_before=timestamp_us_before,
            offset_max=min(offset_max, self.high_watermark),
        )

    def apply_retention(
        self, *, timestamp_us_before: int, offset_max: int, tiered_offset: int = 0
    ) -> int:
        """Delete the oldest, older segments ending at or below `offset_max`; return their number.

        Rows below `tiered_offset` are in the lake. The new start is durable before a deletion. An
        active segment with an equally old first batch is sealed first, so that rows of a quiet log
        expire, too, within twice the age. Readers keep their batches of a deleted segment. Raises
        StorageFailedError when the disk refuses; the next call continues.
        """
        with self._retention_lock:
            with self._lock:
                self._chain.expire_below(self._expired_offset(timestamp_us_before, offset_max))
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
        if self._queue.queued or active.needs_sync or active.is_empty or self._read_only_reason:
            return
        if active.first_timestamp_us < timestamp_us:
            # The next batch may belong to a decided transaction, with an earlier time.
            self._roll(created_timestamp_us=self._queue.last_timestamp_us)

    def close(self) -> None:
        """Release the files, once; a running flush fails, readers' views stay valid."""
        with self._retention_lock, self._lock:
            if self._closed:
                return
            self._closed = True
            self._active.close()
            self._mark.close()
            self._chain.let_go()
