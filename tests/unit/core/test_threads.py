"""Threads are listed by name, with how many are alive and at most."""

from __future__ import annotations

import gc
import threading

from streamhouse.core.threads import NamedThread, Pool, ThreadFigures, thread_figures, timer


def _figures(name: str) -> list[ThreadFigures]:
    return [figures for figures in thread_figures() if figures.name == name]


def test_a_pool_has_its_bound_and_the_threads_that_are_alive() -> None:
    release, begun = threading.Event(), threading.Barrier(3)

    def wait() -> None:
        begun.wait(60)
        release.wait(60)

    with Pool("pooled", 3) as pool:
        assert _figures("pooled") == [("pooled", 0, 3)]
        for _ in range(2):
            pool.submit(wait)
        begun.wait(60)
        assert _figures("pooled") == [("pooled", 2, 3)]
        with Pool("pooled", 5):
            assert _figures("pooled") == [("pooled", 2, 8)]
        assert _figures("pooled") == [("pooled", 2, 3)]
        release.set()
    assert _figures("pooled") == []
    forgotten = Pool("pooled", 1)
    del forgotten
    gc.collect()
    assert _figures("pooled") == []


def test_threads_of_a_name_are_counted_together_while_they_are_alive() -> None:
    release = threading.Event()
    threads = [NamedThread("numbered", release.wait, (60,), number=n) for n in range(2)]
    assert _figures("numbered") == []
    for thread in threads:
        thread.start()

    assert [thread.name for thread in threads] == ["numbered_0", "numbered_1"]
    assert all(thread.daemon for thread in threads)
    assert _figures("numbered") == [("numbered", 2, 2)]
    release.set()
    for thread in threads:
        thread.join()
    assert _figures("numbered") == []


def test_a_timer_calls_its_function_unless_it_is_cancelled() -> None:
    called = threading.Event()
    late = timer("late", 600, called.set)
    assert _figures("late") == [("late", 1, 1)]
    late.cancel()
    late.join()
    assert not called.is_set()

    timer("soon", 0, called.set).join()
    assert called.is_set()
