"""Opening a log directory: whole frames are kept, unacknowledged bytes are truncated.

The rule for the bytes behind the chain of whole frames in the active segment (offset E):

- A later whole frame, the durable mark or the caller proves rows at or after E durable:
  acknowledged rows are damaged. CorruptDataError, and nothing on disk is changed.
- Without a proof the bytes come from an unacknowledged write, and are truncated.

A sealed segment must be whole, because the segment was durable before its successor was created.
Its index is trusted if consistent with the file; otherwise the segment is scanned and the index
rewritten. Each segment must begin with the final fingerprint of the previous segment: a different
fingerprint means another copy of the log. A log written by an earlier release gets a new segment,
where its fingerprints begin.

Every step can be interrupted and repeated.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from streamhouse.core.errors import CorruptDataError
from streamhouse.storage_service.log.durable_mark import LOSS_ACCEPTED_NAME, MARK_NAME, DurableMark
from streamhouse.storage_service.log.filesystem import Filesystem, replace_durably
from streamhouse.storage_service.log.segments._segment_files import SegmentFiles, corrupt_segment
from streamhouse.storage_service.log.segments.segment import ActiveSegment, SealedSegment
from streamhouse.storage_service.log.segments.segment_format import (
    LogIdentity,
    MalformedError,
    MarkFacts,
    SegmentHeader,
    index_path,
    offsets_of,
    segment_path,
    writers_path,
)
from streamhouse.storage_service.log.segments.segment_index import (
    GrowingIndex,
    encode_index,
)
from streamhouse.storage_service.log.segments.segment_roll import (
    RollFailedError,
    SegmentRoll,
    create_segment,
)
from streamhouse.storage_service.log.segments.segment_scan import (
    ScanResult,
    durable_offset_after,
    scan_frames,
)
from streamhouse.storage_service.log.writer_state import (
    WriterStates,
    decode_writers,
    encode_writers,
)

__all__ = ["LogRecovery", "RecoveredLog"]

_logger = logging.getLogger(__name__)

_ACCEPTANCE: Final = (
    f"restore the bucket's directory from a copy, or make an empty file {LOSS_ACCEPTED_NAME} in it"
    " to go on with what is there"
)
# A larger snapshot is not Streamhouse's.
_SNAPSHOT_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLog:
    """A log open for appending; all its rows are durable."""

    sealed: tuple[SealedSegment, ...]
    active: ActiveSegment
    writers: WriterStates
    mark: DurableMark


class LogRecovery:
    """One opening of one log directory; `run` is called once."""

    def __init__(
        self,
        directory: Path,
        *,
        identity: LogIdentity,
        filesystem: Filesystem,
        index_interval_bytes: int,
        writer_window: int,
        writers_max: int,
        must_exist: bool = False,
    ) -> None:
        self._must_exist = must_exist
        self._facts: MarkFacts | None = None
        self._directory = directory
        self._identity = identity
        self._filesystem = filesystem
        self._files = SegmentFiles(directory, identity=identity, filesystem=filesystem)
        self._index_interval_bytes = index_interval_bytes
        self._writer_window = writer_window
        self._writers_max = writers_max

    def run(self, *, end_offset_min: int, now_us: int) -> RecoveredLog:
        """Recover the log, or create a log. Raises CorruptDataError or OSError.

        `end_offset_min` is an offset known as durable by the caller, such as a tiered offset.
        """
        if not self._must_exist:
            self._filesystem.make_directory(self._directory)
        names = self._filesystem.list_names(self._directory)
        for name in names:
            if name.endswith(".tmp"):
                self._filesystem.remove(self._directory / name)
        self._read_mark(names)
        known_end = max(end_offset_min, 0 if self._facts is None else self._facts.durable_offset)
        bases = offsets_of(names, ".log")
        if not bases:
            return self._create(known_end=known_end, now_us=now_us)
        self._check_start(bases[0])
        headers = [self._files.header(base) for base in bases]
        sealed = tuple(self._open_sealed(*neighbours) for neighbours in pairwise(headers))
        writers = self._restore_writers(sealed, names, active_base=bases[-1])
        active = self._open_active(headers[-1], writers, known_end=known_end)
        self._remove_orphans(names, bases)
        if active.base_fingerprint is None:
            sealed, active = self._begin_fingerprints(sealed, active, writers)
        return self._recovered(sealed, active, writers)

    def _new_writers(self) -> WriterStates:
        return WriterStates(window=self._writer_window, writers_max=self._writers_max)

    def _recovered(
        self, sealed: tuple[SealedSegment, ...], active: ActiveSegment, writers: WriterStates
    ) -> RecoveredLog:
        first = sealed[0].base_offset if sealed else active.base_offset
        # For a log from elsewhere the reason of its first offset is unknown.
        facts = MarkFacts(0, first, first) if not self._must_exist else self._facts
        assert facts is not None, "it was looked for"
        mark = DurableMark(
            self._directory,
            facts._replace(durable_offset=active.end_offset),
            identity=self._identity,
            filesystem=self._filesystem,
        )
        self._filesystem.sync_directory(self._directory)
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.remove(self._directory / LOSS_ACCEPTED_NAME)
        return RecoveredLog(sealed=sealed, active=active, writers=writers, mark=mark)

    def _read_mark(self, names: list[str]) -> None:
        """Read the mark; a missing but required mark is damage."""
        if LOSS_ACCEPTED_NAME in names:
            _logger.warning("event=missing_accepted path=%s", self._directory)
            self._must_exist = False
            return
        self._facts = DurableMark.read(
            self._directory, identity=self._identity, filesystem=self._filesystem
        )
        if not self._must_exist or self._facts is not None:
            return
        problem = "is missing or damaged" if names else "and all segment files are missing"
        raise CorruptDataError(
            f"{self._directory / MARK_NAME} {problem}: the log's rows before the loss are unknown;"
            f" {_ACCEPTANCE}"
        )

    def _check_start(self, first: int) -> None:
        if self._must_exist and self._facts is not None and first > self._facts.start_offset:
            raise CorruptDataError(
                f"{self._directory}: the log begins at offset {first}, but retention has deleted"
                f" rows below {self._facts.start_offset} only: segment files are missing, or"
                f" {MARK_NAME} is an old version; {_ACCEPTANCE}"
            )

    def _create(self, *, known_end: int, now_us: int) -> RecoveredLog:
        if known_end or self._must_exist:
            raise CorruptDataError(
                f"{self._directory} has no segment files, but {self._identity} reached offset"
                f" {known_end}; {_ACCEPTANCE}"
            )
        active = create_segment(
            self._directory,
            SegmentHeader(base_offset=0, created_timestamp_us=now_us),
            identity=self._identity,
            filesystem=self._filesystem,
            index_interval_bytes=self._index_interval_bytes,
        )
        return self._recovered((), active, self._new_writers())

    def _whole(self, path: Path) -> memoryview:
        # A shared older map may be longer than the file is now.
        size = self._filesystem.size_bytes(path)
        return self._filesystem.map(path, size)[:size]

    def _open_sealed(self, header: SegmentHeader, following: SegmentHeader) -> SealedSegment:
        base, end = header.base_offset, following.base_offset
        path = segment_path(self._directory, base)
        index = index_path(self._directory, base)
        if header.fingerprint is not None and following.fingerprint is None:
            raise corrupt_segment(
                segment_path(self._directory, end), 0, "an older format than the segment before it"
            )
        try:
            facts = self._files.index_facts(base)
            fits = (facts.end_offset, facts.segment_bytes) == (
                end,
                self._filesystem.size_bytes(path),
            )
            if not fits:
                raise MalformedError(f"index ends at offset {facts.end_offset}, segment at {end}")
            if header.fingerprint is not None and facts.end_fingerprint != following.fingerprint:
                raise MalformedError("index ends with another fingerprint than the next segment's")
        except (FileNotFoundError, MalformedError) as error:
            _logger.warning("event=index_rebuilt path=%s reason=%r", index, str(error))
            self._rebuild_index(header, following)
            facts = self._files.index_facts(base)
        return self._files.sealed(facts, base_fingerprint=header.fingerprint)

    def _indexed(
        self, path: Path, header: SegmentHeader, writers: WriterStates | None = None
    ) -> tuple[memoryview, GrowingIndex, ScanResult]:
        """Scan a segment into a new index."""
        index = GrowingIndex(interval_bytes=self._index_interval_bytes)
        view = self._whole(path)
        scan = scan_frames(
            view,
            base_offset=header.base_offset,
            timestamp_us=header.created_timestamp_us,
            index=index,
            writers=writers,
            fingerprint=header.fingerprint,
        )
        return view, index, scan

    def _rebuild_index(self, header: SegmentHeader, following: SegmentHeader) -> None:
        base, end = header.base_offset, following.base_offset
        path = segment_path(self._directory, base)
        index, scan = self._indexed(path, header)[1:]
        if scan.problem or scan.end_offset != end:
            problem = scan.problem or f"the file ends at offset {scan.end_offset}"
            raise corrupt_segment(
                path, scan.end_position, f"{problem}; the next segment starts at {end}"
            )
        if scan.fingerprint not in (None, following.fingerprint):
            raise corrupt_segment(
                segment_path(self._directory, end),
                0,
                f"its log has other rows below offset {end} than {path.name}: one of the two files"
                " is from another copy of this directory",
            )
        contents = encode_index(
            index,
            identity=self._identity,
            base_offset=base,
            end_offset=end,
            segment_bytes=scan.end_position,
            last_timestamp_us=scan.last_timestamp_us,
            end_fingerprint=scan.fingerprint,
        )
        replace_durably(self._filesystem, index_path(self._directory, base), contents)

    def _restore_writers(
        self, sealed: tuple[SealedSegment, ...], names: list[str], *, active_base: int
    ) -> WriterStates:
        """Return the writers before the active segment: newest snapshot, later batches."""
        writers, at_offset = self._new_writers(), 0
        for offset in reversed(offsets_of(names, ".writers")):
            path = writers_path(self._directory, offset)
            try:
                writers = decode_writers(
                    self._filesystem.read(path, bytes_max=_SNAPSHOT_BYTES_MAX),
                    identity=self._identity,
                    offset=offset,
                    window=self._writer_window,
                    writers_max=self._writers_max,
                )
            except MalformedError as error:
                _logger.warning("event=writer_snapshot_ignored path=%s reason=%r", path, str(error))
                continue
            if offset in (active_base, *(segment.base_offset for segment in sealed)):
                at_offset = offset
                break
            writers = self._new_writers()
        first = sealed[0].base_offset if sealed else active_base
        is_whole = at_offset > 0 or first == 0
        if not is_whole and self._must_exist:
            raise CorruptDataError(
                f"{writers_path(self._directory, active_base)} is missing or damaged: which appends"
                f" of idempotent writers were stored is not known any more; {_ACCEPTANCE}"
            )
        for segment in sealed:
            if segment.base_offset >= at_offset:
                self._replay_writers(segment, writers)
        if not is_whole:
            # From now on the snapshot must exist.
            snapshot = encode_writers(writers, identity=self._identity, offset=active_base)
            path = writers_path(self._directory, active_base)
            replace_durably(self._filesystem, path, [snapshot])
        return writers

    def _replay_writers(self, segment: SealedSegment, writers: WriterStates) -> None:
        _logger.warning("event=writer_state_replayed path=%s", segment.path)
        scan = scan_frames(
            self._whole(segment.path),
            base_offset=segment.base_offset,
            timestamp_us=self._files.header(segment.base_offset).created_timestamp_us,
            index=None,
            writers=writers,
        )
        if scan.problem or scan.end_offset != segment.end_offset:
            raise corrupt_segment(
                segment.path, scan.end_position, scan.problem or "frames are missing"
            )

    def _open_active(
        self, header: SegmentHeader, writers: WriterStates, *, known_end: int
    ) -> ActiveSegment:
        base = header.base_offset
        path = segment_path(self._directory, base)
        view, index, scan = self._indexed(path, header, writers)
        if scan.problem:
            proven = durable_offset_after(view, scan.end_position, offset_min=scan.end_offset)
            known_end = max(known_end, proven)
        if scan.end_offset < known_end:
            raise corrupt_segment(
                path,
                scan.end_position,
                f"{scan.problem or 'the file ends'} at offset {scan.end_offset},"
                f" but rows below {known_end} were durable",
            )
        if scan.problem:
            _logger.warning(
                "event=torn_tail_cut_off path=%s position=%d bytes=%d end_offset=%d reason=%r",
                path,
                scan.end_position,
                len(view) - scan.end_position,
                scan.end_offset,
                scan.problem,
            )
        file = self._filesystem.open(path)
        try:
            if scan.problem:
                file.truncate(scan.end_position)
            # Frames of a killed process may be in the page cache only, so sync before reads.
            file.sync()
        except OSError:
            file.close()
            raise
        active = ActiveSegment(
            path=path,
            base_offset=base,
            base_fingerprint=header.fingerprint,
            created_timestamp_us=header.created_timestamp_us,
            filesystem=self._filesystem,
            file=file,
            index=index,
        )
        active.restore(
            end_offset=scan.end_offset,
            size_bytes=scan.end_position,
            last_timestamp_us=scan.last_timestamp_us,
            end_fingerprint=scan.fingerprint,
        )
        return active

    def _begin_fingerprints(
        self, sealed: tuple[SealedSegment, ...], active: ActiveSegment, writers: WriterStates
    ) -> tuple[tuple[SealedSegment, ...], ActiveSegment]:
        """Append a segment in this release's format to the segments of an earlier release.

        Existing frames get no fingerprints: fingerprints begin at the log's end. If the disk
        refuses the segment, fingerprints begin with the next segment.
        """
        if active.is_empty:
            # Replaced, because two segments cannot have the same base offset.
            header = SegmentHeader(active.base_offset, active.last_timestamp_us)
            successor = create_segment(
                self._directory,
                header,
                identity=self._identity,
                filesystem=self._filesystem,
                index_interval_bytes=self._index_interval_bytes,
            )
        else:
            roll = SegmentRoll(
                self._directory,
                identity=self._identity,
                filesystem=self._filesystem,
                index_interval_bytes=self._index_interval_bytes,
            )
            try:
                last, successor = roll.run(active, writers, timestamp_us=active.last_timestamp_us)
            except RollFailedError as error:
                if error.is_half_done:
                    raise
                _logger.warning("event=no_fingerprints_yet path=%s why=%r", active.path, str(error))
                return sealed, active
            sealed = (*sealed, last)
        active.close()
        return sealed, successor

    def _remove_orphans(self, names: list[str], bases: list[int]) -> None:
        """Remove leftovers of an interrupted roll or retention."""
        for offset in offsets_of(names, ".index"):
            if offset not in bases[:-1]:
                self._filesystem.remove(index_path(self._directory, offset))
        for offset in offsets_of(names, ".writers"):
            if offset not in bases:
                self._filesystem.remove(writers_path(self._directory, offset))
