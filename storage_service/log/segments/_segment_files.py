"""The segment files of one log: their names, their headers, and the sealed segments among them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.filesystem import Filesystem
from streamhouse.storage_service.log.segments.segment import SealedSegment
from streamhouse.storage_service.log.segments.segment_format import (
    FILE_HEADER_BYTES,
    INDEX_START_BYTES,
    IndexHeader,
    LogIdentity,
    MalformedError,
    SegmentHeader,
    decode_segment_header,
    index_path,
    offsets_of,
    segment_path,
)
from streamhouse.storage_service.log.segments.segment_index import read_index_header

__all__ = ["SegmentFiles", "corrupt_segment"]


class SegmentFiles:
    """See the module. All methods may raise `OSError`."""

    def __init__(self, directory: Path, *, identity: LogIdentity, filesystem: Filesystem) -> None:
        self.directory: Final = directory
        self.identity: Final = identity
        self.filesystem: Final = filesystem

    def bases(self) -> list[int]:
        """Return the base offsets of the segments, in order."""
        return offsets_of(self.filesystem.list_names(self.directory), ".log")

    def path(self, base: int) -> Path:
        """Return the file of a segment."""
        return segment_path(self.directory, base)

    def header(self, base: int) -> SegmentHeader:
        """Return a segment's header; raises `CorruptDataError`."""
        path = self.path(base)
        data = self.filesystem.read(path, bytes_max=FILE_HEADER_BYTES)
        try:
            header = decode_segment_header(data, identity=self.identity)
        except MalformedError as error:
            raise corrupt_segment(path, 0, str(error)) from error
        if header.base_offset != base:
            raise corrupt_segment(path, 0, f"the header says base offset {header.base_offset}")
        return header

    def index_facts(self, base: int) -> IndexHeader:
        """Return the facts in the index file of a sealed segment; raises `MalformedError`."""
        path = index_path(self.directory, base)
        data = self.filesystem.read(path, bytes_max=INDEX_START_BYTES)
        return read_index_header(data, identity=self.identity, base_offset=base)

    def sealed(self, facts: IndexHeader, *, base_fingerprint: bytes | None) -> SealedSegment:
        """Return a sealed segment with the facts of its index."""
        return SealedSegment(
            path=self.path(facts.base_offset),
            index_path=index_path(self.directory, facts.base_offset),
            facts=facts,
            base_fingerprint=base_fingerprint,
            filesystem=self.filesystem,
        )


def corrupt_segment(path: Path, position: int, problem: str) -> CorruptDataError:
    """Return the error of a segment that cannot be opened."""
    return CorruptDataError(
        f"{path} at byte {position}: {problem}; restore the file from a copy"
        " (docs/storage_format.md says how to accept the loss)"
    )
