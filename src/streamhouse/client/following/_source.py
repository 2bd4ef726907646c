"""Source: the batches of one table, pulled by a subscription, with an end on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from streamhouse.client.following._consumer_position import ConsumerPosition
from streamhouse.client.http._stop_signal import STOP, StopSignal
from streamhouse.core.errors import InvalidRequestError, StreamhouseError

__all__ = ["Source"]

_B = TypeVar("_B")


class Source(Generic[_B]):
    """The batches of one table, endless until `end` is called.

    Args:
        table: the table's path.
        batches: yields the batches; its requests to the service break off when `stop` is set.
        stop: the signal that `end` sets.
        note: tells the consumer's position the end of a batch.
        consumer_position: the position of a named reader.
        no_commit: the reason why positions cannot be committed, if any.
    """

    def __init__(
        self,
        table: str,
        batches: Generator[_B, None, None],
        *,
        stop: StopSignal,
        note: Callable[[ConsumerPosition, _B], None] | None = None,
        consumer_position: ConsumerPosition | None = None,
        no_commit: str = "",
    ) -> None:
        self.table = table
        self._batches = batches
        self._stop = stop
        self._note = note
        self._consumer_position = consumer_position
        self._no_commit = no_commit
        self._turn = threading.Lock()
        self._ended = threading.Event()

    def note_request(self) -> None:
        """Note that the reader requests the next batch."""
        if self._consumer_position is not None:
            self._consumer_position.batch_requested()

    def note_delivery(self, batch: _B) -> None:
        """Note that the reader has this batch."""
        if self._consumer_position is not None and self._note is not None:
            self._note(self._consumer_position, batch)

    def commit(self) -> None:
        """Report all delivered batches as read; durable on return."""
        if self._consumer_position is None:
            raise InvalidRequestError(self._no_commit)
        self._consumer_position.commit()

    def pull(self) -> _B | None:
        """Wait for the next batch and return it; None when the source was ended."""
        try:
            with self._turn:
                if self._stop.is_set():
                    return None
                token = STOP.set(self._stop)
                try:
                    return next(self._batches, None)
                except StreamhouseError:
                    # An error caused by the end is no failure.
                    if self._stop.is_set():
                        return None
                    raise
                finally:
                    STOP.reset(token)
        finally:
            self._end_if_stopped()

    def end(self) -> None:
        """End a wait in `pull`, and release the connection; from any thread, idempotent."""
        self._stop.set()
        self._end_if_stopped()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the source has ended, at most for `timeout_s`."""
        self._ended.wait(timeout_s)

    def _end_if_stopped(self) -> None:
        # Otherwise the thread that has the turn ends the source after its turn.
        if self._stop.is_set() and self._turn.acquire(blocking=False):
            try:
                if not self._ended.is_set():
                    self._batches.close()
                    if self._consumer_position is not None:
                        self._consumer_position.close()
                    self._ended.set()
            finally:
                self._turn.release()
