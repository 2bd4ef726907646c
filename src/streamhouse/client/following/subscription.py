"""Subscription: the batches of one table or of several, as they come.

Who iterates over one table pulls its batches in the thread that asks. Who polls, or follows
several tables, has one thread for each table that pulls from it.

Invariants:
- a thread pulls one batch when it is asked, and no other before that was handed out: a subscription
  has one batch of a table in memory, and no table waits longer than for one batch of each other
- `close` ends every wait, whoever waits; a failure of one table closes the whole and is raised once
- a thread refers to its table and to what it hands over, not to the subscription, which so ends
  when nobody refers to it any more
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from streamhouse.client.following._source import Source
from streamhouse.core.errors import InvalidRequestError

__all__ = ["TABLES_MAX", "Subscription", "taken_now"]

TABLES_MAX: Final = 100
"""Of one subscription: each has a connection, and may have a thread."""

_END_S_MAX: Final = 2.0

_B = TypeVar("_B")


class Subscription(Generic[_B]):
    """Batches of tables as they become durable: iterate over it, or `poll`.

    Use it in a `with` block, or `close` it; any thread may do that, and may ask for batches.
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
        # One that was refused when it was made has nothing to close.
        if hasattr(self, "_handover"):
            self.close()

    def __iter__(self) -> Subscription[_B]:
        return self

    def __next__(self) -> _B:
        """Wait for the next batch; the iteration ends when the subscription is closed."""
        if self.is_closed:
            raise StopIteration
        if not self._pullers and len(self._sources) == 1:
            return self._pulled_here(self._sources[0])
        found = self._taken(1, timeout_s=None)
        if not found:
            raise StopIteration
        return found[0]

    @property
    def tables(self) -> tuple[str, ...]:
        """The paths of the tables that it follows."""
        return tuple(source.table for source in self._sources)

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, by `close`, by its client's, or by a failure that was raised."""
        return self._handover.is_closed

    def poll(self, timeout_s: float | None = None) -> list[_B]:
        """Return the batches that are there, at most one of each table.

        If there are none, wait `timeout_s` for some, without it for ever; the list is empty if
        none came, or if the subscription was closed meanwhile.

        Raises:
            InvalidRequestError: the subscription was closed before.
        """
        if self.is_closed:
            raise InvalidRequestError(f"the subscription to {self._names()} is closed")
        return self._taken(len(self._sources), timeout_s=timeout_s)

    def commit(self) -> None:
        """Say that every batch that was handed out so far is read.

        It is durable on return: a subscription with `start="committed"` and the same `consumer`
        begins there, also after a crash of the service, and in another process.

        Raises:
            InvalidRequestError: the subscription has no `consumer`, or began with `full`.
        """
        for source in self._sources:
            source.commit()

    def close(self) -> None:
        """End it: who waits for a batch returns. From any thread; closing twice is fine."""
        if not self._handover.close():
            return
        for puller in self._pullers:
            puller.ask()
        for source in self._sources:
            source.end()
        # So that the last positions are said before the client is closed.
        if threading.current_thread() not in {puller.thread for puller in self._pullers}:
            for source in self._sources:
                source.wait_ended(_END_S_MAX)

    def on_ready(self, call: Callable[[], Any]) -> None:
        """Have `call` called, on some thread, when there may be something to poll, or it ended."""
        self._handover.listeners.append(call)

    def _names(self) -> str:
        return ", ".join(f"'{name}'" for name in self.tables)

    def _pulled_here(self, source: Source[_B]) -> _B:
        try:
            source.asked()
            batch = source.pull()
            if batch is None:
                raise StopIteration
            source.handed(batch)
        except BaseException:
            # Whatever it was, the source does not go on after it.
            self.close()
            raise
        return batch

    def _taken(self, most: int, *, timeout_s: float | None) -> list[_B]:
        """Return the first batches that come; a failure ends the subscription."""
        found, failure = self._found(most, timeout_s=timeout_s)
        if failure is not None:
            self.close()
            raise failure
        return found

    def _found(
        self, most: int, *, timeout_s: float | None
    ) -> tuple[list[_B], BaseException | None]:
        """Ask every table for its next batch; return the first `most` that come, or a failure."""
        with self._handover.changed:
            if not self._pullers and not self.is_closed:
                self._pullers = tuple(_Puller(one, self._handover) for one in self._sources)
            for puller in self._pullers:
                if puller.is_idle:
                    puller.is_idle = False
                    puller.source.asked()
                    puller.ask()
            found = self._handover.taken(most, timeout_s=timeout_s)
            for puller, batch in found:
                puller.is_idle = True
                puller.source.handed(batch)
            failure = None if found else self._handover.failure
        return [batch for _, batch in found], failure


def taken_now(subscription: Subscription[_B]) -> _B | None:
    """Return a batch if one is there; what `on_ready` calls says when to ask again.

    It never blocks, and so is for the thread of an event loop. None also of one that is closed; who
    is given the failure of a table closes it.
    """
    if subscription.is_closed:
        return None
    found, failure = subscription._found(1, timeout_s=0)
    if failure is not None:
        raise failure
    return found[0] if found else None


class _Handover(Generic[_B]):
    """Between the threads that pull and those that ask."""

    def __init__(self) -> None:
        # May be taken by who holds it: a collected subscription is closed wherever that happens.
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False
        self.failure: BaseException | None = None
        self.listeners: list[Callable[[], Any]] = []
        self._ready: deque[tuple[_Puller[_B], _B]] = deque()

    def put(self, puller: _Puller[_B], batch: _B) -> None:
        with self.changed:
            self._ready.append((puller, batch))
            self._tell()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self._tell()

    def close(self) -> bool:
        """End every wait; return whether it was open."""
        with self.changed:
            was_open, self.is_closed = not self.is_closed, True
            self._ready.clear()
            self._tell()
            return was_open

    def taken(self, most: int, *, timeout_s: float | None) -> list[tuple[_Puller[_B], _B]]:
        """Wait for what there is to take, and take it; holding `changed`."""
        self.changed.wait_for(
            lambda: self._ready or self.is_closed or self.failure is not None, timeout_s
        )
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def _tell(self) -> None:
        self.changed.notify_all()
        for call in self.listeners:
            call()


class _Puller(Generic[_B]):
    """A thread that pulls one batch whenever it is asked."""

    def __init__(self, source: Source[_B], handover: _Handover[_B]) -> None:
        self.source = source
        self.is_idle = True
        """Whether what it was asked for was handed out; guarded by the handover."""
        self._asked = threading.Semaphore(0)
        self._handover = handover
        self.thread = threading.Thread(
            target=self._run, name=f"streamhouse-subscription-{source.table}", daemon=True
        )
        self.thread.start()

    def ask(self) -> None:
        """Let it pull a batch, or see that the subscription is closed."""
        self._asked.release()

    def _run(self) -> None:
        with contextlib.suppress(_Ended):
            while True:
                self._asked.acquire()
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
    """Nothing is to be pulled any more."""
