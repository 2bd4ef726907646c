"""Tasks in threads: all results, or the first error with no task left running."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from streamhouse.core.errors import UnavailableError
from streamhouse.tiering.worker.thread_runner import ThreadRunner


def _run(runner: ThreadRunner, splits: list[Any], **more: Any) -> list[Any]:
    arguments = {"on_rows": lambda _: None, "is_cancelled": lambda: False, **more}
    return runner.run(splits, **arguments)


def test_there_is_one_result_a_split() -> None:
    runner = ThreadRunner(2, run=lambda split, **_: split * 10)

    assert sorted(_run(runner, [1, 2, 3, 4, 5])) == [10, 20, 30, 40, 50]
    assert _run(runner, []) == []


def test_no_more_tasks_run_at_once_than_told() -> None:
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def task(split: int, **_: Any) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(60)
        with lock:
            running -= 1
        return split

    _run(ThreadRunner(2, run=task), list(range(6)))

    assert most == 2


def test_the_first_error_stops_the_others_and_is_raised() -> None:
    has_started, states = threading.Event(), []

    def task(split: str, *, is_cancelled: Any, **_: Any) -> str:
        if split == "fails":
            assert has_started.wait(60)
            raise UnavailableError("the disk is gone")
        has_started.set()
        while not is_cancelled():
            threading.Event().wait(0.001)
        states.append("stopped")
        raise UnavailableError("cancelled")

    with pytest.raises(UnavailableError, match="the disk is gone"):
        _run(ThreadRunner(2, run=task), ["runs", "fails", "never starts", "neither"])

    assert states == ["stopped"]


def test_progress_and_cancellation_reach_the_tasks() -> None:
    seen: list[int] = []

    def task(split: int, *, on_rows: Any, is_cancelled: Any) -> bool:
        on_rows(split)
        return bool(is_cancelled())

    results = _run(
        ThreadRunner(1, run=task), [3, 4], on_rows=seen.append, is_cancelled=lambda: True
    )

    assert (seen, results) == ([3, 4], [True, True])


def test_by_default_there_is_a_thread_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 5)

    assert ThreadRunner().parallelism == 5
    assert ThreadRunner(3).parallelism == 3
