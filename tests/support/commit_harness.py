"""A committer over three logs on a disk that fails on demand, its groups completed by the test."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import Buffer, WritableFile
from streamhouse.storage_service.log.group_commit import (
    CommitGroup,
    CommitLimits,
    CommitOutcome,
    GroupCommitter,
)
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.support.crash_filesystem import Crash, CrashFilesystem
from tests.support.log_harness import SettableClock, open_log, payloads_of, read_all

WAIT_SECONDS = 10.0
BUCKETS = tuple(Path(f"/tables/7/bucket-{bucket}") for bucket in range(3))


class FailingDisk(CrashFilesystem):
    """Fails by directory instead of by step, because groups write their logs in any order."""

    def __init__(self) -> None:
        super().__init__(0)
        self.fail_writes_in: set[Path] = set()
        self.fail_syncs_in: set[Path] = set()
        self.fail_truncates_in: set[Path] = set()

    def open(self, path: Path) -> WritableFile:
        return _File(self, path, super().open(path))

    def create(self, path: Path) -> WritableFile:
        return _File(self, path, super().create(path))


class _File:
    def __init__(self, disk: FailingDisk, path: Path, file: WritableFile) -> None:
        self._disk = disk
        self._directory = path.parent
        self._file = file

    def write(self, buffers: Sequence[Buffer], *, position: int) -> None:
        if self._directory in self._disk.fail_writes_in:
            half = b"".join(buffers)
            self._file.write([half[: len(half) // 2]], position=position)
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.write(buffers, position=position)

    def sync(self) -> None:
        if self._directory in self._disk.fail_syncs_in:
            raise OSError(errno.EIO, "Input/output error")
        self._file.sync()

    def truncate(self, size_bytes: int) -> None:
        if self._directory in self._disk.fail_truncates_in:
            raise OSError(errno.EIO, "Input/output error")
        self._file.truncate(size_bytes)

    def close(self) -> None:
        self._file.close()


class CommitHarness:
    """A committer whose groups are completed by the test, as an event loop would."""

    def __init__(self) -> None:
        self.disk = FailingDisk()
        self.groups: list[CommitGroup] = []
        self._arrived = threading.Semaphore(0)
        self._may_publish = threading.Event()
        self._may_publish.set()
        self.committer = GroupCommitter(
            self._publish, limits=CommitLimits(units_max=5, rows_max=1000, bytes_max=10_000)
        )
        self.clocks = {directory: SettableClock() for directory in BUCKETS}
        self.logs = {directory: self.open(directory) for directory in BUCKETS}

    def open(self, directory: Path) -> LogTablet:
        bucket = int(directory.name.removeprefix("bucket-"))
        clock = self.clocks[directory]
        return open_log(self.disk, directory=directory, bucket=bucket, clock_us=clock)

    def restart(self) -> None:
        self.disk.fail_writes_in = self.disk.fail_syncs_in = self.disk.fail_truncates_in = set()
        self.disk.restart(Crash.POWER)
        self.logs = {directory: self.open(directory) for directory in self.logs}

    def _publish(self, group: CommitGroup) -> None:
        self.groups.append(group)
        self._arrived.release()
        assert self._may_publish.wait(WAIT_SECONDS)

    def next_group(self) -> CommitGroup:
        assert self._arrived.acquire(timeout=WAIT_SECONDS), "no group was published"
        return self.groups[-1]

    def hold(self) -> None:
        """Keep the commit thread busy, so that what is submitted now becomes one group."""
        self._may_publish.clear()
        self.submit()
        self.next_group()

    def release(self) -> CommitGroup:
        self._may_publish.set()
        return self.next_group()

    def submit(self, *entries: tuple[LogTablet, RoutedBatch]) -> list[CommitOutcome]:
        outcomes: list[CommitOutcome] = []
        self.committer.submit(entries, outcomes.append)
        return outcomes

    def commit(self, *entries: tuple[LogTablet, RoutedBatch]) -> CommitOutcome:
        """Submit one unit and complete its group."""
        outcomes = self.submit(*entries)
        self.next_group().complete()
        return outcomes[0]

    def batch(
        self, directory: Path, payload: bytes = b"rows", *, rows: int = 2, sequence: int = 0
    ) -> tuple[LogTablet, RoutedBatch]:
        writer_id = 9 if sequence else 0
        return self.logs[directory], RoutedBatch(0, rows, payload, 1, writer_id, sequence)

    def stored(self, directory: Path) -> list[bytes]:
        return payloads_of(read_all(self.logs[directory]))
