"""Ending one segment and beginning the next, so that a crash at any step loses nothing.

Order: the index of the full segment, the writer state after its last frame, durable names, and only
then the new segment. Until the new segment has its name, the old segment stays active, and files
written for the new one are ignored or replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from streamhouse.storage_service.log.filesystem import (
    Buffer,
    Filesystem,
    replace_durably,
    replace_in_order,
)
from streamhouse.storage_service.log.segments.segment import ActiveSegment, SealedSegment
from streamhouse.storage_service.log.segments.segment_format import (
    LogIdentity,
    SegmentHeader,
    encode_segment_header,
    first_fingerprint,
    index_path,
    offsets_of,
    segment_path,
    writers_path,
)
from streamhouse.storage_service.log.segments.segment_index import (
    GrowingIndex,
    encode_index,
    read_index_header,
)
from streamhouse.storage_service.log.writer_state import WriterStates, encode_writers

__all__ = ["RollFailedError", "SegmentRoll", "begin_log", "create_segment"]

_logger = logging.getLogger(__name__)

# Recovery needs the newest; the previous snapshot saves a replay if the newest is damaged.
_SNAPSHOTS_KEPT: Final = 2


class RollFailedError(OSError):
    """The disk refused a step. `is_half_done`: the new segment may exist after a restart."""

    def __init__(self, message: str, *, is_half_done: bool) -> None:
        super().__init__(message)
        self.is_half_done = is_half_done


def create_segment(
    directory: Path,
    header: SegmentHeader,
    *,
    identity: LogIdentity,
    filesystem: Filesystem,
    index_interval_bytes: int,
) -> ActiveSegment:
    """Create an empty segment, durable on return.

    The segment gets its name only once its header is durable, so a `.log` file without a whole
    header is damage and never a crash in this function.
    """
    path, header = segment_path(directory, header.base_offset), _begun(header, identity)
    replace_durably(filesystem, path, [encode_segment_header(header, identity=identity)])
    filesystem.sync_directory(directory)
    return _opened(path, header, filesystem, index_interval_bytes)


def _begun(header: SegmentHeader, identity: LogIdentity) -> SegmentHeader:
    # Without a fingerprint of earlier frames, the log's fingerprints begin here.
    fingerprint = header.fingerprint or first_fingerprint(identity, header.base_offset)
    return header._replace(fingerprint=fingerprint)


def _opened(
    path: Path, header: SegmentHeader, filesystem: Filesystem, index_interval_bytes: int
) -> ActiveSegment:
    """Return a segment just created."""
    assert header.fingerprint is not None
    return ActiveSegment(
        path=path,
        base_offset=header.base_offset,
        base_fingerprint=header.fingerprint,
        created_timestamp_us=header.created_timestamp_us,
        filesystem=filesystem,
        file=filesystem.open(path),
        index=GrowingIndex(interval_bytes=index_interval_bytes),
    )


def begin_log(
    directory: Path,
    *,
    first_offset: int,
    identity: LogIdentity,
    filesystem: Filesystem,
    now_us: int,
) -> None:
    """Create an empty log beginning at `first_offset`, for `LogTablet.open`; durable on return.

    Otherwise a log begins at 0. Raises `OSError`.
    """
    filesystem.make_directory(directory)
    create_segment(
        directory,
        SegmentHeader(base_offset=first_offset, created_timestamp_us=now_us),
        identity=identity,
        filesystem=filesystem,
        # Nothing is indexed here.
        index_interval_bytes=1,
    ).close()


class SegmentRoll:
    """Rolls the segments of one log."""

    def __init__(
        self,
        directory: Path,
        *,
        identity: LogIdentity,
        filesystem: Filesystem,
        index_interval_bytes: int,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.filesystem = filesystem
        self._index_interval_bytes = index_interval_bytes

    def run(
        self, active: ActiveSegment, writers: WriterStates, *, timestamp_us: int
    ) -> tuple[SealedSegment, ActiveSegment]:
        """Seal `active`, durable and not empty, and create its successor.

        `writers` is the state after the last frame. Raises RollFailedError.
        """
        assert not active.is_empty
        assert not active.needs_sync
        sealed_index = self._index_of(active)
        index = index_path(self.directory, active.base_offset)
        following = segment_path(self.directory, active.end_offset)
        header = _begun(
            SegmentHeader(active.end_offset, timestamp_us, active.end_fingerprint), self.identity
        )
        snapshot = encode_writers(writers, identity=self.identity, offset=active.end_offset)
        files: list[tuple[Path, Sequence[Buffer]]] = [
            (index, sealed_index),
            (writers_path(self.directory, active.end_offset), [snapshot]),
            (following, [encode_segment_header(header, identity=self.identity)]),
        ]
        try:
            # With a journal this waits for the store once, because this is the commit thread.
            replace_in_order(self.filesystem, files)
            self.filesystem.sync_directory(self.directory)
            successor = _opened(following, header, self.filesystem, self._index_interval_bytes)
        except OSError as error:
            half_done = self._may_exist(following)
            raise RollFailedError(str(error), is_half_done=half_done) from error
        self._remove_old_snapshots()
        facts = read_index_header(
            sealed_index[0], identity=self.identity, base_offset=active.base_offset
        )
        sealed = SealedSegment(
            path=active.path,
            index_path=index,
            facts=facts,
            base_fingerprint=active.base_fingerprint,
            filesystem=self.filesystem,
        )
        return sealed, successor

    def _index_of(self, active: ActiveSegment) -> list[Buffer]:
        return encode_index(
            active.growing_index,
            identity=self.identity,
            base_offset=active.base_offset,
            end_offset=active.end_offset,
            segment_bytes=active.size_bytes,
            last_timestamp_us=active.last_timestamp_us,
            end_fingerprint=active.end_fingerprint,
        )

    def _may_exist(self, path: Path) -> bool:
        try:
            return path.name in self.filesystem.list_names(self.directory)
        except OSError:
            return True

    def _remove_old_snapshots(self) -> None:
        try:
            names = self.filesystem.list_names(self.directory)
            for offset in offsets_of(names, ".writers")[:-_SNAPSHOTS_KEPT]:
                self.filesystem.remove(writers_path(self.directory, offset))
        except OSError as error:
            # Only space is lost; the next roll or start tries again.
            _logger.warning(
                "event=old_snapshot_kept directory=%s why=%r", self.directory, str(error)
            )
