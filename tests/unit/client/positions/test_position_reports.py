"""Reports of where a reader stands: beside the reading, and never in its way."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping
from queue import Queue

import pytest

from streamhouse.client.positions._position_reports import PositionReports
from streamhouse.core.errors import UnavailableError

TIMEOUT_S = 60


class Service:
    """Takes reports; fails while `failure` is set, and waits while `is_open` is not."""

    def __init__(self) -> None:
        self.said: Queue[dict[int, int]] = Queue()
        self.failure: Exception | None = None
        self.is_open = threading.Event()
        self.is_open.set()

    def send(self, offsets: Mapping[int, int]) -> dict[str, int | None]:
        self.is_open.wait(TIMEOUT_S)
        self.said.put(dict(offsets))
        if self.failure is not None:
            raise self.failure
        return {"lag_rows": 3, "lag_ms": 40}

    def next(self) -> dict[int, int]:
        return self.said.get(timeout=TIMEOUT_S)


@pytest.fixture
def service() -> Service:
    return Service()


def _threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if "position-reports" in one.name}


def test_what_was_reached_is_reported_and_answered(service: Service) -> None:
    reports = PositionReports(service.send, consumer="billing")
    reports.reached({0: 5})
    reports.flush()

    assert service.next() == {0: 5}
    assert reports.lag is not None
    assert (reports.lag.rows, reports.lag.lag_ms) == (3, 40)
    reports.close()


def test_the_last_position_is_reported_at_the_end_once(service: Service) -> None:
    reports = PositionReports(service.send, consumer="billing")
    positions = {0: 1}
    for offset in range(1, 1_000):
        positions[0] = offset
        reports.reached(positions)
    reports.close()
    reports.close()

    said = [service.next() for _ in range(service.said.qsize())]
    assert said[-1] == {0: 999}
    assert len(said) < 10


def test_a_reader_does_not_wait_for_a_service_that_does_not_answer(service: Service) -> None:
    service.is_open.clear()
    reports = PositionReports(service.send, consumer="billing")

    for offset in range(100):
        reports.reached({0: offset})

    assert service.said.empty()
    service.is_open.set()
    reports.close()


def test_a_report_that_fails_is_told_of_once_and_made_again(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reports = PositionReports(service.send, consumer="billing")
    for failure in (UnavailableError("it is away"), ValueError("a bug")):
        service.failure = failure
        reports.reached({0: 5})
        reports.flush()
    service.failure = None
    reports.reached({0: 6})
    reports.flush()

    levels = [record.levelno for record in caplog.records if "not_reported" in record.message]
    assert levels[0] == logging.WARNING
    assert set(levels[1:]) == {logging.DEBUG}
    assert reports.lag is not None
    reports.close()


def test_the_thread_ends_with_its_reader(service: Service) -> None:
    before = _threads()
    reports = PositionReports(service.send, consumer="billing")
    reports.reached({0: 5})
    service.next()
    [thread] = _threads() - before

    del reports
    gc.collect()
    thread.join(TIMEOUT_S)

    assert not thread.is_alive()


def test_one_that_does_not_move_says_now_and_then_that_it_is_there(service: Service) -> None:
    reports = PositionReports(service.send, consumer="billing", report_s=0.01, unmoved_s=0.01)
    reports.reached({0: 5})

    assert [service.next() for _ in range(3)] == [{0: 5}] * 3
    reports.close()
