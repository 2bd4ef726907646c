"""Short ways to say what log tests say all the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
