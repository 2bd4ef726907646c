"""The log engine alone, against what the same disk and checksum do in the same run."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from crc32c import crc32c

from benchmarks.harness import fsynced_write_seconds, make_rows, median, percentile, report
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.log.group_commit import (
    CommitOutcome,
    GroupCommitter,
)
from streamhouse.storage_service.log.log_tablet import LogOptions, LogTablet

REPEATS = 5
APPEND_BYTES = 200_000_000
SMALL_BYTES = 5_000
SMALL_TASKS = 64
SMALL_APPENDS = 20_000
READ_BYTES = 100_000_000
READ_PAGE_BYTES = 4 << 20


def main() -> None:
    """Report appends, group commit, reads and recovery."""
    with tempfile.TemporaryDirectory() as directory:
        for rows, bar in ((1_000, 0.3), (10_000, 0.65), (100_000, 0.8)):
            _append(Path(directory), rows=rows, bar=bar)
        _group_commit(Path(directory))
        for rows, bar in ((100, 0.1), (1_000, 0.3), (10_000, 0.5)):
            _read_and_recover(Path(directory), rows=rows, bar=bar)


def _open(directory: Path) -> LogTablet:
    return LogTablet.open(
        directory,
        table_id=1,
        bucket=0,
        filesystem=LocalFilesystem(),
        options=LogOptions(),
        clock_us=lambda: time.time_ns() // 1000,
    )


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def _append(directory: Path, *, rows: int, bar: float) -> None:
    payload = make_rows(rows).serialize().to_pybytes()
    pieces = [payload] * min(4_000, APPEND_BYTES // len(payload))
    ratios, rates, limits = [], [], []
    for repeat in range(REPEATS + 1):
        limit = fsynced_write_seconds(directory / "raw", pieces)
        seconds = _append_seconds(directory / "log", pieces, rows)
        if repeat:
            ratios.append(limit / seconds)
            rates.append(len(payload) * len(pieces) / seconds)
            limits.append(len(payload) * len(pieces) / limit)
    report(
        f"log append + fsync, {rows:,}-row frames of {len(payload) / 1000:.0f} kB",
        measured=f"{median(rates) / 1e6:,.0f} MB/s"
        f" ({median(rates) / len(payload) * rows / 1e6:.1f} M rows/s)",
        limit=f"write + fdatasync a frame: {median(limits) / 1e6:,.0f} MB/s",
        ratio=median(ratios),
        bar=f"at least {bar}",
        reached=median(ratios) >= bar,
    )


def _append_seconds(directory: Path, pieces: list[bytes], rows: int) -> float:
    log = _open(directory)
    start = time.perf_counter()
    for sequence, piece in enumerate(pieces, 1):
        log.append(RoutedBatch(0, rows, piece, 1, writer_id=1, sequence=sequence))
        log.flush()
        log.publish()
    seconds = time.perf_counter() - start
    log.close()
    _remove(directory)
    return seconds


def _group_commit(directory: Path) -> None:
    ratios, rates, limits, latencies = [], [], [], []
    pieces = [os.urandom(SMALL_BYTES)] * 2_000
    for repeat in range(REPEATS + 1):
        limit = len(pieces) / fsynced_write_seconds(directory / "raw", pieces)
        seconds, p99 = uvloop.run(_group_commit_once(directory / "log"))
        if repeat:
            limits.append(limit)
            rates.append(SMALL_APPENDS / seconds)
            ratios.append(rates[-1] / limit)
            latencies.append(p99)
    report(
        f"group commit of {SMALL_BYTES / 1000:.0f} kB appends, {SMALL_TASKS} tasks, one bucket",
        measured=f"{median(rates):,.0f} appends/s, p99 {median(latencies) * 1000:.1f} ms",
        limit=f"write + fdatasync each: {median(limits):,.0f}/s",
        ratio=median(ratios),
        bar="at least 5",
        reached=median(ratios) >= 5,
    )


async def _group_commit_once(directory: Path) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    log = _open(directory)
    committer = GroupCommitter(lambda group: loop.call_soon_threadsafe(group.complete))
    payload = os.urandom(SMALL_BYTES)
    waits: list[float] = []

    async def write() -> None:
        for _ in range(SMALL_APPENDS // SMALL_TASKS):
            done: asyncio.Future[CommitOutcome] = loop.create_future()
            start = time.perf_counter()
            committer.submit([(log, RoutedBatch(0, 100, payload, 1))], done.set_result)
            outcome = await done
            waits.append(time.perf_counter() - start)
            assert outcome.error is None

    start = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(SMALL_TASKS)))
    seconds = time.perf_counter() - start
    committer.stop()
    log.close()
    _remove(directory)
    return seconds, percentile(waits, 0.99)


def _read_and_recover(directory: Path, *, rows: int, bar: float) -> None:
    payload = make_rows(rows).serialize().to_pybytes()
    log = _open(directory / "log")
    while log.size_bytes < READ_BYTES:
        for _ in range(20):
            log.append(RoutedBatch(0, rows, payload, 1))
        log.flush()
    log.publish()
    byte_count = log.high_watermark // rows * len(payload)
    checksum = byte_count / _checksum_seconds(payload * (byte_count // len(payload)))
    read = byte_count / _best_seconds(lambda: _read_all(log))
    log.close()
    recovered = byte_count / _best_seconds(lambda: _open(directory / "log").close())
    _remove(directory / "log")
    for what, rate in (("read", read), ("recovery", recovered)):
        report(
            f"log {what}, {rows:,}-row frames of {len(payload) / 1000:.1f} kB",
            measured=f"{rate / 1e9:.2f} GB/s ({rate / len(payload):,.0f} frames/s)",
            limit=f"checksum of the same bytes in memory: {checksum / 1e9:.1f} GB/s",
            ratio=rate / checksum,
            bar=f"at least {bar}",
            reached=rate / checksum >= bar,
        )


def _checksum_seconds(contents: bytes) -> float:
    return _best_seconds(lambda: crc32c(contents))


def _best_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _read_all(log: LogTablet) -> None:
    offset = log.log_start_offset
    while offset < log.high_watermark:
        offset = log.read(offset, bytes_max=READ_PAGE_BYTES)[-1].end_offset


if __name__ == "__main__":
    main()
