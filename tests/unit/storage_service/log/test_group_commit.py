"""Units are all or nothing, groups become visible in one step, and nobody waits forever."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from streamhouse.core.errors import (
    InternalError,
    OutOfOrderSequenceError,
    OverloadedError,
    RequestTooLargeError,
    StorageFailedError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import Buffer, WritableFile
from streamhouse.storage_service.log.group_commit import (
    CommitGroup,
    CommitLimits,
    CommitOutcome,
    GroupCommitter,
)
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.segments.segment import ActiveSegment
from tests.support.crash_filesystem import Crash, CrashFilesystem
from tests.support.held_step import around, lower
from tests.support.log_world import SettableClock, open_log, payloads_of, read_all

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


_A, _B, _C = BUCKETS


@pytest.fixture
def service() -> Iterator[CommitHarness]:
    service = CommitHarness()
    yield service
    service.committer.stop()


def test_a_unit_is_durable_then_visible_then_answered(service: CommitHarness) -> None:
    outcomes = service.submit(service.batch(_A), service.batch(_B), service.batch(_A, b"more"))
    group = service.next_group()

    assert service.logs[_A].log_end_offset == 4
    assert service.logs[_A].high_watermark == 0
    assert outcomes == []
    group.complete()

    assert outcomes[0].error is None
    assert [result[:2] for result in outcomes[0].results] == [(0, 2), (0, 2), (2, 4)]
    assert service.stored(_A) == [b"rows", b"more"]
    assert service.stored(_B) == [b"rows"]


def test_a_given_time_is_taken_unless_it_is_past(service: CommitHarness) -> None:
    log, batch = service.batch(_A)
    units = [
        (log, batch._replace(timestamp_us=given)) for given in (3_000_000, 2_000_000, 4_000_000)
    ]

    times = [service.commit(unit).results[0].timestamp_us for unit in units]

    assert times == [3_000_000, 3_000_000, 4_000_000]


def test_units_that_wait_become_one_group_with_one_sync_a_log(service: CommitHarness) -> None:
    service.hold()
    waiting = [service.submit(service.batch(_A)), service.submit(service.batch(_A))]
    before = len(service.disk.history)

    service.release().complete()

    assert [outcomes[0].results[0].base_offset for outcomes in waiting] == [0, 2]
    assert [step for step, _ in service.disk.history[before:]] == ["write", "sync", "write"]


def test_a_group_shows_its_own_rows_only(service: CommitHarness) -> None:
    """The commit thread may be a group further when one is completed: no half unit shows."""
    service.submit(service.batch(_A))
    first = service.next_group()
    service.submit(service.batch(_A), service.batch(_B))
    second = service.next_group()

    first.complete()
    assert (service.logs[_A].high_watermark, service.logs[_B].high_watermark) == (2, 0)
    second.complete()

    assert (service.logs[_A].high_watermark, service.logs[_B].high_watermark) == (4, 2)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda s: s.batch(_B, sequence=3), OutOfOrderSequenceError),
        (lambda s: s.batch(_B, b""), RequestTooLargeError),
    ],
)
def test_a_refused_batch_refuses_its_whole_unit_and_no_other(
    service: CommitHarness,
    bad: Callable[[CommitHarness], tuple[LogTablet, RoutedBatch]],
    error: type[Exception],
) -> None:
    service.hold()
    before = service.submit(service.batch(_A, b"before"))
    refused = service.submit(service.batch(_A, b"never", sequence=1), bad(service))
    after = service.submit(service.batch(_A, b"after", sequence=1), service.batch(_B, b"after"))

    service.release().complete()

    assert isinstance(refused[0].error, error)
    assert refused[0].results == ()
    assert before[0].error is after[0].error is None
    assert service.stored(_A) == [b"before", b"after"]
    assert service.stored(_B) == [b"after"]


def test_a_repetition_is_answered_and_not_stored_again(service: CommitHarness) -> None:
    first = service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))

    again = service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))

    assert again.error is None
    assert [r[:2] for r in again.results] == [r[:2] for r in first.results]
    assert all(result.is_duplicate for result in again.results)
    assert service.stored(_A) == service.stored(_B) == [b"rows"]


def test_a_repetition_waits_for_the_group_that_stores_the_first(service: CommitHarness) -> None:
    service.hold()
    first = service.submit(service.batch(_A, sequence=1))
    again = service.submit(service.batch(_A, sequence=1))
    service.disk.fail_syncs_in = {_A}

    service.release().complete()

    assert isinstance(first[0].error, UnknownOutcomeError)
    assert isinstance(again[0].error, UnknownOutcomeError)


def test_a_repeated_part_of_a_unit_is_completed(service: CommitHarness) -> None:
    service.commit(service.batch(_A, sequence=1))

    outcome = service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))

    assert [result.is_duplicate for result in outcome.results] == [True, False]
    assert service.stored(_A) == service.stored(_B) == [b"rows"]


def test_disk_full_in_one_log_refuses_only_units_that_touch_it_and_nothing_of_them_stays(
    service: CommitHarness,
) -> None:
    service.hold()
    touching = service.submit(
        service.batch(_A, b"never", sequence=1), service.batch(_B, b"never", sequence=1)
    )
    other = service.submit(service.batch(_A, b"other"), service.batch(_C, b"other"))
    service.disk.fail_writes_in = {_B}

    service.release().complete()

    assert isinstance(touching[0].error, StorageFailedError)
    assert other[0].error is None
    assert other[0].results[0][:2] == (0, 2), "offsets of refused rows are given again"
    service.restart()
    assert service.stored(_A) == service.stored(_C) == [b"other"]
    assert service.stored(_B) == []
    retried = service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))
    assert [result.is_duplicate for result in retried.results] == [False, False]


def test_a_batch_behind_a_refused_one_may_be_sent_again(service: CommitHarness) -> None:
    """Not 'out of order', which would end the writer: it is the disk's fault."""
    service.hold()
    refused = service.submit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))
    behind = service.submit(service.batch(_A, sequence=2))
    service.disk.fail_writes_in = {_B}

    service.release().complete()

    assert isinstance(refused[0].error, StorageFailedError)
    assert isinstance(behind[0].error, StorageFailedError)
    assert behind[0].error.retriable
    service.disk.fail_writes_in = set()
    assert (
        service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1)).error is None
    )
    assert service.commit(service.batch(_A, sequence=2)).results[0][:2] == (2, 4)


@pytest.mark.parametrize("is_disk_slow", [False, True])
def test_a_failed_sync_leaves_the_outcome_open_and_a_repetition_completes_it(
    service: CommitHarness, monkeypatch: pytest.MonkeyPatch, *, is_disk_slow: bool
) -> None:
    if is_disk_slow:
        lower(monkeypatch, "synced-alone-s", -1.0)
    service.hold()
    torn = service.submit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))
    other = service.submit(service.batch(_A, b"other"))
    service.disk.fail_syncs_in = {_B}

    service.release().complete()

    assert isinstance(torn[0].error, UnknownOutcomeError)
    assert other[0].error is None
    assert service.stored(_A) == [b"rows", b"other"], "durable, hence visible, unacknowledged"
    assert service.logs[_B].is_read_only
    assert isinstance(service.commit(service.batch(_B)).error, StorageFailedError)
    assert service.commit(service.batch(_C)).error is None
    service.restart()
    again = service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))
    assert again.error is None
    assert again.results[0].is_duplicate
    assert service.stored(_A) == [b"rows", b"other"]
    assert service.stored(_B) == [b"rows"]


def test_logs_on_a_slow_disk_are_synced_at_the_same_time(
    service: CommitHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(len(BUCKETS), timeout=WAIT_SECONDS)

    def sync(real: Callable[[ActiveSegment], None], segment: ActiveSegment) -> None:
        together.wait()
        real(segment)

    lower(monkeypatch, "synced-alone-s", -1.0)
    around(monkeypatch, "segment-syncing", sync)

    outcome = service.commit(*(service.batch(directory) for directory in BUCKETS))

    assert outcome.error is None
    assert all(log.high_watermark == 2 for log in service.logs.values())


@pytest.mark.parametrize("fault", ["truncate", "sync of the truncation"])
def test_a_refused_write_that_cannot_be_taken_back_is_unknown(
    service: CommitHarness, fault: str
) -> None:
    service.hold()
    unit = service.submit(service.batch(_A, b"unit"), service.batch(_B, b"unit"))
    other = service.submit(service.batch(_A, b"other"))
    service.disk.fail_writes_in = {_B}
    if fault == "truncate":
        service.disk.fail_truncates_in = {_B}
    else:
        service.disk.fail_syncs_in = {_B}

    service.release().complete()

    assert isinstance(unit[0].error, UnknownOutcomeError)
    assert other[0].error is None
    assert service.logs[_B].is_read_only
    assert service.stored(_A) == [b"other"]


def test_a_crash_between_the_syncs_of_two_logs_is_completed_by_a_repetition(
    service: CommitHarness,
) -> None:
    for directory in (_A, _B):
        log, batch = service.batch(directory, sequence=1)
        log.append(RoutedBatch(0, 2, batch.payload, 1, writer_id=9, sequence=1))
        log.write()
    service.logs[_A].sync()
    service.restart()

    outcome = service.commit(service.batch(_A, sequence=1), service.batch(_B, sequence=1))

    assert outcome.error is None
    assert outcome.results[0].is_duplicate
    assert service.stored(_A) == service.stored(_B) == [b"rows"]


@pytest.mark.parametrize(
    "filling",
    [[(1, 10)] * 4, [(500, 10)], [(2, 5000)]],
    ids=["units", "rows", "bytes"],
)
def test_a_full_queue_refuses_at_once(
    service: CommitHarness, filling: list[tuple[int, int]]
) -> None:
    service.hold()
    called: list[CommitOutcome] = []
    for rows, size in filling:
        service.submit(service.batch(_A, b"x" * size, rows=rows))
    service.submit(service.batch(_A, b"x", rows=1))

    with pytest.raises(OverloadedError, match="wait for the disk"):
        service.committer.submit([service.batch(_A, b"x" * 5001, rows=501)] * 2, called.append)

    service.release().complete()
    assert called == []
    assert service.commit(service.batch(_A)).error is None
    assert service.committer.queued_units == service.committer.queued_bytes == 0


def test_a_unit_over_the_limits_is_taken_when_nothing_waits(service: CommitHarness) -> None:
    assert service.commit(service.batch(_A, b"x" * 20_000, rows=5000)).error is None


def test_stop_commits_what_waits_and_refuses_what_comes(service: CommitHarness) -> None:
    service.hold()
    outcomes = service.submit(service.batch(_A))
    stopping = threading.Thread(target=service.committer.stop)
    stopping.start()
    service.release().complete()
    stopping.join(WAIT_SECONDS)

    assert outcomes[0].error is None
    with pytest.raises(UnavailableError, match="stopping"):
        service.submit(service.batch(_A))
    service.committer.stop()


def test_a_bug_answers_every_unit_and_the_committer_goes_on(
    service: CommitHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        around(patch, "rows-written", broken)
        outcome = service.commit(service.batch(_A), service.batch(_B))

    assert isinstance(outcome.error, InternalError)
    assert "ZeroDivisionError" in caplog.text
    assert service.commit(service.batch(_A, b"next")).results[0][:2] == (0, 2)
    assert service.stored(_A) == [b"next"]


def test_a_publisher_that_fails_does_not_stop_the_committer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = threading.Semaphore(0)

    def publish(group: CommitGroup) -> None:
        seen.release()
        raise RuntimeError("the event loop is closed")

    committer = GroupCommitter(publish)
    log = open_log(CrashFilesystem(0))
    for _ in range(2):
        committer.submit([(log, RoutedBatch(0, 1, b"x", 1))], lambda outcome: None)
        assert seen.acquire(timeout=WAIT_SECONDS)
    committer.stop()

    assert log.log_end_offset == 2
    assert "event loop is closed" in caplog.text


def test_units_of_many_threads_are_all_answered_once_in_their_own_order() -> None:
    """Threads with a writer each, some logs in common; every answer is right and dense."""
    committer = GroupCommitter(lambda group: group.complete())
    disk = CrashFilesystem(0)
    logs = [open_log(disk, directory=Path(f"/b{n}"), bucket=n) for n in range(3)]
    answers: dict[int, list[CommitOutcome]] = {n: [] for n in range(4)}

    def run(writer: int) -> None:
        for sequence in range(1, 51):
            done = threading.Event()

            def answered(outcome: CommitOutcome, done: threading.Event = done) -> None:
                answers[writer].append(outcome)
                done.set()

            payload = b"%d/%d" % (writer, sequence)
            batch = RoutedBatch(0, 1, payload, 1, writer + 1, sequence)
            unit = [(log, batch) for log in logs[:2]]
            committer.submit(unit, answered)
            assert done.wait(WAIT_SECONDS)

    threads = [threading.Thread(target=run, args=(n,)) for n in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    committer.stop()

    for n, log in enumerate(logs[:2]):
        stored = read_all(log)
        assert [batch.base_offset for batch in stored] == list(range(200))
        by_offset = {batch.base_offset: bytes(batch.payload) for batch in stored}
        for writer, outcomes in answers.items():
            for sequence, outcome in enumerate(outcomes, 1):
                assert by_offset[outcome.results[n].base_offset] == b"%d/%d" % (writer, sequence)
    assert logs[2].log_end_offset == 0
