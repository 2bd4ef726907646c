"""What a commit group waits for when its logs are stored in a journal, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from streamhouse.core.errors import OverloadedError, UnknownOutcomeError
from streamhouse.storage_service.log._stored_in_order import ReplicaLag
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import (
    CommitGroup,
    CommitLimits,
    CommitOutcome,
    GroupCommitter,
)
from streamhouse.storage_service.log.replica import Replication
from streamhouse.storage_service.ownership.journal._journaled_filesystem import JournaledFilesystem
from streamhouse.storage_service.ownership.journal.operations import Append
from tests.support.crash_filesystem import CrashFilesystem
from tests.support.late_journal import LateJournal
from tests.support.log_world import open_log

WAIT_SECONDS = 10.0
BUCKETS = tuple(Path(f"/tables/7/bucket-{bucket}") for bucket in range(2))


class Harness:
    """Logs with a journal that stores when the test says; groups are completed as they come."""

    def __init__(self, *, is_waited_for: bool, lag_ms_max: int = 3_600_000) -> None:
        self.journal = LateJournal(self._on_wait)
        filesystem = JournaledFilesystem(
            CrashFilesystem(0), Path("/"), self.journal, log_bytes={}, on_failure=pytest.fail
        )
        self.logs = [
            open_log(filesystem, directory=path, bucket=bucket, segment_bytes_max=2_000)
            for bucket, path in enumerate(BUCKETS)
        ]
        self.journal.store()
        self.groups = 0
        self._arrived = threading.Semaphore(0)
        self.waited: list[int] = []
        self.synced: SimpleQueue[CommitOutcome] = SimpleQueue()
        self.committer = GroupCommitter(
            self._publish,
            limits=CommitLimits(units_max=3, rows_max=1000, bytes_max=10_000),
            replication=Replication(
                replica=self.journal, is_waited_for=is_waited_for, lag_ms_max=lag_ms_max
            ),
        )

    def _on_wait(self, position: int) -> None:
        if threading.current_thread().name.startswith("commit"):
            self.waited.append(position)
        self.journal.store(position - self.journal.stored_position)

    def _publish(self, group: CommitGroup) -> None:
        group.complete()
        self.groups += 1
        self._arrived.release()

    def until_published(self) -> None:
        assert self._arrived.acquire(timeout=WAIT_SECONDS), "no group was published"

    def submit(self, bucket: int, payload: bytes = b"rows", *, sequence: int = 0) -> list[int]:
        """Submit a unit and return when it is committed here; its offsets come with the answer."""
        offsets: list[int] = []

        def on_done(outcome: CommitOutcome) -> None:
            assert outcome.error is None
            offsets.extend(result.base_offset for result in outcome.results)

        batch = RoutedBatch(0, 1, payload, 1, 9 if sequence else 0, sequence)
        self.committer.submit([(self.logs[bucket], batch)], on_done, on_synced=self.synced.put)
        return offsets

    @property
    def shown(self) -> list[int]:
        return [log.high_watermark for log in self.logs]


@pytest.fixture
def service() -> Iterator[Harness]:
    service = Harness(is_waited_for=True)
    yield service
    service.journal.store_at_once()
    service.committer.stop()


def test_nothing_is_shown_or_answered_before_it_is_stored(service: Harness) -> None:
    before = service.journal.recorded_position
    first = service.submit(0)
    service.journal.wait_recorded(before + 1)
    second = service.submit(1)
    service.journal.wait_recorded(before + 2)
    assert (service.shown, first, second) == ([0, 0], [], [])

    service.journal.store(1)
    service.until_published()
    assert (service.shown, first, second) == ([1, 0], [0], [])

    service.journal.store(1)
    service.until_published()
    assert (service.shown, second) == ([1, 1], [0])


def test_a_unit_is_reported_as_soon_as_its_logs_have_it(service: Harness) -> None:
    for number in range(2):
        offsets = service.submit(0)
        outcome = service.synced.get(timeout=WAIT_SECONDS)
        assert [result.base_offset for result in outcome.results] == [number]
        assert (service.logs[0].log_end_offset, service.shown, offsets) == (number + 1, [0, 0], [])

    service.journal.store()

    for _ in range(2):
        service.until_published()
    assert service.shown == [2, 0]
    assert service.synced.empty()


def test_a_repetition_is_answered_once_the_first_is_stored(service: Harness) -> None:
    before = service.journal.recorded_position
    first = service.submit(0, sequence=1)
    service.journal.wait_recorded(before + 1)
    again = service.submit(0, sequence=1)
    # Of another log, behind it in the queue of the one commit thread.
    service.submit(1)
    service.journal.wait_recorded(before + 2)
    assert (first, again) == ([], [])

    service.journal.store()
    for _ in range(2):
        service.until_published()

    assert (first, again) == ([0], [0])


def test_what_is_not_stored_counts_as_waiting(service: Harness) -> None:
    before = service.journal.recorded_position
    for count in range(1, 4):
        service.submit(0)
        service.journal.wait_recorded(before + count)

    with pytest.raises(
        OverloadedError, match="3 writes with 3 rows and 12 bytes wait for disk and"
    ):
        service.submit(0)

    service.journal.store(1)
    service.until_published()
    assert (service.committer.queued_units, service.committer.queued_bytes) == (2, 8)
    service.submit(0)


def test_a_roll_is_stored_before_what_follows(service: Harness) -> None:
    """The commit thread waits for its files once, and so for all rows before them."""
    for _ in range(2):
        before = service.journal.recorded_position
        service.submit(0, b"x" * 900)
        service.journal.wait_recorded(before + 1)
        service.journal.store()
        service.until_published()
    before, waits = service.journal.recorded_position, len(service.waited)
    service.submit(0, b"x" * 900)
    service.journal.wait_recorded(before + 4)

    kinds = [type(operation).__name__ for operation in service.journal.operations[before:]]
    assert kinds == ["Replace", "Replace", "Replace", "Append"]
    assert service.waited[waits:] == [before + 3]
    assert service.journal.stored_position >= before + 3
    assert service.shown == [2, 0]


def test_stopping_publishes_all_that_was_taken() -> None:
    service = Harness(is_waited_for=True)
    before = service.journal.recorded_position
    offsets = [service.submit(bucket) for bucket in (0, 1, 0)]
    stopping = threading.Thread(target=service.committer.stop)
    stopping.start()
    service.journal.wait_recorded(before + 2)
    while stopping.is_alive():
        # Groups may be several: what the last one recorded is stored last.
        service.journal.store()
        stopping.join(0.001)

    assert service.shown == [2, 1]
    assert sorted(offset for found in offsets for offset in found) == [0, 0, 1]


def test_who_lost_its_journal_knows_no_outcome() -> None:
    service = Harness(is_waited_for=False)
    service.journal.is_lost = True
    outcomes: list[CommitOutcome] = []

    service.committer.submit([(service.logs[0], RoutedBatch(0, 1, b"rows", 1))], outcomes.append)
    service.until_published()

    assert isinstance(outcomes[0].error, UnknownOutcomeError)
    assert service.shown == [0, 0]
    service.committer.stop()


def test_an_error_is_reported_before_the_groups_before_it_are_stored(service: Harness) -> None:
    service.submit(0)
    assert service.synced.get(timeout=WAIT_SECONDS).error is None
    service.journal.is_lost = True

    service.submit(0)

    assert isinstance(service.synced.get(timeout=WAIT_SECONDS).error, UnknownOutcomeError)
    assert service.shown == [0, 0]


def test_without_waiting_rows_are_shown_at_once() -> None:
    service = Harness(is_waited_for=False)

    offsets = service.submit(0)
    service.until_published()

    assert (service.shown, offsets) == ([1, 0], [0])
    assert isinstance(service.journal.operations[-1], Append)
    assert service.journal.stored_position < service.journal.recorded_position
    assert service.synced.empty()
    service.committer.stop()


def test_writes_wait_while_the_journal_is_too_far_behind() -> None:
    # Whatever is not stored is too old.
    service = Harness(is_waited_for=False, lag_ms_max=-1)
    service.submit(0)
    service.until_published()
    assert service.waited == []
    first = service.journal.recorded_position

    service.submit(0)
    service.until_published()

    assert service.waited == [first]
    service.committer.stop()


def test_a_lag_is_that_of_the_oldest_that_is_not_stored() -> None:
    waited: list[int] = []

    def on_wait(position: int) -> None:
        waited.append(position)
        journal.store(position - journal.stored_position)

    journal = LateJournal(on_wait)
    lag = ReplicaLag(Replication(replica=journal, is_waited_for=False, lag_ms_max=-1))
    for number in range(3):
        journal.record(Append("tables/1/bucket-0/00000000000000000000.log", number, b"x"))
        lag.note()
        lag.note()
    journal.store(2)

    lag.wait()
    lag.wait()

    assert waited == [3]
