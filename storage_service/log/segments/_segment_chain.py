"""The segments of one log in offset order: reading across them, and dropping the oldest.

The tuple of segments is replaced as a whole, so readers need no lock; the log tablet replaces the
tuple under its lock. The files of dropped segments are removed oldest first.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Filesystem
from streamhouse.storage_service.log.segments.segment import Extent, Segment, StoredBatch
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    LogIdentity,
    MalformedError,
    decode_segment_header,
    index_path,
)

__all__ = ["SegmentChain"]


class SegmentChain:
    """At least one segment; the last is active, all before are sealed and not empty."""

    def __init__(
        self, segments: tuple[Segment, ...], *, directory: Path, filesystem: Filesystem
    ) -> None:
        assert segments
        self.segments = segments
        self._directory = directory
        self._filesystem = filesystem
        # Segments dropped from the log, with files not removed yet; oldest first.
        self._expired: list[Segment] = []

    def roll(self, sealed: Segment, active: Segment) -> None:
        """Replace the last segment by its sealed form and its successor."""
        assert sealed.end_offset == active.base_offset
        self.segments = (*self.segments[:-1], sealed, active)

    def read(self, offset: int, *, offset_max: int, bytes_max: int) -> list[StoredBatch]:
        """Return the batches of [offset, offset_max) up to `bytes_max`, at least one if any.

        Raises CorruptDataError or OSError if not even the first can be read.
        """
        segments = self.segments
        batches: list[StoredBatch] = []
        bytes_left = bytes_max
        first = max(0, bisect_right(segments, offset, key=_base_offset) - 1)
        for segment in segments[first:]:
            if offset >= offset_max or (batches and bytes_left <= 0):
                break
            try:
                frames = segment.read(
                    offset=offset,
                    offset_max=offset_max,
                    bytes_max=bytes_left,
                    at_least_one=not batches,
                )
            except (CorruptDataError, OSError):
                if batches:
                    break
                raise
            batches += frames
            bytes_left -= sum(len(batch.payload) for batch in frames)
            if not frames or frames[-1].end_offset < segment.end_offset:
                break
            offset = segment.end_offset
        return batches

    def extent(self, offset: int) -> Extent:
        """See `Segment.extent`; raises OSError."""
        segments = self.segments
        number = max(0, bisect_right(segments, offset, key=_base_offset) - 1)
        segment = segments[number]
        return (
            Extent(0, 0) if segment.is_empty else segment.extent(max(offset, segment.base_offset))
        )

    def offset_for_timestamp(self, timestamp_us: int, *, offset_max: int) -> int | None:
        """Return the first batch's offset with at least this timestamp, below `offset_max`."""
        for segment in self.segments:
            if segment.is_empty or segment.last_timestamp_us < timestamp_us:
                continue
            try:
                return segment.offset_for_timestamp(timestamp_us, offset_max=offset_max)
            except OSError:
                if segment in self.segments:
                    raise
                # Removed by retention meanwhile: the next segment is now the first.
        return None

    def created_us(self, identity: LogIdentity) -> int:
        """Return the time in the first segment's header; all removed rows are older or equal.

        Raises CorruptDataError and OSError.
        """
        path = self.segments[0].path
        view = self._filesystem.map(path, FILE_HEADER_BYTES)
        try:
            header = decode_segment_header(view[:FILE_HEADER_BYTES], identity=identity)
        except MalformedError as error:
            raise CorruptDataError(f"{path} at byte 0: {error}") from error
        return header.created_timestamp_us

    def fingerprint(self, offset: int) -> bytes | None:
        """Return the fingerprint at an offset, None if unknown; raises as `read`."""
        segments = self.segments
        number = bisect_right(segments, offset, key=_base_offset) - 1
        if number < 0 or offset > segments[number].end_offset:
            return None
        return segments[number].fingerprint(offset)

    def expired_offset(self, *, timestamp_us_before: int, offset_max: int) -> int:
        """Return where the log begins without its oldest sealed segments.

        Those are older, and not beyond `offset_max`.
        """
        offset = self.segments[0].base_offset
        for segment in self.segments[:-1]:
            if segment.last_timestamp_us >= timestamp_us_before or segment.end_offset > offset_max:
                break
            offset = segment.end_offset
        return offset

    def expire_below(self, offset: int) -> None:
        """Drop the segments that end at or below `offset`, the last one excepted."""
        first = self._first_with(offset)
        self._expired += self.segments[:first]
        self.segments = self.segments[first:]

    def leave_below(self, offset: int) -> None:
        """Forget the segments without rows from `offset` on; their files are others' to remove."""
        first = self._first_with(offset)
        if first:
            self.segments = self.segments[first:]
            self.let_go()

    def _first_with(self, offset: int) -> int:
        """Return the place of the first segment that has rows from `offset` on, or of the last."""
        first = 0
        while first < len(self.segments) - 1 and self.segments[first].end_offset <= offset:
            first += 1
        return first

    def remove_expired(self) -> int:
        """Remove the files of dropped segments and count the segments; raises OSError.

        Each removal is durable before the next begins, so a crash never leaves a gap. After an
        error the next call continues with the same segment.
        """
        removed = 0
        while self._expired:
            segment = self._expired[0]
            names = set(self._filesystem.list_names(self._directory))
            for path in (segment.path, index_path(self._directory, segment.base_offset)):
                if path.name in names:
                    self._filesystem.remove(path)
            self._filesystem.sync_directory(self._directory)
            del self._expired[0]
            removed += 1
        return removed

    def let_go(self) -> None:
        """Close all cached files: an open, removed file still takes space on the disk.

        Readers' views stay valid, and each file is released with its last reader.
        """
        self._filesystem.forget(self._directory)


def _base_offset(segment: Segment) -> int:
    return segment.base_offset
