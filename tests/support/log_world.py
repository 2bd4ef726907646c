"""A log to open, fill and read in few words, and what it must equal: a list of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import Filesystem
from streamhouse.storage_service.log.log_tablet import (
    AppendResult,
    LogOptions,
    LogTablet,
    StoredBatch,
)

DIRECTORY = Path("/tables/7/bucket-0")


class SettableClock:
    """A clock that says what it is told."""

    def __init__(self, now_us: int = 1_000_000) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us


def open_log(
    filesystem: Filesystem,
    *,
    directory: Path = DIRECTORY,
    clock_us: SettableClock | None = None,
    table_id: int = 7,
    bucket: int = 0,
    end_offset_min: int = 0,
    must_exist: bool = False,
    **options: Any,
) -> LogTablet:
    """Open a log; `options` are those of LogOptions."""
    return LogTablet.open(
        directory,
        table_id=table_id,
        bucket=bucket,
        filesystem=filesystem,
        options=LogOptions(**options),
        clock_us=clock_us or SettableClock(),
        end_offset_min=end_offset_min,
        must_exist=must_exist,
    )


def store(log: LogTablet, *payloads: bytes, rows: int = 1, **more: int) -> list[AppendResult]:
    """Append batches as one group and make them visible."""
    results = [log.append(RoutedBatch(0, rows, payload, 1, **more)) for payload in payloads]
    log.flush()
    log.publish()
    return results


def read_all(log: LogTablet, *, bytes_max: int = 1 << 20) -> list[StoredBatch]:
    """Read everything stored, page by page."""
    batches: list[StoredBatch] = []
    offset = log.log_start_offset
    while offset < log.high_watermark:
        page = log.read(offset, bytes_max=bytes_max)
        batches += page
        offset = page[-1].end_offset
    return batches


def payloads_of(batches: list[StoredBatch]) -> list[bytes]:
    """The payloads as bytes, to compare."""
    return [bytes(batch.payload) for batch in batches]


class ModelBatch(NamedTuple):
    """A batch as it was sent."""

    payload: bytes
    row_count: int
    schema_id: int
    writer_id: int
    sequence: int


class LogModel:
    """Acknowledged batches in offset order, and those whose fate is open, in sending order."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[int, ModelBatch]] = []
        self.open: list[ModelBatch] = []
        self.log_start_max = 0
        self.next_sequence: dict[int, int] = {}

    @property
    def end_offset(self) -> int:
        """The offset after the last acknowledged batch."""
        if not self.acknowledged:
            return 0
        base, batch = self.acknowledged[-1]
        return base + batch.row_count

    def acknowledge(self, batch: ModelBatch, result: AppendResult) -> None:
        """The batch was acknowledged with these offsets."""
        assert result.end_offset - result.base_offset == batch.row_count
        if result.is_duplicate:
            assert (result.base_offset, batch) in self.acknowledged, "a false repetition"
            return
        assert result.base_offset == self.end_offset, "offsets are not dense"
        self._add(batch)

    def _add(self, batch: ModelBatch) -> None:
        self.acknowledged.append((self.end_offset, batch))
        if batch.writer_id:
            self.next_sequence[batch.writer_id] = batch.sequence + 1

    def adopt_survivors(self, tablet: LogTablet) -> None:
        """After a restart: of the open batches a first part may be there, in order."""
        survivors = []
        end_offset = self.end_offset
        assert tablet.high_watermark >= end_offset, "acknowledged rows are lost"
        for batch in self.open:
            if end_offset == tablet.high_watermark:
                break
            survivors.append(batch)
            end_offset += batch.row_count
        for batch in survivors:
            self._add(batch)
        self.open = []

    def check(self, tablet: LogTablet, *, bytes_max: int = 300) -> None:
        """The log shows exactly the acknowledged batches, from its start to its high watermark."""
        assert tablet.high_watermark == tablet.log_end_offset == self.end_offset
        assert tablet.log_start_offset <= self.log_start_max
        expected = [
            (base, batch) for base, batch in self.acknowledged if base >= tablet.log_start_offset
        ]
        offset = tablet.log_start_offset
        timestamp = 0
        position = 0
        while offset < tablet.high_watermark:
            for stored in tablet.read(offset, bytes_max=bytes_max):
                base, batch = expected[position]
                assert stored.base_offset == base == offset
                assert stored.row_count == batch.row_count
                assert stored.schema_id == batch.schema_id
                assert stored.payload == batch.payload
                assert stored.timestamp_us >= timestamp
                timestamp = stored.timestamp_us
                offset = stored.end_offset
                position += 1
        assert position == len(expected)
