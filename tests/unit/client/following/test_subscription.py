"""A subscription over tables in memory: who waits, who ends it, and in which order batches come."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from streamhouse.client.following import ConsumerPosition, Source, Subscription
from streamhouse.client.http._stop_signal import STOP, StopSignal
from streamhouse.client.positions._position_reports import PositionReports
from streamhouse.core.errors import InvalidRequestError, UnavailableError

WAIT_S = 60


class Table:
    """Gives batches as a test puts them; waiting for one ends with the signal, as on a network."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches: Queue[str | Exception | None] = Queue()
        self.waiting = threading.Semaphore(0)
        self.is_over = threading.Event()
        self.stop = StopSignal()
        self.pulled = 0

    def source(self, **options: object) -> Source[str]:
        ends = threading.Thread(target=self._end_wait, daemon=True)
        ends.start()
        return Source(self.name, self._run(), stop=self.stop, **options)  # type: ignore[arg-type]

    def _end_wait(self) -> None:
        self.stop._is_set.wait(WAIT_S)
        self.batches.put(None)

    def _run(self) -> Generator[str, None, None]:
        try:
            while True:
                assert STOP.get() is self.stop
                self.waiting.release()
                batch = self.batches.get(timeout=WAIT_S)
                if isinstance(batch, Exception):
                    raise batch
                if batch is None:
                    raise UnavailableError("the connection was shut down")
                self.pulled += 1
                yield batch
        finally:
            self.is_over.set()


def _pullers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if "streamhouse-subscription" in one.name}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for one in _pullers():
        one.join(WAIT_S)
    assert not _pullers()


def test_iterating_over_one_table_takes_no_thread() -> None:
    table = Table("a")
    with Subscription([table.source()]) as batches:
        table.batches.put("a1")
        table.batches.put("a2")

        assert [next(batches), next(batches)] == ["a1", "a2"]
        assert not _pullers()
        # Nothing is pulled that was not asked for.
        table.batches.put("a3")
        assert table.pulled == 2
    assert table.is_over.is_set()
    assert list(batches) == []


def test_a_poll_returns_what_is_there_or_nothing_in_time() -> None:
    table = Table("a")
    with Subscription([table.source()]) as batches:
        assert batches.poll(0) == []
        assert batches.poll(0.01) == []
        table.batches.put("a1")
        assert batches.poll(WAIT_S) == ["a1"]
        assert batches.poll(0) == []


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["poll", "next"])
def test_closing_in_another_thread_ends_who_waits(count: int, how: str) -> None:
    tables = [Table(name) for name in "ab"[:count]]
    batches = Subscription([table.source() for table in tables])
    found: list[list[str]] = []
    waiter = threading.Thread(
        target=lambda: found.append(batches.poll() if how == "poll" else list(batches))
    )
    waiter.start()
    for table in tables:
        assert table.waiting.acquire(timeout=WAIT_S)

    batches.close()

    waiter.join(WAIT_S)
    assert found == [[]]
    assert all(table.is_over.is_set() for table in tables)
    assert batches.is_closed
    batches.close()
    with pytest.raises(InvalidRequestError, match=r"the subscription to 'a'.* is closed"):
        batches.poll(0)


def test_a_busy_table_does_not_keep_others_waiting() -> None:
    busy, calm = Table("busy"), Table("calm")
    with Subscription([busy.source(), calm.source()]) as batches:
        for n in range(50):
            busy.batches.put(f"b{n}")
        seen = [next(batches)]
        calm.batches.put("c0")
        # It has one batch at a time, however many it could have.
        assert busy.pulled <= 2
        while "c0" not in seen:
            seen += batches.poll(WAIT_S)
        assert [one for one in seen if one != "c0"] == [f"b{n}" for n in range(len(seen) - 1)]


def test_all_that_is_ready_is_polled_at_once_one_of_each_table() -> None:
    tables = [Table("a"), Table("b")]
    with Subscription([table.source() for table in tables]) as batches:
        assert batches.poll(0) == []
        for table in tables:
            table.batches.put(f"{table.name}1")
            table.batches.put(f"{table.name}2")
        found: list[str] = []
        while len(found) < 4:
            polled = batches.poll(WAIT_S)
            assert len({one[0] for one in polled}) == len(polled)
            found += polled
        assert sorted(found) == ["a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_of_one_table_is_raised_once_and_ends_all(count: int) -> None:
    tables = [Table(name) for name in "ab"[:count]]
    batches = Subscription([table.source() for table in tables])

    # What never began to pull has nothing to end: the failure comes when each of them waits.
    def fail() -> None:
        assert all(table.waiting.acquire(timeout=WAIT_S) for table in tables)
        tables[-1].batches.put(UnavailableError("the service is gone"))

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        with pytest.raises(UnavailableError, match="is gone"):
            next(batches)
        failing.result(WAIT_S)

    assert batches.is_closed
    assert all(table.is_over.wait(WAIT_S) for table in tables)
    assert list(batches) == []


def test_one_that_nobody_refers_to_ends() -> None:
    table = Table("a")

    def abandon() -> None:
        batches = Subscription([table.source()])
        batches.poll(0)
        assert table.waiting.acquire(timeout=WAIT_S)

    abandon()
    gc.collect()
    assert table.is_over.wait(WAIT_S)


def test_who_asked_to_be_called_is_called_for_a_batch_and_for_the_end() -> None:
    table = Table("a")
    called = threading.Semaphore(0)
    with Subscription([table.source()]) as batches:
        batches.on_ready(called.release)
        assert batches.poll(0) == []
        table.batches.put("a1")
        assert called.acquire(timeout=WAIT_S)
        assert batches.poll(0) == ["a1"]
    assert called.acquire(timeout=WAIT_S)


class Service:
    """Takes reports, and commits apart from them."""

    def __init__(self) -> None:
        self.said: list[dict[int, int]] = []
        self.committed: list[dict[int, int]] = []
        self.reports = PositionReports(
            lambda offsets: self._note(self.said, offsets),
            consumer="billing",
            send_durably=lambda offsets: self._note(self.committed, offsets),
        )

    def _note(self, notes: list[dict[int, int]], offsets: object) -> dict[str, int | None]:
        notes.append(dict(offsets))  # type: ignore[call-overload]
        return {"lag_rows": 0, "lag_ms": 0}


def _named(table: Table, service: Service, *, by_commit: bool) -> Subscription[str]:
    consumer_position = ConsumerPosition(service.reports, {0: 0}, is_by_commit=by_commit)

    def note(consumer_position: ConsumerPosition, batch: str) -> None:
        consumer_position.batch_delivered(0, int(batch))

    return Subscription([table.source(note=note, consumer_position=consumer_position)])


@pytest.mark.parametrize("is_polled", [True, False])
def test_a_batch_counts_as_read_when_the_next_is_asked_for(is_polled: bool) -> None:
    table, service = Table("a"), Service()
    with _named(table, service, by_commit=False) as batches:
        for end in ("10", "20"):
            table.batches.put(end)
            assert (batches.poll(WAIT_S) if is_polled else [next(batches)]) == [end]
    assert service.said[-1] == {0: 10}
    assert service.committed == []


@pytest.mark.parametrize("is_polled", [True, False])
def test_who_goes_by_commit_is_told_of_as_committed(is_polled: bool) -> None:
    table, service = Table("a"), Service()
    with _named(table, service, by_commit=True) as batches:
        for end in ("10", "20", "30"):
            table.batches.put(end)
            assert (batches.poll(WAIT_S) if is_polled else [next(batches)]) == [end]
            if end == "20":
                batches.commit()
        service.reports.flush()
    assert service.committed == [{0: 20}]
    assert all(said == {0: 0} for said in service.said)


def test_a_reader_without_a_name_cannot_commit() -> None:
    table = Table("a")
    with (
        Subscription([table.source(no_commit="it has no 'consumer'")]) as batches,
        pytest.raises(InvalidRequestError, match="no 'consumer'"),
    ):
        batches.commit()
