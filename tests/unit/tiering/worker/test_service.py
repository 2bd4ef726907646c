"""The worker's loop: what it takes on, when it waits, when it stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamhouse.client import LogBatch, TieringIdle
from streamhouse.core.errors import (
    StorageFailedError,
    TableNotFoundError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from tests.support.held_step import around
from tests.support.tiering_world import TieringWorld, rows


def _table(world: TieringWorld, path: str, *, row_count: int = 10, **more: Any) -> None:
    world.create_table(path, **more)
    if row_count:
        world.service.append(path, 0, rows(0, row_count))


def test_once_tiers_every_table_up_to_where_it_ended(world: TieringWorld) -> None:
    _table(world, "db.a")
    _table(world, "db.b", row_count=7)
    _table(world, "db.empty", row_count=0)

    summaries = {s.table: s for s in world.worker().run_once()}

    assert {name: (s.rounds, s.row_count) for name, s in summaries.items()} == {
        "db.a": (1, 10),
        "db.b": (1, 7),
        "db.empty": (0, 0),
    }
    assert all(s.error is None for s in summaries.values())
    assert "7 rows in 1 files" in summaries["db.b"].text()
    assert summaries["db.empty"].text() == "db.empty: nothing to tier (lake snapshot None)"


def test_once_runs_as_many_rounds_as_it_takes(world: TieringWorld) -> None:
    _table(world, "db.t")

    (summary,) = world.worker(rows_per_round_max=3).run_once()

    assert (summary.rounds, summary.row_count) == (4, 10)
    assert world.addresses() == [(0, offset) for offset in range(10)]


def test_once_takes_only_the_tables_it_was_given(world: TieringWorld) -> None:
    _table(world, "db.a")
    _table(world, "db.b")

    summaries = world.worker(tables=["db.b"]).run_once()

    assert [s.table for s in summaries] == ["db.b"]
    assert world.service.completions("db.a") == 0


def test_once_does_not_chase_rows_that_come_later(world: TieringWorld) -> None:
    _table(world, "db.t")
    came = threading.Event()

    def more_rows_come(step: str) -> None:
        if step == "files-written" and not came.is_set():
            came.set()
            world.service.append("db.t", 0, rows(50, 5))

    (summary,) = world.worker(checkpoint=more_rows_come).run_once()

    assert (summary.rounds, summary.row_count) == (1, 10)


def test_tables_whose_tiering_is_off_are_passed_over_unless_named(world: TieringWorld) -> None:
    _table(world, "db.off", properties={"table.datalake.enabled": "false"})

    assert world.worker().run_once() == []
    with pytest.raises(UnsupportedError, match=r"'db\.off' cannot be tiered: its property"):
        world.worker(tables=["db.off"]).run_once()


def test_an_unknown_table_is_an_error(world: TieringWorld) -> None:
    with pytest.raises(TableNotFoundError, match=r"db\.nowhere"):
        world.worker(tables=["db.nowhere"]).run_once()


def test_a_table_that_fails_does_not_hold_up_the_others(world: TieringWorld) -> None:
    _table(world, "db.a")
    _table(world, "db.b")
    world.service.expire_log("db.a", 0, 4)

    first, second = world.worker().run_once()

    assert "offsets 0 to 3 are neither in the lake nor in the log" in first.text()
    assert (second.row_count, second.error) == (10, None)


@pytest.mark.parametrize(("shares_log", "lines"), [(False, 1), (True, 0)])
def test_a_failed_round_is_one_line_of_a_log(
    world: TieringWorld, caplog: pytest.LogCaptureFixture, shares_log: bool, lines: int
) -> None:
    """The service's own line names the failure: a worker in its process adds none."""
    _table(world, "db.a")
    world.service.expire_log("db.a", 0, 4)

    with caplog.at_level(logging.INFO):
        world.worker(shares_log=shares_log).run_once()

    assert sum("event=round_failed" in message for message in caplog.messages) == lines


def test_a_passing_failure_is_tried_again(world: TieringWorld) -> None:
    _table(world, "db.t")
    failures = iter([UnavailableError("a moment")])

    def fail_once(_: int, pages: Iterator[LogBatch]) -> Iterator[LogBatch]:
        for failure in failures:
            raise failure
        return pages

    world.service.on_read = fail_once

    (summary,) = world.worker().run_once()

    assert (summary.failures, summary.error, summary.row_count) == (1, None, 10)


def test_a_table_another_worker_holds_is_waited_for(world: TieringWorld) -> None:
    _table(world, "db.t")
    other = world.round(world.claim())
    stopping = _Stopping(lambda _: other.run())

    (summary,) = world.worker(stopping=stopping).run_once()

    assert (summary.rounds, summary.error) == (0, None)
    assert world.addresses() == [(0, offset) for offset in range(10)]


def test_a_table_that_is_never_given_out_ends_in_an_error(world: TieringWorld) -> None:
    _table(world, "db.t")
    world.claim()

    (summary,) = world.worker(patience_s=0.0).run_once()

    assert "could not be claimed for 0 s: leased" in summary.text()


def test_a_table_dropped_meanwhile_is_reported(world: TieringWorld) -> None:
    _table(world, "db.a")
    _table(world, "db.b")

    def drop_first() -> None:
        if "db.a" in world.service.list_tables():
            world.service.drop_table("db.a")

    world.service.on_claim = drop_first

    first, second = world.worker().run_once()

    assert isinstance(first.error, TableNotFoundError)
    assert second.row_count == 10


def test_forever_tiers_what_comes_until_it_is_stopped(world: TieringWorld) -> None:
    _table(world, "db.t")
    completed = threading.Semaphore(0)
    worker = world.worker(
        checkpoint=lambda step: completed.release() if step == "completed" else None
    )
    thread = threading.Thread(target=worker.run_forever)
    thread.start()
    assert completed.acquire(timeout=60)
    world.service.append("db.t", 0, rows(10, 5))
    assert completed.acquire(timeout=60)

    worker.stop()
    thread.join(60)

    assert not thread.is_alive()
    assert world.addresses() == [(0, offset) for offset in range(15)]


class _Stopping(threading.Event):
    """Says `on_wait` how long it was to be waited for, and does not wait."""

    def __init__(self, on_wait: Callable[[float | None], object]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        self._on_wait(timeout)
        return self.is_set()


def _forever(world: TieringWorld, *answers: Any) -> list[float]:
    """Run the loop over scripted answers to its claims; return how long it waited after each."""
    script = list(answers)
    waits: list[float] = []
    worker = world.worker(tables_in_flight=1, stopping=_Stopping(waits.append))

    def claim() -> Any:
        if len(script) == 1:
            worker.stop()
        answer = script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    world.service.on_claim = claim
    worker.run_forever()
    return waits


def test_idle_waits_as_long_as_the_service_says_within_bounds(world: TieringWorld) -> None:
    waits = _forever(
        world,
        TieringIdle(reason="not_due", retry_after_ms=70),
        TieringIdle(reason="no_tables", retry_after_ms=3_600_000),
    )

    assert waits == [0.07, 5.0]


def test_an_unreachable_service_is_asked_less_and_less_often(world: TieringWorld) -> None:
    waits = _forever(world, *[UnavailableError("down")] * 7)

    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_service_whose_disk_is_full_is_asked_again(world: TieringWorld) -> None:
    idle = TieringIdle(reason="leased", retry_after_ms=50)

    waits = _forever(world, StorageFailedError("disk full"), idle)

    assert waits == [0.2, 0.05]


def test_a_wrong_token_ends_the_loop(world: TieringWorld) -> None:
    with pytest.raises(UnauthorizedError):
        _forever(world, UnauthorizedError("wrong token"), None)


def test_a_bug_in_one_table_is_reported_and_the_loop_goes_on(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _table(world, "db.t")
    assignment = world.claim()
    around(monkeypatch, "round-planning", lambda *_, **__: {}["not there"])

    waits = _forever(world, assignment, TieringIdle(reason="leased", retry_after_ms=50))

    assert waits == [0.05]
    assert world.service.failures("db.t") == ["internal: KeyError: 'not there'"]
    assert "event=bug table=" in caplog.text


def test_stopping_ends_the_running_round_early_and_gives_the_claim_back(
    world: TieringWorld,
) -> None:
    _table(world, "db.t")
    worker = world.worker(tables_in_flight=1)
    worker.checkpoint = lambda step: worker.stop() if step == "planned" else None

    worker.run_forever()

    assert world.lake_table().current_snapshot() is None
    assert world.data_files() == []
    assert "cancelled" in world.service.failures("db.t")[0]
