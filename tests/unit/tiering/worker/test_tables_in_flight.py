"""How many rounds run at once, and when the worker asks for the next."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker._tables_in_flight import TablesInFlight
from tests.support.held_step import around
from tests.support.tiering_world import TieringWorld, rows

WAIT_S = 30.0


class _Rounds:
    """Rounds that last until they are told to end."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.ends = threading.Semaphore(0)
        self.running = 0
        self.running_max = 0
        self.has_more = True
        self._lock = threading.Lock()

    def __call__(self, assignment: TieringAssignment) -> bool:
        with self._lock:
            self.running += 1
            self.running_max = max(self.running_max, self.running)
        self.started.release()
        assert self.ends.acquire(timeout=WAIT_S)
        with self._lock:
            self.running -= 1
        return self.has_more


def _assignments(world: TieringWorld, count: int) -> list[TieringAssignment]:
    found = []
    for number in range(count):
        world.create_table(f"db.t{number}")
        world.service.append(f"db.t{number}", 0, rows(0, 3))
        found.append(world.claim(f"db.t{number}"))
    return found


def test_as_many_rounds_run_at_once_as_there_are_slots(world: TieringWorld) -> None:
    rounds = _Rounds()
    with TablesInFlight(rounds, slots=2, stopping=threading.Event()) as in_flight:
        first, second, third = _assignments(world, 3)
        in_flight.start(first)
        in_flight.start(second)
        for _ in range(2):
            assert rounds.started.acquire(timeout=WAIT_S)
        rounds.ends.release()
        in_flight.wait_for_slot()
        in_flight.start(third)
        rounds.ends.release(2)

    assert rounds.running_max == 2
    assert rounds.running == 0


def test_a_round_that_left_rows_behind_ends_the_wait(world: TieringWorld) -> None:
    rounds = _Rounds()
    with TablesInFlight(rounds, slots=2, stopping=threading.Event()) as in_flight:
        in_flight.start(_assignments(world, 1)[0])
        assert rounds.started.acquire(timeout=WAIT_S)
        rounds.ends.release()

        # It would be an hour otherwise.
        in_flight.wait_idle(3_600)


def test_stopping_ends_the_wait(world: TieringWorld) -> None:
    stopping, rounds = threading.Event(), _Rounds()
    rounds.has_more = False
    with TablesInFlight(rounds, slots=2, stopping=stopping) as in_flight:
        in_flight.start(_assignments(world, 1)[0])
        stopping.set()
        rounds.ends.release()

        in_flight.wait_idle(3_600)


def test_a_table_claimed_again_waits_for_its_own_round_to_end(world: TieringWorld) -> None:
    rounds = _Rounds()
    (assignment,) = _assignments(world, 1)
    with TablesInFlight(rounds, slots=2, stopping=threading.Event()) as in_flight:
        in_flight.start(assignment)
        in_flight.start(assignment)
        assert rounds.started.acquire(timeout=WAIT_S)
        rounds.ends.release(2)

    assert rounds.running_max == 1


def test_a_slow_table_does_not_hold_up_another(
    world: TieringWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table a's round stands still until table b's rows are in the lake."""
    for path in ("db.a", "db.b"):
        world.create_table(path)
        world.service.append(path, 0, rows(0, 5))
    is_b_done, names = threading.Event(), cast(dict[int, str], {})
    worker = world.worker(tables_in_flight=2)

    def run(real: Any, worker: TieringService, assignment: TieringAssignment) -> object:
        table = str(assignment.state.table.path)
        names[threading.get_ident()] = table
        if table == "db.a":
            assert is_b_done.wait(WAIT_S)
        result = real(worker, assignment)
        if table == "db.b":
            is_b_done.set()
        else:
            worker.stop()
        return result

    around(monkeypatch, "round-running", run)

    worker.run_forever()

    assert sorted(names.values()) == ["db.a", "db.b"]
    assert world.service.completions("db.a") == world.service.completions("db.b") == 1
