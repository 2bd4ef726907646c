"""The reading side of one bucket's log: the rows of its segments, up to the high watermark.

`log_tablet.py` has the log of its owner, `followed_log.py` a log that others write.

Invariants:
- log_start_offset <= high_watermark
- every batch returned had its checksum verified by the same read

Any thread may read.
"""

from __future__ import annotations

import logging

from streamhouse.core.errors import CorruptDataError, OffsetOutOfRangeError, StorageFailedError
from streamhouse.storage_service.log.segments._segment_chain import SegmentChain
from streamhouse.storage_service.log.segments.segment import StoredBatch
from streamhouse.storage_service.log.segments.segment_format import LogIdentity

__all__ = ["ReadableLog"]

_logger = logging.getLogger(__name__)


class ReadableLog:
    """See the module."""

    def __init__(
        self, identity: LogIdentity, chain: SegmentChain, *, start_offset: int, high_watermark: int
    ) -> None:
        self._identity = identity
        self._chain = chain
        self._truncated_offset = start_offset
        self.high_watermark = high_watermark
        """The first offset hidden from readers; set by the owner of visibility."""

    def __str__(self) -> str:
        return str(self._identity)

    @property
    def log_start_offset(self) -> int:
        """The first readable offset."""
        return max(self._truncated_offset, self._chain.segments[0].base_offset)

    @property
    def first_stored_offset(self) -> int:
        """The first offset in the log's files."""
        return self._chain.segments[0].base_offset

    @property
    def size_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.size_bytes for segment in self._chain.segments)

    def bytes_estimate(self, row_count: int) -> int:
        """Return the approximate number of bytes of `row_count` rows."""
        rows = self._chain.segments[-1].end_offset - self.log_start_offset
        return self.size_bytes * row_count // max(rows, 1)

    def is_at_hand(self, end: int) -> bool:  # noqa: ARG002
        """Whether a read up to `end` has nothing to look at before, and can be made at once."""
        return True

    def read(
        self, offset: int, *, bytes_max: int, end_offset: int | None = None
    ) -> list[StoredBatch]:
        """Return whole batches from the batch with `offset` on, each checksum verified.

        Up to `bytes_max` bytes of payload but at least one batch; no batch beginning at
        `end_offset` or later, or past the high watermark; nothing at the high watermark itself.
        Raises OffsetOutOfRangeError, and CorruptDataError once a read begins at a damaged batch.
        """
        # The watermark is read before the segments: later reads of the segments include its rows.
        high_watermark = self.high_watermark
        self._check_in_range(offset, high_watermark)
        offset_max = high_watermark if end_offset is None else min(end_offset, high_watermark)
        try:
            offset_max = self._reached(offset, offset_max)
            return self._chain.read(offset, offset_max=offset_max, bytes_max=bytes_max)
        except (CorruptDataError, OSError) as error:
            # Retention may have removed the file since the range was checked.
            self._check_in_range(offset, high_watermark)
            if isinstance(error, OSError):
                raise StorageFailedError(
                    f"cannot read offset {offset} of {self}: {error}"
                ) from error
            raise

    def _reached(self, offset: int, end: int) -> int:  # noqa: ARG002
        """Return how far the segments reach for a read of [offset, end), or raise as the read."""
        return end

    def _check_in_range(self, offset: int, high_watermark: int) -> None:
        start = self.log_start_offset
        if not start <= offset <= high_watermark:
            raise OffsetOutOfRangeError(
                f"offset {offset} of {self} is outside the stored range [{start}, {high_watermark}]"
            )

    def offset_for_timestamp(self, timestamp_us: int) -> int:
        """Return the first offset with at least this timestamp; else the high watermark."""
        high_watermark = self.high_watermark
        if self.log_start_offset == high_watermark:
            return high_watermark
        try:
            self._reached(high_watermark, high_watermark)
            offset = self._chain.offset_for_timestamp(timestamp_us, offset_max=high_watermark)
        except OSError as error:
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error
        return high_watermark if offset is None else max(offset, self._truncated_offset)

    def removed_until_us(self) -> int:
        """Return an upper bound of the write times of rows below `first_stored_offset`."""
        try:
            return self._chain.created_us(self._identity)
        except OSError as error:
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error

    def fingerprint(self, offset: int) -> bytes | None:
        """Return the fingerprint at a durable offset (`segment_format.py`); None if unknown.

        Unknown are: offsets below the log's first segment or above its end, offsets written by an
        earlier release, and offsets behind a damaged frame header among the headers read. Not for
        the event loop.
        """
        try:
            self._reached(offset, offset)
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
