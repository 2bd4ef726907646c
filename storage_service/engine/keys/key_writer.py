"""The one writer of a primary key table: what is waiting is planned, stored, applied, published.

A round takes what waits, and for all of it: plans every write against the rows as they are, appends
the changes to the logs as one commit unit, applies them to the rows once they are durable, and
publishes all touched buckets in one step on the event loop. Only then are the callers answered.

What a caller may rely on:
- A request is all or nothing: refused means that nothing of it is stored, in no bucket.
- Its changes become visible at one instant, in all buckets, to fetches; a lookup never shows a
  change that a fetch cannot return yet (readers wait for publication), nor misses a published one.
- Writes of one table are applied in one order, the order of their offsets in every bucket.
- A repeated sequence is answered with its first offsets. A write that changes nothing is not
  remembered: repeating it has its effect then, once, and its sequence is still the writer's next.

Publication is deferred, and this is why: a commit group publishes logs when they are durable, which
for these logs would show changes that cannot be looked up yet. So the manager completes groups
without these logs (`CommitGroup.complete(deferred=...)`), and they are published here. Nothing is
lost by that: this writer is the only one that appends to them.

When the disk fails to sync one of several buckets, the others have their changes: those are applied
and published, the failed bucket's are taken back, and the caller is told that the outcome is
unknown, as for log tables.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_planner import KeyPlanner, KeyRequest
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.engine.runtime import clock_us
from streamhouse.storage_service.errors import (
    CorruptDataError,
    InternalError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.group_commit import CommitOutcome, Submit
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER

__all__ = ["KeyWriter"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# A round is planned as a whole before any of it is stored: larger ones would only wait longer.
_ROUND_ROWS_MAX: Final = 100_000
_ROUND_REQUESTS_MAX: Final = 256
_LOAD_ROWS: Final = 20_000


class KeyWriter:
    """Writes to the buckets of one table. Event loop only; `executor` has one thread."""

    def __init__(
        self,
        buckets: Sequence[KeyBucket],
        *,
        table: str,
        submit: Submit,
        executor: Executor,
        on_published: Callable[[Iterable[int]], None],
        frame_bytes_max: int,
    ) -> None:
        self._buckets = buckets
        self._table = table
        self._planner = KeyPlanner(buckets, table=table, frame_bytes_max=frame_bytes_max)
        self._submit = submit
        self._executor = executor
        self._on_published = on_published
        self._waiting: deque[KeyRequest] = deque()
        self._is_stopping = False
        self._is_loading = True
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Task[None] | None = None
        self._wake()

    async def write(
        self, writes: Sequence[KeyWrite], *, columns: Sequence[str] | None, writer_id: int
    ) -> Appended:
        """Store all of `writes`, one a bucket, or nothing; durable and visible on return.

        Once taken it happens, whatever becomes of the caller.
        """
        if self._is_stopping:
            raise UnavailableError(f"table '{self._table}' is being closed and takes no writes")
        request = KeyRequest(writes, columns, writer_id, self._loop.create_future())
        self._waiting.append(request)
        self._wake()
        return await request.done

    async def write_unpublished(
        self,
        writes: Sequence[KeyWrite],
        *,
        columns: Sequence[str] | None,
        timestamp_us: int,
        writer_id: int = TRANSACTION_WRITER,
    ) -> Appended:
        """Store and apply a piece of a transaction of that time, which `publish_all` will show.

        For who holds the table's write gate, after `settle`. A `sequence` is how many rows of the
        transaction the bucket has then; nothing is taken for a repetition. Until it is published
        lookups that meet any of it wait. Rows of no transaction have the writer 0.
        """
        request = KeyRequest(
            writes,
            columns,
            writer_id,
            self._loop.create_future(),
            is_published=False,
            timestamp_us=timestamp_us,
        )
        self._waiting.append(request)
        self._wake()
        return await request.done

    async def settle(self) -> None:
        """Return when all writes taken so far are answered."""
        await self.write((), columns=None, writer_id=0)

    def publish_all(self) -> None:
        """Make everything applied visible in one step."""
        for bucket in self._buckets:
            bucket.publish(bucket.rows.applied_offset, row_count=bucket.rows.row_count)
        self._on_published(range(len(self._buckets)))

    def load_rows(self) -> None:
        """Load rows into memory again, because those of a bucket were replaced."""
        self._is_loading = True
        self._wake()

    @property
    def waiting_count(self) -> int:
        """How many writes wait for their turn."""
        return len(self._waiting)

    async def on_thread(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the thread that changes the rows, between two rounds' steps."""
        return await self._loop.run_in_executor(self._executor, function)

    async def stop(self, *, flush: bool) -> None:
        """Finish what waits, take nothing more, close the rows; stopping twice is harmless."""
        self._is_stopping = True
        while self._running is not None:
            await asyncio.wait([self._running])
        await self._loop.run_in_executor(self._executor, self._close, flush)

    def _close(self, flush: bool) -> None:
        for bucket in self._buckets:
            bucket.close_rows(flush=flush)

    def _wake(self) -> None:
        if self._running is None:
            self._running = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting or (self._is_loading and not self._is_stopping):
                if self._waiting:
                    await self._round(self._take())
                else:
                    self._is_loading = await self._loop.run_in_executor(self._executor, self._load)
        except Exception as error:  # noqa: BLE001 - outermost loop: later writes need an answer
            _report_bug(self._table, error)
            self._is_loading = False
            for bucket in self._buckets:
                bucket.fail("a write met a bug; the service's log says which")
        finally:
            self._running = None
            if self._waiting:
                self._wake()

    def _load(self) -> bool:
        is_more = False
        for bucket in self._buckets:
            is_more |= bucket.rows.load_some(_LOAD_ROWS)
        return is_more

    def _take(self) -> list[KeyRequest]:
        """Take what one round may hold, at least one request."""
        taken: list[KeyRequest] = []
        rows = 0
        numbered: set[tuple[int, int]] = set()
        while self._waiting and len(taken) < _ROUND_REQUESTS_MAX:
            request = self._waiting[0]
            rows += request.row_count
            # The log knows the writer's last batch only once that is stored: one a round.
            if taken and (rows > _ROUND_ROWS_MAX or numbered & request.numbered_buckets):
                break
            if taken and not (request.is_published and taken[0].is_published):
                break
            numbered |= request.numbered_buckets
            taken.append(self._waiting.popleft())
        return taken

    async def _round(self, requests: Sequence[KeyRequest]) -> None:
        try:
            await self._loop.run_in_executor(self._executor, self._planner.plan, requests)
            error = await self._store(requests)
            ends = await self._loop.run_in_executor(self._executor, self._apply, requests)
            if requests[0].is_published:
                # In one step, with nothing else running in between.
                for number, (end, row_count) in ends.items():
                    self._buckets[number].publish(end, row_count=row_count)
            # Also where nothing was published: who waits for it must see that it failed.
            self._on_published({part.bucket for request in requests for part in request.parts})
            for request in requests:
                self._answer(request, error)
        finally:
            for request in requests:
                if not request.done.done():
                    request.done.set_exception(InternalError("the write failed; see the log"))

    async def _store(self, requests: Iterable[KeyRequest]) -> StreamhouseError | None:
        """Make the planned changes durable, all as one unit; return why not."""
        parts = [part for request in requests for part in request.parts if part.changes is not None]
        unit = [
            (self._buckets[part.bucket].log, part.changes)
            for part in parts
            if part.changes is not None
        ]
        if not unit:
            return None
        done: asyncio.Future[CommitOutcome] = self._loop.create_future()
        try:
            self._submit(unit, done.set_result)
        except StreamhouseError as error:
            return error
        outcome = await done
        for part, result in zip(parts, outcome.results, strict=False):
            assert result.base_offset == part.start, "nobody else appends to these logs"
            part.timestamp_us = result.timestamp_us
        return outcome.error

    def _apply(self, requests: Iterable[KeyRequest]) -> dict[int, tuple[int, int]]:
        """Apply what is durable, take back the rest; return bucket -> (end, row count)."""
        ends: dict[int, tuple[int, int]] = {}
        taken_back: set[int] = set()
        for part in (part for request in requests for part in request.parts):
            if part.write is None or part.bucket in taken_back:
                continue
            bucket = self._buckets[part.bucket]
            end = part.write.end_offset
            if end > bucket.log.log_end_offset:
                # It and what was planned on top of it.
                bucket.rows.abort(part.write)
                taken_back.add(part.bucket)
                continue
            try:
                bucket.check_usable()
                if end > bucket.rows.applied_offset:
                    bucket.rows.apply(part.write)
                ends[part.bucket] = (end, bucket.rows.row_count)
            except (CorruptDataError, StorageFailedError):
                continue
            except Exception as error:  # noqa: BLE001 - outermost: what is durable must not be lost
                _report_bug(self._table, error)
                bucket.fail(f"a durable change was not applied: {error!r}")
        return ends

    def _answer(self, request: KeyRequest, error: StreamhouseError | None) -> None:
        if request.done.done():
            return
        if request.error is not None:
            request.done.set_exception(request.error)
            return
        for part in request.parts:
            if part.write is None:
                continue
            bucket = self._buckets[part.bucket]
            visible = bucket.log.high_watermark
            if part.end > (visible if request.is_published else bucket.rows.applied_offset):
                request.done.set_exception(error or _not_applied(bucket))
                return
        request.done.set_result(
            Appended(
                ranges={part.bucket: (part.start, part.end) for part in request.parts},
                timestamp_us=max((part.timestamp_us for part in request.parts), default=0)
                or clock_us(),
            )
        )


def _report_bug(table: str, error: Exception) -> None:
    _logger.error("event=bug table=%s", table, exc_info=error)


def _not_applied(bucket: KeyBucket) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        f"{bucket.where}: the changes are stored but could not be applied; restart the service,"
        " which applies them, and repeat the request with the same writer id and sequence"
    )
