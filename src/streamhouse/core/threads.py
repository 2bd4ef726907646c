"""Every thread and pool of threads, with a name and a bound.

No other module makes a thread (tests/architecture/test_threads.py), so `thread_figures` lists all
threads of a process that are ours. A pool starts its threads with the first calls.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

__all__ = [
    "NamedThread",
    "Pool",
    "ThreadFigures",
    "thread_figures",
    "timer",
    "yield_to_event_loop",
]

_SWITCH_INTERVAL_S: Final = 0.0005

# A plain dict: its values are listed in one step, while other threads add and remove entries.
_REGISTERED: Final[dict[int, weakref.ref[Pool | threading.Thread]]] = {}
_NUMBERS: Final = itertools.count()
_NUMBER_OF_THREAD: Final = re.compile(r"_\d+$")


def yield_to_event_loop() -> None:
    """Have busy threads of this process yield to the event loop at once, not after 5 ms."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


class Pool(ThreadPoolExecutor):
    """At most `bound` threads for calls; the threads' names are `name_0`, `name_1` and so on."""

    def __init__(self, name: str, bound: int) -> None:
        super().__init__(bound, thread_name_prefix=name)
        self.name = name
        self.bound = bound
        self._registered = _register(self)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the pool, and leave the list of threads."""
        _REGISTERED.pop(self._registered, None)
        super().shutdown(wait, cancel_futures=cancel_futures)


class NamedThread(threading.Thread):
    """A daemon thread for one function; with `number`, one of several threads of the name."""

    def __init__(
        self,
        name: str,
        target: Callable[..., Any],
        args: Iterable[Any] = (),
        *,
        number: int | None = None,
    ) -> None:
        full_name = name if number is None else f"{name}_{number}"
        super().__init__(target=target, args=args, name=full_name, daemon=True)
        _register(self)


def timer(name: str, seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Return a started timer that calls `function` on a daemon thread, unless cancelled before."""
    started = threading.Timer(seconds, function)
    started.name, started.daemon = name, True
    _register(started)
    started.start()
    return started


class ThreadFigures(NamedTuple):
    """The threads of one name: alive now, and at most."""

    name: str
    alive: int
    bound: int


def thread_figures() -> list[ThreadFigures]:
    """Return the figures of every name with a pool or a thread that is alive, sorted by name."""
    alive = Counter(_NUMBER_OF_THREAD.sub("", thread.name) for thread in threading.enumerate())
    bounds: Counter[str] = Counter()
    for reference in list(_REGISTERED.values()):
        user = reference()
        if isinstance(user, Pool):
            bounds[user.name] += user.bound
        elif user is not None and user.is_alive():
            bounds[_NUMBER_OF_THREAD.sub("", user.name)] += 1
    return [ThreadFigures(name, alive[name], bound) for name, bound in sorted(bounds.items())]


def _register(user: Pool | threading.Thread) -> int:
    number = next(_NUMBERS)
    _REGISTERED[number] = weakref.ref(user, lambda _: _REGISTERED.pop(number, None))
    return number
