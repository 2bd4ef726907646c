"""A bucket's log that another process or thread writes, for reads only.

The writer's side says what is published: the first readable offset and the high watermark. Only
bytes below the published end are believed. Bytes behind may be half written, and may be replaced.

The segments are opened as the published end passes them. Sealed segments have the index of their
writer. The growing segment, and a segment without a usable index, get an index from the headers of
their frames; so a follower reads each header once, and each row only when a read returns the row.

Any thread may read, and any thread may follow.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError, StorageFailedError, StreamhouseError
from streamhouse.storage_service.log.filesystem import Filesystem
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.log.segments._segment_chain import SegmentChain
from streamhouse.storage_service.log.segments._segment_files import SegmentFiles
from streamhouse.storage_service.log.segments.segment import FollowedSegment, Segment
from streamhouse.storage_service.log.segments.segment_format import (
    IndexHeader,
    LogIdentity,
    MalformedError,
)
from streamhouse.storage_service.log.segments.segment_index import GrowingIndex

__all__ = ["FollowedLog"]

_logger = logging.getLogger(__name__)

_INDEX_INTERVAL_BYTES: Final = 4096
# Between two looks whether the segment is sealed by now, which saves the rest of its frames.
_FRAMES_IN_A_ROW: Final = 1_000
_FRAMES_AT_ONCE: Final = 100
_ALL_FRAMES: Final = 1 << 62
_NO_END: Final = 1 << 62
# Retention may remove the oldest segment between the list of names and its first read.
_OPEN_ATTEMPTS: Final = 5


class FollowedLog(ReadableLog):
    """See the module."""

    def __init__(
        self,
        directory: Path,
        *,
        table_id: int,
        bucket: int,
        filesystem: Filesystem,
        start_offset: int,
        high_watermark: int,
    ) -> None:
        """Open the log as published. Blocking.

        Raises `CorruptDataError` for missing or damaged segments, and `StorageFailedError`.
        """
        identity = LogIdentity(table_id, bucket)
        self._files: Final = SegmentFiles(directory, identity=identity, filesystem=filesystem)
        # Held by whoever changes the segments.
        self._lock: Final = threading.Lock()
        try:
            chain = self._opened(start_offset, high_watermark)
        except OSError as error:
            raise StorageFailedError(f"cannot open the log of {identity}: {error}") from error
        super().__init__(identity, chain, start_offset=start_offset, high_watermark=high_watermark)

    def publish(self, start_offset: int, high_watermark: int) -> None:
        """Take what the writer's side has published; neither ever goes back."""
        self._truncated_offset = start_offset
        self.high_watermark = high_watermark
        if self._chain.segments[0].end_offset <= start_offset and self._lock.acquire(
            blocking=False
        ):
            # A removed file takes space on the disk while it is mapped here.
            try:
                self._chain.leave_below(start_offset)
            finally:
                self._lock.release()

    def follow(self, *, frames_max: int = _ALL_FRAMES) -> bool:
        """Look at new frames below the published end; return whether none is left to look at.

        Ends after about `frames_max` frames, so that a caller may go on elsewhere. Reads follow
        by themselves. Raises `CorruptDataError` and `StorageFailedError`.
        """
        try:
            return self._follow(frames_max)
        except OSError as error:
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error

    def grow(self) -> int:
        """Look at all whole frames in the files, and return the offset after the last of them.

        Only for files in which every whole frame may be read, as those of a standby. Frames behind
        damage are looked at once their segment is sealed: until then damage looks like a frame that
        is not whole. Raises `CorruptDataError` for damaged segment headers, and
        `StorageFailedError`.
        """
        try:
            with self._lock:
                while self._grow_some():
                    pass
                return self._end
        except OSError as error:
            raise StorageFailedError(f"cannot read the log of {self}: {error}") from error

    def _grow_some(self) -> bool:
        """Cover some more frames, or open the next segment; return whether there was any."""
        growing = self._chain.segments[-1]
        assert isinstance(growing, FollowedSegment)
        try:
            if growing.extend(_NO_END, frames_max=_FRAMES_IN_A_ROW):
                return True
        except FileNotFoundError:
            self._open_again(_NO_END)
            return True
        except CorruptDataError as error:
            _logger.debug("event=log_ends_early log=%s why=%r", self, str(error))
        return self._roll(growing, _NO_END)

    def is_at_hand(self, end: int) -> bool:
        """See `ReadableLog.is_at_hand`; looks at a few frames, as long as a small read takes."""
        if self._end >= end:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._follow_holding(_FRAMES_AT_ONCE)
        except (OSError, StreamhouseError):
            # The read meets the error again.
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close all cached files; idempotent. Batches that were read stay valid."""
        self._chain.let_go()

    @property
    def _end(self) -> int:
        """The first offset that the segments do not cover yet."""
        return self._chain.segments[-1].end_offset

    def _reached(self, offset: int, end: int) -> int:
        """See `ReadableLog`."""
        oldest = self._chain.segments[0]
        if self._end >= end and oldest.end_offset > self._truncated_offset:
            return end
        try:
            self._follow(_ALL_FRAMES)
        except CorruptDataError:
            # Good frames before the damage can be read.
            if offset >= self._end:
                raise
        return min(end, self._end)

    def _follow(self, frames_max: int) -> bool:
        with self._lock:
            return self._follow_holding(frames_max)

    def _follow_holding(self, frames_max: int) -> bool:
        end = self.high_watermark
        self._chain.leave_below(self._truncated_offset)
        while self._end < end:
            if frames_max <= 0:
                return False
            try:
                frames_max -= self._follow_some(end, min(frames_max, _FRAMES_IN_A_ROW))
            except FileNotFoundError:
                self._open_again(end)
        return True

    def _open_again(self, end: int) -> None:
        """Open the log after the removal of a segment, whose rows are not readable any more."""
        self._chain.let_go()
        self._chain = self._opened(self._truncated_offset, end)

    def _follow_some(self, end: int, frames_max: int) -> int:
        """Cover some more frames below `end`, or open the next segment; return the frames."""
        growing = self._chain.segments[-1]
        assert isinstance(growing, FollowedSegment)
        count = growing.extend(end, frames_max=frames_max)
        if growing.end_offset < end and not self._roll(growing, end) and not count:
            raise CorruptDataError(
                f"{growing.path} ends at offset {growing.end_offset}, but rows below {end} are"
                " published"
            )
        return count

    def _roll(self, growing: FollowedSegment, end: int) -> bool:
        """Open the successor of the last segment if it is needed; whether it was."""
        facts = self._index_facts(growing.base_offset)
        sealed: Segment = growing
        if facts is not None and facts.end_offset >= growing.end_offset:
            sealed = self._files.sealed(facts, base_fingerprint=growing.base_fingerprint)
        following = sealed.end_offset
        if not growing.base_offset < following <= end:
            return False
        try:
            successor = self._growing(following)
        except FileNotFoundError:
            # An index without a successor is left of a roll that failed.
            return False
        self._chain.roll(sealed, successor)
        return True

    def _opened(self, start: int, end: int) -> SegmentChain:
        """Open the segments with the rows of [start, end]."""
        for attempt in range(_OPEN_ATTEMPTS):
            try:
                return self._opened_now(start, end)
            except FileNotFoundError:
                if attempt == _OPEN_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _opened_now(self, start: int, end: int) -> SegmentChain:
        files = self._files
        bases = [base for base in files.bases() if base <= end]
        if not bases:
            raise StorageFailedError(f"the log of {files.identity} has no rows at offset {end}")
        bases = bases[max(bisect_right(bases, start) - 1, 0) :]
        sealed = [self._sealed(base, following) for base, following in pairwise(bases)]
        return SegmentChain(
            (*sealed, self._growing(bases[-1])),
            directory=files.directory,
            filesystem=files.filesystem,
        )

    def _sealed(self, base: int, following: int) -> Segment:
        """Return the segment between two base offsets."""
        facts = self._index_facts(base)
        if facts is not None and facts.end_offset == following:
            return self._files.sealed(facts, base_fingerprint=self._files.header(base).fingerprint)
        walked = self._growing(base)
        while walked.end_offset < following:
            if not walked.extend(following, frames_max=_ALL_FRAMES):
                raise CorruptDataError(
                    f"{walked.path} ends at offset {walked.end_offset}, but the next segment"
                    f" begins at {following}"
                )
        return walked

    def _index_facts(self, base: int) -> IndexHeader | None:
        """Return the facts of a segment's index; None without an index that fits the segment.

        A segment that is not sealed yet has none. A damaged index costs speed, never data.
        """
        try:
            facts = self._files.index_facts(base)
            size_bytes = self._files.filesystem.size_bytes(self._files.path(base))
        except (FileNotFoundError, MalformedError):
            return None
        return facts if facts.segment_bytes == size_bytes else None

    def _growing(self, base: int) -> FollowedSegment:
        """Return the segment at `base`, without frames yet."""
        header = self._files.header(base)
        return FollowedSegment(
            path=self._files.path(base),
            base_offset=base,
            base_fingerprint=header.fingerprint,
            created_timestamp_us=header.created_timestamp_us,
            filesystem=self._files.filesystem,
            index=GrowingIndex(interval_bytes=_INDEX_INTERVAL_BYTES),
        )
