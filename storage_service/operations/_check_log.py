"""Checking one bucket's log: every checksum, offset and row, whatever the index files say."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo
from streamhouse.storage_service.log.durable_mark import MARK_NAME, DurableMark
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.segments.segment_format import (
    INDEX_START_BYTES,
    LogIdentity,
    MalformedError,
    index_path,
    offsets_of,
    segment_path,
    writers_path,
)
from streamhouse.storage_service.log.segments.segment_index import decode_index, read_index_header
from streamhouse.storage_service.log.segments.segment_scan import (
    ScanResult,
    SegmentFile,
    SegmentFrame,
    durable_offset_after,
    open_segment,
    scan_frames,
)
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER, decode_writers
from streamhouse.storage_service.operations.findings import BucketFacts, CheckReport

__all__ = ["CheckedLog", "check_log"]

_NOT_ACKNOWLEDGED: Final = "never acknowledged; the next start cuts them off"


class CheckedLog:
    """The segments that could be opened, for further checks of their rows."""

    def __init__(self, segments: list[SegmentFile], info: TableInfo) -> None:
        self._segments = segments
        self._info = info

    def batches(self, end_offset: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (base offset, rows) of every frame below `end_offset` that is whole.

        Rows are in the current version of the schema.
        """
        for segment in self._segments:
            for frame in segment.frames():
                if frame.base_offset >= end_offset or not frame.is_checksum_right:
                    return
                yield frame.base_offset, _decoded(frame, self._info)

    def fingerprints(self, offsets: Collection[int]) -> dict[int, str]:
        """Return the log's fingerprints at `offsets`, of those where it is known."""
        found: dict[int, str] = {}
        for segment in self._segments:
            for offset, fingerprint in segment.fingerprints(offsets).items():
                found[offset] = fingerprint.hex()
        return found


def check_log(
    directory: Path,
    info: TableInfo,
    facts: BucketFacts,
    report: CheckReport,
    *,
    end_min: int,
    is_former: bool = False,
    progress: Progress = NO_PROGRESS,
) -> CheckedLog:
    """Check the log in `directory`, filling `facts`; `end_min` is an end known to be durable.

    One of a former release may lack files that are made now. Progress counts bytes of segments.
    """
    where = f"table '{info.path}', bucket {facts.bucket}"
    identity = LogIdentity(info.table_id, facts.bucket)
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    bases = offsets_of(names, ".log")
    if not bases:
        report.error(where, f"{directory} has no segment files")
        return CheckedLog([], info)
    facts.log_start_offset = facts.log_end_offset = bases[0]
    facts.segments = len(bases)
    mark = _check_beside(directory, identity, bases, facts, report, is_former=is_former)
    opened: list[SegmentFile] = []
    fingerprint: bytes | None = None
    for number, base in enumerate(bases):
        path = segment_path(directory, base)
        if base != facts.log_end_offset:
            before = f"the one before ends at {facts.log_end_offset}"
            report.error(where, f"{path.name} starts at {base}, {before}")
        try:
            segment = open_segment(path, identity=identity)
        except StreamhouseError as error:
            report.error(where, error.message)
            facts.log_end_offset = bases[number + 1] if base != bases[-1] else base
            fingerprint = None
            continue
        if fingerprint not in (None, segment.header.fingerprint):
            report.error(
                where,
                f"the log of {path.name} has other rows below offset {base} than the segment before"
                " it: one of the two files is from another copy of this directory",
            )
        opened.append(segment)
        found = scan_frames(
            segment.view,
            base_offset=base,
            timestamp_us=segment.header.created_timestamp_us,
            index=None,
            writers=None,
            fingerprint=segment.header.fingerprint,
        )
        fingerprint = None if found.problem else found.fingerprint
        facts.log_end_offset = found.end_offset
        facts.log_bytes += len(segment.view)
        _check_rows(segment, info, facts, report, where=where, end_offset=found.end_offset)
        progress.done(len(segment.view))
        if base != bases[-1]:
            _check_sealed(segment, found, identity, report, where=where)
        elif found.problem:
            _check_tail(segment, found, report, where=where, known_end=max(mark, end_min))
    if max(mark, end_min) > facts.log_end_offset:
        report.error(
            where,
            f"the log ends at offset {facts.log_end_offset}, but rows below {max(mark, end_min)}"
            " were durable",
        )
    return CheckedLog(opened, info)


def _check_beside(
    directory: Path,
    identity: LogIdentity,
    bases: list[int],
    facts: BucketFacts,
    report: CheckReport,
    *,
    is_former: bool,
) -> int:
    """Check what lies beside the segments; return the end that the mark vouches for."""
    where = f"{directory.parent.name}/{directory.name}"
    found = DurableMark.read(directory, identity=identity, filesystem=LocalFilesystem())
    if is_former:
        facts.forgotten_offset = bases[0]
        return 0 if found is None else found.durable_offset
    if found is None:
        report.error(where, f"{MARK_NAME} is missing or damaged")
        return 0
    facts.forgotten_offset = found.forgotten_offset
    if bases[0] > found.start_offset:
        report.error(
            where,
            f"the log begins at {bases[0]}, but retention has deleted rows below"
            f" {found.start_offset} only: segment files are missing",
        )
    if bases[0] and not any(_is_writers(directory, identity, base) for base in bases):
        report.error(where, f"{writers_path(directory, bases[-1]).name} is missing or damaged")
    return found.durable_offset


def _is_writers(directory: Path, identity: LogIdentity, offset: int) -> bool:
    path = writers_path(directory, offset)
    try:
        data = path.read_bytes()
        decode_writers(data, identity=identity, offset=offset, window=5, writers_max=1 << 30)
    except (OSError, MalformedError):
        return False
    return True


def _check_rows(
    segment: SegmentFile,
    info: TableInfo,
    facts: BucketFacts,
    report: CheckReport,
    *,
    where: str,
    end_offset: int,
) -> None:
    """Decode every frame: a checksum only says that the bytes are those that came."""
    for frame in segment.frames():
        if frame.base_offset >= end_offset:
            return
        facts.frames += 1
        facts.rows += frame.row_count
        if frame.writer_id == TRANSACTION_WRITER:
            facts.transaction_us = frame.timestamp_us
        try:
            batch = _decoded(frame, info)
            batch.validate(full=True)
            problem = "" if batch.num_rows == frame.row_count else f"has {batch.num_rows} rows"
        except (StreamhouseError, pa.ArrowException) as error:
            problem = f"is unreadable: {error}"
        if problem:
            report.error(
                where,
                f"{segment.path.name}: the batch of {frame.row_count} rows at offset"
                f" {frame.base_offset} {problem}",
            )


def _check_sealed(
    segment: SegmentFile,
    found: ScanResult,
    identity: LogIdentity,
    report: CheckReport,
    *,
    where: str,
) -> None:
    if found.problem:
        report.error(
            where,
            f"{segment.path.name} is damaged at byte {found.end_position}, offset"
            f" {found.end_offset}: {found.problem}",
        )
    base = segment.header.base_offset
    path = index_path(segment.path.parent, base)
    try:
        data = memoryview(path.read_bytes())
        header = read_index_header(data[:INDEX_START_BYTES], identity=identity, base_offset=base)
        decode_index(data, header=header, check=True)
        is_right = (header.end_offset, header.segment_bytes, header.end_fingerprint) == (
            found.end_offset,
            len(segment.view),
            found.fingerprint,
        )
        problem = "" if is_right else "does not fit its segment"
    except (OSError, MalformedError) as error:
        problem = str(error)
    if problem:
        report.warning(where, f"index {path.name}: {problem}; the next start makes it again")


def _check_tail(
    segment: SegmentFile, found: ScanResult, report: CheckReport, *, where: str, known_end: int
) -> None:
    """Judge the bytes behind the last whole frame as recovery does."""
    later = durable_offset_after(segment.view, found.end_position, offset_min=found.end_offset)
    left = len(segment.view) - found.end_position
    if max(later, known_end) > found.end_offset:
        report.error(
            where,
            f"{segment.path.name} is damaged at byte {found.end_position}, offset"
            f" {found.end_offset}: {found.problem}; rows from there on were acknowledged",
        )
    else:
        report.warning(
            where,
            f"{segment.path.name} has {left} bytes behind offset {found.end_offset}"
            f" ({found.problem}), {_NOT_ACKNOWLEDGED}",
        )


def _decoded(frame: SegmentFrame, info: TableInfo) -> pa.RecordBatch:
    return read_stored(frame.payload, info, stored_as=frame.schema_id)
