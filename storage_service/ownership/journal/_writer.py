"""Writes operations to the journal: in groups, several in flight, complete in order.

Promises, besides those of `_pipeline.py`:
- awaited operations are sent at once if nothing is in flight, else together with operations
  arriving within `linger_ms`; other operations linger 50 ms at least, but within `lag_ms_max`.
  Large groups are sent at once
- an unavailable store is retried without limit; meanwhile little is buffered, then `record` waits.
  A fenced process gets one call of `on_fenced`

Threads: any thread may record; `in_flight_max` threads send, and one thread looks for a new owner
while nothing is sent. Callbacks run on the sending threads, one after the other.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.core.errors import NotOwnerError
from streamhouse.core.threads import NamedThread
from streamhouse.storage_service.ownership.journal._pipeline import Fenced, Pipeline, Sent
from streamhouse.storage_service.ownership.journal.epochs import (
    IN_FLIGHT_MAX,
    SealReason,
    TakenByOtherError,
    Tenure,
)
from streamhouse.storage_service.ownership.journal.names import Place
from streamhouse.storage_service.ownership.journal.object_format import (
    BODY_BYTES_MAX,
    encoded_bytes,
)
from streamhouse.storage_service.ownership.journal.operations import Operation, check_path
from streamhouse.storage_service.ownership.journal.steps import Step, do, keep_trying, run, run_on
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectStore,
    ObjectStoreError,
)

__all__ = ["JournalWriter", "WriterOptions"]

_logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0
# Groups of this size do not linger: the cost of an object is small for its bytes.
_SEND_BYTES: Final = 1 << 20
# Without waiters: fewer objects are less work for the process and the store.
_UNAWAITED_SEND_BYTES: Final = 4 << 20
_UNAWAITED_LINGER_MS_MIN: Final = 50.0
_WARN_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Limits of groups and buffers, and the allowed lag of the journal."""

    linger_ms: float = 5.0
    lag_ms_max: float = math.inf
    in_flight_max: int = 4
    waiting_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        assert 0 < self.in_flight_max < IN_FLIGHT_MAX
        assert self.linger_ms >= 0
        assert self.lag_ms_max >= 0
        assert self.waiting_bytes_max > 0


class JournalWriter:
    """`Replica` of one owner. `on_fenced` gets a sentence, once, and should end the process."""

    def __init__(
        self,
        store: ObjectStore,
        tenure: Tenure,
        *,
        on_fenced: Callable[[str], None],
        options: WriterOptions | None = None,
        put_took: Callable[[float], None] | None = None,
    ) -> None:
        """`put_took` gets the seconds taken to store each object."""
        self._store = store
        self._options = options or WriterOptions()
        self._on_fenced = on_fenced
        self._put_took = put_took
        self._pipeline = Pipeline(tenure)
        self._lock = threading.Lock()
        # One condition for each kind of waiter, to avoid needless wake-ups.
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._waiting: deque[tuple[Operation, int, float]] = deque()
        self._waiting_bytes = 0
        self._sent_bytes = 0
        self._recorded = 0
        # Record times of operations not stored yet: (position after, time), oldest first.
        self._unstored: deque[tuple[int, float]] = deque()
        # The highest awaited position.
        self._awaited_position = 0
        # The next time a thread looks for work by itself; one thread is enough.
        self._looks_s = math.inf
        # Whether a thread was notified of work, and has not looked yet.
        self._is_notified = False
        self._callbacks: list[tuple[int, int, Callable[[], None]]] = []
        self._callback_ids = itertools.count()
        self._is_calling = False
        self._is_roll_requested = False
        self._is_stopping = False
        self._is_over = threading.Event()
        self._fenced: str | None = None
        self._warned_s = 0.0
        self.objects_stored = 0
        self.bytes_stored = 0
        self.failures = 0
        threads = [self._send_all] * self._options.in_flight_max + [self._watch_for_seal]
        self._threads = [
            NamedThread("journal", target, number=number) for number, target in enumerate(threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- recording --------------------------------------------------------------------------------

    def record(self, operation: Operation) -> int:
        """Record an operation; return the position after. Its data must not change any more.

        Waits while the buffer is full, but never on a sending thread (in a callback). Raises
        `NotOwnerError` once the process is fenced or has stopped.
        """
        return self.record_all((operation,))

    def record_all(self, operations: Sequence[Operation]) -> int:
        """Record a group of operations; return the position after the group."""
        sizes = [encoded_bytes(operation) for operation in operations]
        for operation in operations:
            check_path(operation)
        with self._lock:
            if threading.current_thread() not in self._threads:
                while not self._is_over.is_set() and self._is_full(sum(sizes)):
                    self._room.wait()
            if self._is_over.is_set() or self._is_stopping:
                raise NotOwnerError(self._fenced or "the service stops and records nothing more")
            now_s = time.monotonic()
            for operation, size in zip(operations, sizes, strict=True):
                self._waiting.append((operation, size, now_s))
            self._waiting_bytes += sum(sizes)
            self._recorded += len(operations)
            self._unstored.append((self._recorded, now_s))
            self._notify()
            return self._recorded

    @property
    def recorded_position(self) -> int:
        """See `Replica.recorded_position`."""
        return self._recorded

    @property
    def stored_position(self) -> int:
        """See `Replica.stored_position`."""
        return self._pipeline.stored_position

    @property
    def epoch(self) -> int:
        """The current epoch; a roll increases the number."""
        return self._pipeline.tenure.epoch

    @property
    def is_opening(self) -> bool:
        """Whether the next epoch may be open already, unknown to this process."""
        with self._lock:
            return self._pipeline.ended_for is not None

    @property
    def in_flight(self) -> int:
        """The number of objects in flight."""
        return self._pipeline.in_flight

    @property
    def lag_ms(self) -> float:
        """The age of the oldest operation not stored; 0 without one."""
        with self._lock:
            return 1e3 * self._lag_s()

    @property
    def lag_bytes(self) -> int:
        """The bytes not stored."""
        return self._waiting_bytes + self._sent_bytes

    def when_stored(self, position: int, callback: Callable[[], None]) -> None:
        """See `Replica.when_stored`."""
        with self._lock:
            heapq.heappush(self._callbacks, (position, next(self._callback_ids), callback))
            self._request(position)
        self._run_callbacks()

    def wait_stored(self, position: int) -> None:
        """See `Replica.wait_stored`. Raises `NotOwnerError` once the process is fenced."""
        with self._lock:
            self._request(position)
            # Also if awaited before: this may be the very thread about to send.
            self._notify()
            while self._pipeline.stored_position < position:
                if self._is_over.is_set():
                    raise NotOwnerError(self._fenced or "the service has stopped")
                self._progress.wait()

    def gather(self) -> None:
        """See `Replica.gather`: waits `linger_ms` at most."""
        end_s = time.monotonic() + self._options.linger_ms / 1e3
        with self._lock:
            while self._pipeline.in_flight and not self._is_over.is_set():
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._progress.wait(left_s)

    def place_of(self, position: int) -> tuple[Place, int]:
        """Return the object of the operation at a stored position, and the operation's number.

        Without later operations the result is the next object.
        """
        with self._lock:
            return self._pipeline.place_of(position)

    def roll(self, *, is_empty_left: bool = False) -> None:
        """Go on in a new epoch, soon: only objects before the newest epoch may be trimmed.

        An epoch without objects is not rolled, unless `is_empty_left`: an expired lease never holds
        again in its epoch.
        """
        with self._lock:
            if is_empty_left or self._pipeline.next_place.seq > 1:
                self._is_roll_requested = True
                self._notify()

    def stop(self, *, timeout_s: float) -> bool:
        """Store everything, seal the epoch, end. False after a timeout: not sealed."""
        with self._lock:
            self._is_stopping = True
            self._work.notify_all()
        is_sealed = self._is_over.wait(timeout_s) and self._fenced is None
        self._end(None)
        return is_sealed

    def abandon(self) -> None:
        """End like a killed process: nothing is sent or sealed any more."""
        self._end(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # -- threads that send -----------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            while (sent := self._next()) is not None:
                self._send(sent)
        except (Fenced, TakenByOtherError) as fenced:
            self._end(f"another process took over: {fenced}")
        except Exception as error:  # whatever it is, nothing can be acknowledged
            if not self._is_over.is_set():
                _logger.exception("event=journal_failed")
                self._end(f"the journal cannot be written: {error!r}")

    def _next(self) -> Sent | None:
        """Wait for the next object to send, and return the object; None at the end."""
        with self._lock:
            while not self._is_over.is_set():
                self._is_notified = False
                due_s, now_s = self._due_s(), time.monotonic()
                if due_s <= now_s:
                    sent = self._sent()
                    self._sent_bytes += sent.size_bytes
                    # Remaining operations may be due, too, or another thread has to wait for them.
                    self._notify()
                    return sent
                if due_s >= self._looks_s:
                    self._work.wait()
                    continue
                self._looks_s = due_s
                self._work.wait(due_s - now_s)
                # Unless another thread looks earlier by now.
                if self._looks_s == due_s:
                    self._looks_s = math.inf
            return None

    def _request(self, position: int) -> None:
        """Send operations before a position without more delay."""
        if position > self._awaited_position:
            self._awaited_position = position
            self._notify()

    def _notify(self) -> None:
        """Wake one thread if no thread would look for the work in time."""
        if not self._is_notified and self._due_s() < self._looks_s:
            self._is_notified = True
            self._work.notify()

    def _due_s(self) -> float:
        """Return the time of the next send, infinity while unknown."""
        if not self._pipeline.has_room:
            return math.inf
        if self._is_roll_requested or self._is_stopping:
            # A gap before an owner's own seal is a loss: the seal comes after all other objects.
            is_seal_next = not (self._is_stopping and self._waiting)
            return math.inf if is_seal_next and self._pipeline.in_flight else -math.inf
        if not self._waiting:
            return math.inf
        is_awaited = self._awaited_position > self._pipeline.sent_position
        send_bytes = _SEND_BYTES if is_awaited else _UNAWAITED_SEND_BYTES
        if self._waiting_bytes >= send_bytes or (is_awaited and not self._pipeline.in_flight):
            return -math.inf
        linger_ms = self._options.linger_ms
        if not is_awaited:
            # These operations are lost with the machine: most of the lag is reserved for the store.
            linger_ms = min(max(linger_ms, _UNAWAITED_LINGER_MS_MIN), self._options.lag_ms_max / 4)
        return self._waiting[0][2] + linger_ms / 1e3

    def _sent(self) -> Sent:
        if self._is_stopping and not self._waiting:
            return self._pipeline.seal(SealReason.STOPPED)
        if self._is_roll_requested and not self._is_stopping:
            self._is_roll_requested = False
            return self._pipeline.seal(SealReason.ROLLED)
        group: list[Operation] = []
        size_bytes = 0
        while self._waiting and (not group or size_bytes + self._waiting[0][1] <= BODY_BYTES_MAX):
            operation, size, _ = self._waiting.popleft()
            group.append(operation)
            size_bytes += size
        self._waiting_bytes -= size_bytes
        self._room.notify_all()
        return self._pipeline.send(group)

    def _send(self, sent: Sent) -> None:
        started_s = time.monotonic()
        run(sent.steps(), self._run_step)
        if self._put_took is not None:
            self._put_took(time.monotonic() - started_s)
        with self._lock:
            self._pipeline.stored(sent)
            position = self._pipeline.stored_position
            while self._unstored and self._unstored[0][0] <= position:
                self._unstored.popleft()
            self.objects_stored += 1
            self.bytes_stored += sent.size_bytes
            self._sent_bytes -= sent.size_bytes
            # Set only once the last object of an epoch is stored.
            reason = self._pipeline.ended_for
            self._progress.notify_all()
            self._room.notify_all()
        self._run_callbacks()
        # This thread looks for work next: waking another thread would cost more.
        if reason == SealReason.STOPPED:
            self._end(None)
        elif reason is not None:
            tenure = run(self._pipeline.next_epoch(), self._run_step)
            with self._lock:
                self._pipeline.rolled(tenure)
                self._work.notify_all()

    def _run_step(self, step: Step) -> Any:
        return keep_trying(
            lambda: do(self._store, step),
            pause=lambda s: not self._is_over.wait(s),
            failed=self._note_failure,
        )

    def _note_failure(self, error: ObjectStoreError) -> None:
        with self._lock:
            self.failures += 1
            is_news = time.monotonic() - self._warned_s > _WARN_EVERY_S
            if is_news:
                self._warned_s = time.monotonic()
        if is_news:
            _logger.warning("event=journal_store_failed error='%s'", error)

    def _watch_for_seal(self) -> None:
        """Look at the next place once a second while nothing is sent: a seal may be there."""
        while not self._is_over.wait(_LOOK_EVERY_S):
            with self._lock:
                place = self._pipeline.next_place
                is_idle = not self._waiting and not self._pipeline.in_flight
            if not is_idle:
                continue
            try:
                run_on(self._store, self._pipeline.look())
            except Fenced as fenced:
                with self._lock:
                    is_ours = self._pipeline.next_place != place
                if not is_ours:
                    self._end(f"another process took over: {fenced}")
            except ObjectStoreError as error:
                self._note_failure(error)

    # -- callbacks and the end --------------------------------------------------------------------

    def _run_callbacks(self) -> None:
        """Call the callbacks of stored positions; one thread at a time."""
        with self._lock:
            if self._is_calling:
                return
            self._is_calling = True
        try:
            while (callback := self._next_callback()) is not None:
                callback()
        except BaseException:
            self._is_calling = False
            raise

    def _next_callback(self) -> Callable[[], None] | None:
        with self._lock:
            is_due = self._callbacks and self._callbacks[0][0] <= self._pipeline.stored_position
            if not is_due or self._fenced is not None:
                self._is_calling = False
                return None
            return heapq.heappop(self._callbacks)[2]

    def _end(self, fenced: str | None) -> None:
        """End all threads; only the first reason counts."""
        with self._lock:
            if self._is_over.is_set():
                return
            self._fenced = fenced
            self._is_over.set()
            for waiters in (self._work, self._room, self._progress):
                waiters.notify_all()
        if fenced is not None:
            _logger.error("event=fenced reason='%s'", fenced)
            self._on_fenced(fenced)

    def _is_full(self, size_bytes: int) -> bool:
        is_over = self._waiting_bytes + size_bytes > self._options.waiting_bytes_max
        return bool(self._waiting) and is_over

    def _lag_s(self) -> float:
        return time.monotonic() - self._unstored[0][1] if self._unstored else 0.0
