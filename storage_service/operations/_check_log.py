"""The check of one bucket's log: every checksum, offset and row, without trust in index files."""

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
    """The readable segments, for further checks of their rows."""

    def __init__(self, segments: list[SegmentFile], info: TableInfo) -> None:
        self._segments = segments
        self._info = info

    def batches(self, end_offset: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (base offset, rows) of every whole frame below `end_offset`.

        Rows are in the current version of the schema.
        """
        for segment in self._segments:
            for frame in segment.frames():
                if frame.base_offset >= end_offset or not frame.is_checksum_right:
                    return
                yield frame.base_offset, _decoded(frame, self._info)

    def fingerprints(self, offsets: Collection[int]) -> dict[int, str]:
        """Return offset -> fingerprint of the log, for the offsets with a known fingerprint."""
        hex_fingerprints: dict[int, str] = {}
        for segment in self._segments:
            for offset, fingerprint in segment.fingerprints(offsets).items():
                hex_fingerprints[offset] = fingerprint.hex()
        return hex_fingerprints


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
    """Check the log in `directory` and fill `facts`; `end_min` is an end known to be durable.

    A log of a former release may lack files that are made now. Progress counts bytes of segments.
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
    durable_end = _check_side_files(directory, identity, bases, facts, report, is_former=is_former)
    opened: list[SegmentFile] = []
    fingerprint: bytes | None = None
    for number, base in enumerate(bases):
        path = segment_path(directory, base)
        if base != facts.log_end_offset:
            previous_end = f"the one before ends at {facts.log_end_offset}"
            report.error(where, f"{path.name} starts at {base}, {previous_end}")
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
        scan = scan_frames(
            segment.view,
            base_offset=base,
            timestamp_us=segment.header.created_timestamp_us,
            index=None,
            writers=None,
            fingerprint=segment.header.fingerprint,
        )
        fingerprint = None if scan.problem else scan.fingerprint
        facts.log_end_offset = scan.end_offset
        facts.log_bytes += len(segment.view)
        _check_rows(segment, info, facts, report, where=where, end_offset=scan.end_offset)
        progress.done(len(segment.view))
        if base != bases[-1]:
            _check_sealed(segment, scan, identity, report, where=where)
        elif scan.problem:
            _check_tail(segment, scan, report, where=where, durable_end=max(durable_end, end_min))
    if max(durable_end, end_min) > facts.log_end_offset:
        report.error(
            where,
            f"the log ends at offset {facts.log_end_offset}, but rows below"
            f" {max(durable_end, end_min)} were durable",
        )
    return CheckedLog(opened, info)


def _check_side_files(
    directory: Path,
    identity: LogIdentity,
    bases: list[int],
    facts: BucketFacts,
    report: CheckReport,
    *,
    is_former: bool,
) -> int:
    """Check the files beside the segments; return the durable end in the mark."""
    where = f"{directory.parent.name}/{directory.name}"
    mark = DurableMark.read(directory, identity=identity, filesystem=LocalFilesystem())
    if is_former:
        facts.forgotten_offset = bases[0]
        return 0 if mark is None else mark.durable_offset
    if mark is None:
        report.error(where, f"{MARK_NAME} is missing or damaged")
        return 0
    facts.forgotten_offset = mark.forgotten_offset
    if bases[0] > mark.start_offset:
        report.error(
            where,
            f"the log begins at {bases[0]}, but retention has deleted rows below"
            f" {mark.start_offset} only: segment files are missing",
        )
    if bases[0] and not any(_is_writers(directory, identity, base) for base in bases):
        report.error(where, f"{writers_path(directory, bases[-1]).name} is missing or damaged")
    return mark.durable_offset


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
    """Decode every frame: a checksum only proves that the bytes are unchanged."""
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
    scan: ScanResult,
    identity: LogIdentity,
    report: CheckReport,
    *,
    where: str,
) -> None:
    if scan.problem:
        report.error(
            where,
            f"{segment.path.name} is damaged at byte {scan.end_position}, offset"
            f" {scan.end_offset}: {scan.problem}",
        )
    base = segment.header.base_offset
    path = index_path(segment.path.parent, base)
    try:
        data = memoryview(path.read_bytes())
        header = read_index_header(data[:INDEX_START_BYTES], identity=identity, base_offset=base)
        decode_index(data, header=header, check=True)
        is_right = (header.end_offset, header.segment_bytes, header.end_fingerprint) == (
            scan.end_offset,
            len(segment.view),
            scan.fingerprint,
        )
        problem = "" if is_right else "does not fit its segment"
    except (OSError, MalformedError) as error:
        problem = str(error)
    if problem:
        report.warning(where, f"index {path.name}: {problem}; the next start makes it again")


def _check_tail(
    segment: SegmentFile, scan: ScanResult, report: CheckReport, *, where: str, durable_end: int
) -> None:
    """Judge the bytes behind the last whole frame as recovery would."""
    later = durable_offset_after(segment.view, scan.end_position, offset_min=scan.end_offset)
    trailing_bytes = len(segment.view) - scan.end_position
    if max(later, durable_end) > scan.end_offset:
        report.error(
            where,
            f"{segment.path.name} is damaged at byte {scan.end_position}, offset"
            f" {scan.end_offset}: {scan.problem}; rows from there on were acknowledged",
        )
    else:
        report.warning(
            where,
            f"{segment.path.name} has {trailing_bytes} bytes behind offset {scan.end_offset}"
            f" ({scan.problem}), {_NOT_ACKNOWLEDGED}",
        )


def _decoded(frame: SegmentFrame, info: TableInfo) -> pa.RecordBatch:
    return read_stored(frame.payload, info, stored_as=frame.schema_id)
