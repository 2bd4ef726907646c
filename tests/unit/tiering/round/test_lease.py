"""When a claim counts as lost."""

from __future__ import annotations

import threading

import pytest

from streamhouse.core.errors import FencedError, UnavailableError
from streamhouse.tiering._ports import SilentObserver
from streamhouse.tiering.round._lease import Lease, RoundTracker


class _Service:
    """Answers heartbeats as told; `beats` is released once for each."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers = list(answers)
        self.beats = threading.Semaphore(0)
        self.progress: list[dict[str, object]] = []

    def heartbeat_tiering(
        self, path: str, *, table_id: int, epoch: int, **progress: object
    ) -> None:
        self.progress.append(progress)
        answer = self._answers.pop(0) if self._answers else None
        self.beats.release()
        if answer is not None:
            raise answer


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _lease(
    service: _Service, clock: _Clock, *, lease_ms: int = 30, tracker: RoundTracker | None = None
) -> Lease:
    return Lease(
        service,  # type: ignore[arg-type]  # only the heartbeat is used
        table="db.t",
        table_id=1,
        epoch=3,
        lease_ms=lease_ms,
        tracker=tracker,
        monotonic_s=clock,
    )


def test_answered_heartbeats_keep_the_claim() -> None:
    service, clock = _Service(), _Clock()

    with _lease(service, clock) as lease:
        for _ in range(3):
            assert service.beats.acquire(timeout=60)
        assert not lease.is_lost
        lease.check()


def test_heartbeats_tell_how_far_the_round_is() -> None:
    service, tracker = _Service(), RoundTracker(SilentObserver())
    tracker.started("db.t", rows=10, splits=2)
    tracker.wrote("db.t", rows=4)

    with _lease(service, _Clock(), tracker=tracker):
        assert service.beats.acquire(timeout=60)

    assert service.progress[0] == {"step": "writing", "rows_done": 4, "rows_planned": 10}
    tracker.ended("db.t")
    assert tracker.step == "committing"
    tracker.maintaining()
    assert tracker.step == "maintaining"


def test_the_services_refusal_ends_it_for_good() -> None:
    service, clock = _Service(FencedError("epoch 4 is the current one")), _Clock()

    with _lease(service, clock) as lease:
        assert service.beats.acquire(timeout=60)
        lease._thread.join(60)

        assert lease.is_lost
        with pytest.raises(FencedError, match="epoch 4 is the current one"):
            lease.check()


def test_a_lost_heartbeat_is_survived() -> None:
    service, clock = _Service(UnavailableError("no answer"), None, None), _Clock()

    with _lease(service, clock) as lease:
        for _ in range(3):
            assert service.beats.acquire(timeout=60)
        assert not lease.is_lost


def test_silence_for_the_length_of_the_lease_ends_it() -> None:
    service, clock = _Service(), _Clock()
    lease = _lease(service, clock, lease_ms=60_000)
    with lease:
        clock.now_s += 59.9
        assert not lease.is_lost
        clock.now_s += 0.1

        assert lease.is_lost
        with pytest.raises(FencedError, match=r"no heartbeat of tiering epoch 3 .* within 60 s"):
            lease.check()


def test_leaving_stops_the_heartbeats() -> None:
    lease = _lease(_Service(), _Clock())

    with lease:
        pass

    assert not lease._thread.is_alive()
