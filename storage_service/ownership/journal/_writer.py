"""Operations go to the journal: in groups, several on their way, complete in order.

Promises, beside those of `pipeline.py`:
- what somebody waits for is sent at once if nothing is on its way, else together with what comes
  within `linger_ms`; what nobody waits for lingers 50 ms at least, but not so long that it would
  be `lag_ms_max` behind. What is large goes at once
- a store that is away is tried for as long as it takes; meanwhile little is held, then `record`
  waits. A process that is fenced is told so exactly once

Threads: any may record; `in_flight_max` threads send, and one looks whether somebody took over
while nothing is sent. Callbacks run on the threads that send, one after the other.
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
# So much does not linger: an object of it costs little for its bytes.
_SEND_BYTES: Final = 1 << 20
# What nobody waits for: fewer objects are less work for us and for the store.
_UNWANTED_SEND_BYTES: Final = 4 << 20
_UNWANTED_LINGER_MS_MIN: Final = 50.0
_WARN_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How much is sent together and held, and how far behind the journal may be by choice."""

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
        """`put_took` is told how many seconds each object took to be stored."""
        self._store = store
        self._options = options or WriterOptions()
        self._on_fenced = on_fenced
        self._put_took = put_took
        self._pipeline = Pipeline(tenure)
        self._lock = threading.Lock()
        # One for each who waits, so that nobody is woken for what is another's.
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._waiting: deque[tuple[Operation, int, float]] = deque()
        self._waiting_bytes = 0
        self._sent_bytes = 0
        self._recorded = 0
        # When what is not stored was recorded: (position after it, time), oldest first.
        self._unstored: deque[tuple[int, float]] = deque()
        # Somebody waits for all before it.
        self._wanted = 0
        # When a thread looks for work by itself, at the latest; one is enough.
        self._looks_s = math.inf
        # Whether a thread was told to look for work, and has not done so yet.
        self._is_told = False
        self._callbacks: list[tuple[int, int, Callable[[], None]]] = []
        self._callback_ids = itertools.count()
        self._is_calling = False
        self._roll_wanted = False
        self._is_stopping = False
        self._is_over = threading.Event()
        self._fenced: str | None = None
        self._warned_s = 0.0
        self.objects_stored = 0
        self.bytes_stored = 0
        self.failures = 0
        threads = [self._send_all] * self._options.in_flight_max + [self._look]
        self._threads = [
            threading.Thread(target=target, name=f"journal-{number}", daemon=True)
            for number, target in enumerate(threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- what is recorded ------------------------------------------------------------------------

    def record(self, operation: Operation) -> int:
        """Take an operation; return the position after it. Its data must not change any more.

        Waits while too much waits to be stored, but never on a thread that stores (in a
        callback). Raises `NotOwnerError` once the process is fenced or has stopped.
        """
        return self.record_all((operation,))

    def record_all(self, operations: Sequence[Operation]) -> int:
        """Take operations that belong together; return the position after them."""
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
            self._tell()
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
        """The epoch that is written to; it grows when the writer rolls."""
        return self._pipeline.tenure.epoch

    @property
    def is_opening(self) -> bool:
        """Whether the next epoch may be open already, and this process does not know it yet."""
        with self._lock:
            return self._pipeline.ended_for is not None

    @property
    def in_flight(self) -> int:
        """How many objects are on their way."""
        return self._pipeline.in_flight

    @property
    def lag_ms(self) -> float:
        """How long the oldest operation that is not stored has waited; 0 if there is none."""
        with self._lock:
            return 1e3 * self._lag_s()

    @property
    def lag_bytes(self) -> int:
        """The bytes that are not stored."""
        return self._waiting_bytes + self._sent_bytes

    def when_stored(self, position: int, then: Callable[[], None]) -> None:
        """See `Replica.when_stored`."""
        with self._lock:
            heapq.heappush(self._callbacks, (position, next(self._callback_ids), then))
            self._want(position)
        self._call()

    def wait_stored(self, position: int) -> None:
        """See `Replica.wait_stored`. Raises `NotOwnerError` once the process is fenced."""
        with self._lock:
            self._want(position)
            # Even if it was wanted before: this may be the thread that would have sent it next.
            self._tell()
            while self._pipeline.stored_position < position:
                if self._is_over.is_set():
                    raise NotOwnerError(self._fenced or "the service has stopped")
                self._progress.wait()

    def gather(self) -> None:
        """See `Replica.gather`: as long as what is recorded would linger, at most."""
        end_s = time.monotonic() + self._options.linger_ms / 1e3
        with self._lock:
            while self._pipeline.in_flight and not self._is_over.is_set():
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    break
                self._progress.wait(left_s)

    def place_of(self, position: int) -> tuple[Place, int]:
        """Return the object with the operation at a stored position, and its number in it.

        That of the object to come if nothing was recorded from there on.
        """
        with self._lock:
            return self._pipeline.place_of(position)

    def roll(self, *, is_empty_left: bool = False) -> None:
        """Go on in a new epoch, soon: only what lies before the newest epoch may be trimmed.

        Not from one that has nothing yet, unless `is_empty_left`: a lease that ran out never holds
        again in its epoch.
        """
        with self._lock:
            if is_empty_left or self._pipeline.next_place.seq > 1:
                self._roll_wanted = True
                self._tell()

    def stop(self, *, timeout_s: float) -> bool:
        """Store everything, seal the epoch, end. False if that took too long: not sealed."""
        with self._lock:
            self._is_stopping = True
            self._work.notify_all()
        is_sealed = self._is_over.wait(timeout_s) and self._fenced is None
        self._end(None)
        return is_sealed

    def abandon(self) -> None:
        """End as if the process was killed: nothing further is sent, nothing is sealed."""
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
        """Wait until something is to be sent, and return it; None at the end."""
        with self._lock:
            while not self._is_over.is_set():
                self._is_told = False
                due_s, now_s = self._due_s(), time.monotonic()
                if due_s <= now_s:
                    sent = self._sent()
                    self._sent_bytes += sent.size_bytes
                    # What is left may be due, too, or somebody has to wait until it is.
                    self._tell()
                    return sent
                if due_s >= self._looks_s:
                    self._work.wait()
                    continue
                self._looks_s = due_s
                self._work.wait(due_s - now_s)
                # Unless another one looks earlier by now.
                if self._looks_s == due_s:
                    self._looks_s = math.inf
            return None

    def _want(self, position: int) -> None:
        """Let what lies before a position be sent without more delay."""
        if position > self._wanted:
            self._wanted = position
            self._tell()

    def _tell(self) -> None:
        """Wake one thread if there is work that none will find in time."""
        if not self._is_told and self._due_s() < self._looks_s:
            self._is_told = True
            self._work.notify()

    def _due_s(self) -> float:
        """Return when something is to be sent, infinity while that is not known."""
        if not self._pipeline.has_room:
            return math.inf
        if self._roll_wanted or self._is_stopping:
            # A gap before an owner's own seal is a loss: the seal comes once all else is stored.
            is_seal_next = not (self._is_stopping and self._waiting)
            return math.inf if is_seal_next and self._pipeline.in_flight else -math.inf
        if not self._waiting:
            return math.inf
        is_wanted = self._wanted > self._pipeline.sent_position
        send_bytes = _SEND_BYTES if is_wanted else _UNWANTED_SEND_BYTES
        if self._waiting_bytes >= send_bytes or (is_wanted and not self._pipeline.in_flight):
            return -math.inf
        linger_ms = self._options.linger_ms
        if not is_wanted:
            # Acknowledged or not, it goes with its machine: most of that time is for the store.
            linger_ms = min(max(linger_ms, _UNWANTED_LINGER_MS_MIN), self._options.lag_ms_max / 4)
        return self._waiting[0][2] + linger_ms / 1e3

    def _sent(self) -> Sent:
        if self._is_stopping and not self._waiting:
            return self._pipeline.seal(SealReason.STOPPED)
        if self._roll_wanted and not self._is_stopping:
            self._roll_wanted = False
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
        run(sent.steps(), self._take)
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
            # Only the last of an epoch's objects to be stored finds it so.
            reason = self._pipeline.ended_for
            self._progress.notify_all()
            self._room.notify_all()
        self._call()
        # This thread looks for work next: to wake another one for it would cost more.
        if reason == SealReason.STOPPED:
            self._end(None)
        elif reason is not None:
            tenure = run(self._pipeline.next_epoch(), self._take)
            with self._lock:
                self._pipeline.rolled(tenure)
                self._work.notify_all()

    def _take(self, step: Step) -> Any:
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

    def _look(self) -> None:
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

    # -- what others learn -----------------------------------------------------------------------

    def _call(self) -> None:
        """Call what waits for positions that are stored; one thread at a time does."""
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
        """End all threads; the first reason to be fenced is told."""
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
