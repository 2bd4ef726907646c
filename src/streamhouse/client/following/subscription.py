"""Subscription: the batches of tables, delivered as they arrive.

Iteration over a single table pulls its batches in the caller's thread. `poll`, and a subscription
to several tables, use a pulling thread for each table.

Invariants:
- a thread pulls a batch on request, and the next batch only after the delivery: a subscription has
  one batch of each table in memory, and a table waits at most for a batch of every other table
- `close` ends every wait of every thread; a failure of one table closes the subscription and is
  raised once
- a thread refers to its source and to the handover, not to the subscription: an unreferenced
  subscription therefore ends
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from streamhouse.client.following._source import Source
from streamhouse.client.values.arguments import checked_calls
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.threads import NamedThread

__all__ = ["TABLES_MAX", "Subscription", "poll_now"]

TABLES_MAX: Final = 100
"""Of one subscription: each table has a connection, and may have a thread."""

_END_S_MAX: Final = 2.0

_B = TypeVar("_B")


@checked_calls
class Subscription(Generic[_B]):
    """Batches of tables as they become durable: iterate, or `poll`.

    Use a `with` block, or call `close`. Any thread may request batches and close.
    """

    def __init__(self, sources: Sequence[Source[_B]]) -> None:
        self._sources = tuple(sources)
        self._pullers: tuple[_Puller[_B], ...] = ()
        self._handover = _Handover[_B]()

    def __repr__(self) -> str:
        return f"Subscription({self._names()}{', closed' if self.is_closed else ''})"

    def __enter__(self) -> Subscription[_B]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A subscription whose constructor raised has nothing to close.
        if hasattr(self, "_handover"):
            self.close()

    def __iter__(self) -> Subscription[_B]:
        return self

    def __next__(self) -> _B:
        """Wait for the next batch; the iteration ends when the subscription is closed."""
        if self.is_closed:
            raise StopIteration
        if not self._pullers and len(self._sources) == 1:
            return self._pull_in_caller(self._sources[0])
        batches = self._next_batches(1, timeout_s=None)
        if not batches:
            raise StopIteration
        return batches[0]

    @property
    def tables(self) -> tuple[str, ...]:
        """The paths of the followed tables."""
        return tuple(source.table for source in self._sources)

    @property
    def is_closed(self) -> bool:
        """Whether the subscription ended: by `close`, by the client's `close`, or by a failure."""
        return self._handover.is_closed

    def poll(self, timeout_s: float | None = None) -> list[_B]:
        """Return the arrived batches, at most one of each table.

        Without any, wait `timeout_s` for the first, by default without an end. The list is empty if
        no batch arrived, or if the subscription was closed meanwhile.

        Raises:
            InvalidRequestError: the subscription was closed before.
        """
        if self.is_closed:
            raise InvalidRequestError(f"the subscription to {self._names()} is closed")
        return self._next_batches(len(self._sources), timeout_s=timeout_s)

    def commit(self) -> None:
        """Report every batch delivered so far as read; durable on return.

        A subscription with `start="committed"` and the same `consumer` begins there, also after a
        crash of the service, and in another process.

        Raises:
            InvalidRequestError: the subscription has no `consumer`, or began with `full`.
        """
        for source in self._sources:
            source.commit()

    def close(self) -> None:
        """End the subscription and all waits for batches. From any thread; idempotent."""
        if not self._handover.close():
            return
        for puller in self._pullers:
            puller.request()
        for source in self._sources:
            source.end()
        # The last positions are reported before the client is closed.
        if threading.current_thread() not in {puller.thread for puller in self._pullers}:
            for source in self._sources:
                source.wait_ended(_END_S_MAX)

    def on_ready(self, call: Callable[[], Any]) -> None:
        """Have `call` called, on any thread, when a batch may have arrived, or at the end."""
        self._handover.listeners.append(call)

    def _names(self) -> str:
        return ", ".join(f"'{name}'" for name in self.tables)

    def _pull_in_caller(self, source: Source[_B]) -> _B:
        try:
            source.note_request()
            batch = source.pull()
            if batch is None:
                raise StopIteration
            source.note_delivery(batch)
        except BaseException:
            # After any exception the source cannot go on.
            self.close()
            raise
        return batch

    def _next_batches(self, count_max: int, *, timeout_s: float | None) -> list[_B]:
        """Return the first batches to arrive; a failure ends the subscription."""
        batches, failure = self._take_batches(count_max, timeout_s=timeout_s)
        if failure is not None:
            self.close()
            raise failure
        return batches

    def _take_batches(
        self, count_max: int, *, timeout_s: float | None
    ) -> tuple[list[_B], BaseException | None]:
        """Request every table's next batch; return the first `count_max` batches, or a failure."""
        with self._handover.changed:
            if not self._pullers and not self.is_closed:
                self._pullers = tuple(_Puller(source, self._handover) for source in self._sources)
            for puller in self._pullers:
                if puller.is_idle:
                    puller.is_idle = False
                    puller.source.note_request()
                    puller.request()
            batches = self._handover.take_ready(count_max, timeout_s=timeout_s)
            for puller, batch in batches:
                puller.is_idle = True
                puller.source.note_delivery(batch)
            failure = None if batches else self._handover.failure
        return [batch for _, batch in batches], failure


def poll_now(subscription: Subscription[_B]) -> _B | None:
    """Return a batch if one has arrived; the calls of `on_ready` say when to try again.

    The function never blocks, and so suits the thread of an event loop. A closed subscription
    returns None. The caller that gets a table's failure closes the subscription.
    """
    if subscription.is_closed:
        return None
    batches, failure = subscription._take_batches(1, timeout_s=0)
    if failure is not None:
        raise failure
    return batches[0] if batches else None


class _Handover(Generic[_B]):
    """The batches on their way from the pulling threads to the callers."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a subscription in the thread that holds the
        # lock.
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False
        self.failure: BaseException | None = None
        self.listeners: list[Callable[[], Any]] = []
        self._ready: deque[tuple[_Puller[_B], _B]] = deque()

    def put(self, puller: _Puller[_B], batch: _B) -> None:
        with self.changed:
            self._ready.append((puller, batch))
            self._notify()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self._notify()

    def close(self) -> bool:
        """End every wait; return whether the handover was open."""
        with self.changed:
            was_open, self.is_closed = not self.is_closed, True
            self._ready.clear()
            self._notify()
            return was_open

    def take_ready(
        self, count_max: int, *, timeout_s: float | None
    ) -> list[tuple[_Puller[_B], _B]]:
        """Wait for batches, and take up to `count_max`; the caller holds `changed`."""
        self.changed.wait_for(
            lambda: self._ready or self.is_closed or self.failure is not None, timeout_s
        )
        return [self._ready.popleft() for _ in range(min(count_max, len(self._ready)))]

    def _notify(self) -> None:
        self.changed.notify_all()
        for call in self.listeners:
            call()


class _Puller(Generic[_B]):
    """A thread, pulling a batch at each request."""

    def __init__(self, source: Source[_B], handover: _Handover[_B]) -> None:
        self.source = source
        self.is_idle = True
        """Whether the requested batch was delivered; guarded by the handover."""
        self._requests = threading.Semaphore(0)
        self._handover = handover
        self.thread = NamedThread(f"streamhouse-subscription-{source.table}", self._run)
        self.thread.start()

    def request(self) -> None:
        """Wake the thread: the thread pulls a batch, or sees the closed subscription."""
        self._requests.release()

    def _run(self) -> None:
        with contextlib.suppress(_Ended):
            while True:
                self._requests.acquire()
                self._pull()

    def _pull(self) -> None:
        if self._handover.is_closed:
            raise _Ended
        try:
            batch = self.source.pull()
        except BaseException as error:
            self._handover.fail(error)
            raise _Ended from error
        if batch is None:
            raise _Ended
        self._handover.put(self, batch)


class _Ended(Exception):
    """The thread has nothing more to pull."""
