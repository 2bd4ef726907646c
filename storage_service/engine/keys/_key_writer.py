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

Who has the rows: the event loop plans and applies what is short, where it is; what is long, and all
that waits for a disk, is done by a thread. Whoever does it holds the turn, so that two never touch
the rows at once. What is due after a round (evicting, loading) no answer waits for, but nothing is
planned before it is done. Only a run that is handed over to RocksDB needs no turn: rounds go on
beside it until the next is due, which waits for it.

Two rounds overlap: while one is being synced, the next is planned on top of it. It is submitted
when the first is known to be durable, never before. If any of that one failed, the next is taken
back and planned again: what it was planned on is not there. A writer's next batch is in a later
round than the one before, because the log knows a batch once it is stored; pieces of transactions
share neither a round nor the time of another.

These logs are published here, not by their commit group (`CommitGroup.complete(deferred=...)`),
which would show changes that cannot be looked up yet. Nobody else appends to them.

When the disk fails to sync one of several buckets, the others have their changes: those are applied
and published, the failed bucket's are taken back, and the caller is told that the outcome is
unknown, as for log tables. Changes of rows that are found damaged meanwhile are published, too: the
rows are made again from them.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from streamhouse.core.errors import (
    CorruptDataError,
    InternalError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.traces.stages import STAGES
from streamhouse.storage_service.directory.runtime import clock_us
from streamhouse.storage_service.engine.keys._key_planner import (
    SHORT_PLANS,
    KeyPart,
    KeyPlanner,
    KeyRequest,
)
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import CommitOutcome, Submit

__all__ = ["KeyWriter"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# A round is planned as a whole before any of it is stored: larger ones would only wait longer.
_ROUND_ROWS_MAX: Final = 100_000
_ROUND_WRITES_MAX: Final = 64
_LOAD_ROWS: Final = 20_000
# Less waits for a sync to end, and shares a plan with what comes meanwhile.
_OVERLAPPING_ROWS: Final = 512
# A client needs about so long for its next request after an answer.
_QUIET_TURNS: Final = 2


class _Round:
    """Requests that are planned, stored and applied together; `outcome` is there once stored."""

    def __init__(self, requests: Sequence[KeyRequest]) -> None:
        self.requests = requests
        self.is_short = False
        self.outcome: CommitOutcome | None = None
        self._followed = [r.stages for r in requests if r.stages is not None]

    def end_stage(self, name: str) -> None:
        """Tell who follows its requests."""
        for stages in self._followed:
            stages.end(name)

    def end_commit(self, outcome: CommitOutcome) -> None:
        """Tell who follows its requests what storing it took."""
        for stages in self._followed:
            outcome.tell(stages)

    @property
    def is_published(self) -> bool:
        """False: its one request is a piece of a transaction."""
        return self.requests[0].is_published

    @property
    def changes(self) -> list[tuple[KeyPart, RoutedBatch]]:
        """What of it is to be stored, in order."""
        parts = [part for request in self.requests for part in request.parts]
        return [(part, part.changes) for part in parts if part.changes is not None]


class KeyWriter:
    """Writes to the buckets of one table. Event loop only; `executor` runs what is long."""

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
        self._stored: _Round | None = None
        """The round whose changes the commit thread has."""
        self._planned: _Round | None = None
        """The round after it, planned on top of it."""
        self._is_shared = False
        """Whether the last round had several requests."""
        self._seen = self._quiet_turns = 0
        """How many requests the next would have had a turn ago; how often they were as many."""
        self._untidy: set[int] = set()
        self._runs: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._is_stopping = False
        self._is_loading = True
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        """Whether there may be something to do."""
        # A table's writer is nobody's: what it logs must not have the id of one request.
        self._running = self._loop.create_task(self._run(), context=contextvars.Context())

    async def write(
        self,
        writes: Sequence[KeyWrite],
        *,
        columns: Sequence[str] | None,
        writer_id: int,
        timestamp_us: int | None = None,
    ) -> Appended:
        """Store all of `writes`, one a bucket, or nothing; durable and visible on return.

        Once taken it happens, whatever becomes of the caller.

        With `timestamp_us` it is a piece of a transaction of that time, which `publish_all` will
        show; until then lookups that meet any of it wait. That is for who holds the table's write
        gate, after `settle`. Rows of the transaction itself have `TRANSACTION_WRITER`, and a
        `sequence` that is how many of them the bucket has then; nothing is taken for a repetition.
        """
        if self._is_stopping:
            raise UnavailableError(f"table '{self._table}' is being closed and takes no writes")
        done: asyncio.Future[Appended] = self._loop.create_future()
        stages = STAGES.get() if writes else None
        request = KeyRequest(writes, columns, writer_id, done, timestamp_us, stages)
        self._waiting.append(request)
        self._changed.set()
        return await done

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
        self._changed.set()

    @property
    def waiting_count(self) -> int:
        """How many writes wait for their turn."""
        return len(self._waiting)

    async def on_thread(self, function: Callable[[], _T]) -> _T:
        """Run `function` on a thread that has the rows meanwhile, between two rounds' steps.

        Once it is the function's turn it runs, whatever becomes of the caller.
        """

        async def run() -> _T:
            async with self._turn:
                return await self._loop.run_in_executor(self._executor, function)

        # The rows are somebody else's again when the thread is done, not when nobody waits for it.
        return await asyncio.shield(self._loop.create_task(run()))

    async def stop(self, *, flush: bool) -> None:
        """Finish what waits, take nothing more, close the rows; stopping twice is harmless."""
        self._is_stopping = True
        self._changed.set()
        await asyncio.wait([self._running])
        # None begins from now on.
        await asyncio.gather(*self._runs, return_exceptions=True)

        def close() -> None:
            for bucket in self._buckets:
                bucket.close_rows(flush=flush)

        await self.on_thread(close)

    async def _run(self) -> None:
        try:
            while not self._is_stopping or self._waiting or self._planned or self._stored:
                try:
                    await self._step()
                except Exception as error:  # noqa: BLE001 - outermost loop: later writes go on
                    self._give_up(error)
        finally:
            self._fail_rounds()
            _fail(self._waiting)

    async def _step(self) -> None:
        """Do what is next; wait if there is nothing."""
        stored = self._stored
        if stored is not None and stored.outcome is not None:
            await self._finish(stored, stored.outcome)
        elif stored is None and self._planned is not None:
            self._store()
        elif self._untidy:
            await self._keep_up()
        elif requests := self._next_requests():
            if not self._may_grow(requests):
                await self._plan(requests)
        elif self._is_loading and not self._is_stopping and stored is None:
            self._is_loading = await self.on_thread(self._load)
        else:
            self._changed.clear()
            await self._changed.wait()
            return
        # Whatever else there is for the loop to do comes in between.
        await asyncio.sleep(0)

    def _next_requests(self) -> list[KeyRequest]:
        """Return what of all that waits is planned as one round now; nothing if it is not time."""
        taken: list[KeyRequest] = []
        if self._planned is not None:
            return taken
        before = None if self._stored is None else self._stored.requests
        numbered: set[tuple[int, int]] = set().union(*(r.numbered_buckets for r in before or ()))
        rows = writes = 0
        for request in self._waiting:
            rows += request.row_count
            writes += max(len(request.writes), 1)
            if taken and (rows > _ROUND_ROWS_MAX or writes > _ROUND_WRITES_MAX):
                break
            beside = taken or before
            if beside and not (request.is_published and beside[0].is_published):
                break
            # The log knows the writer's last batch only once that is stored: one a round.
            if not numbered.isdisjoint(request.numbered_buckets):
                break
            numbered |= request.numbered_buckets
            taken.append(request)
        is_worth_it = rows >= _OVERLAPPING_ROWS or writes >= _ROUND_WRITES_MAX
        return taken if before is None or is_worth_it else []

    def _may_grow(self, requests: Sequence[KeyRequest]) -> bool:
        """Whether a round of these waits for what the loop's next turn brings.

        More share its plan and its sync, and nothing idles. Where one round had several the next
        will, too: it is there when some turns brought nothing, or it is full.
        """
        count = len(requests)
        self._quiet_turns = 0 if count > self._seen else self._quiet_turns + 1
        self._seen = count
        is_full = count < len(self._waiting)
        return self._is_shared and not is_full and self._quiet_turns < _QUIET_TURNS

    async def _plan(self, requests: Sequence[KeyRequest]) -> None:
        """Plan the requests that wait first, on top of the round that is stored if there is one."""
        self._planned = planned = _Round(requests)
        planned.end_stage("turn")
        self._is_shared, self._seen = len(requests) > 1, 0
        for _ in requests:
            self._waiting.popleft()
        async with self._turn:
            planned.is_short = self._planner.is_short(requests)
            plans = self._planner.plan(requests)
            count = SHORT_PLANS if planned.is_short else 0
            if sum(1 for _ in itertools.islice(plans, count + 1)) > count:
                await self._loop.run_in_executor(self._executor, deque, plans, 0)
        planned.end_stage("plan")

    def _store(self) -> None:
        """Let the planned changes become durable, all as one unit."""
        assert self._planned is not None
        self._check_continues(self._planned)
        stored, self._planned = self._planned, None
        self._stored = stored
        unit = [(self._buckets[part.bucket].log, changes) for part, changes in stored.changes]

        def on_done(outcome: CommitOutcome) -> None:
            stored.outcome = outcome
            self._changed.set()

        if not unit:
            on_done(CommitOutcome((), None))
            return
        try:
            self._submit(unit, on_done)
        except StreamhouseError as error:
            on_done(CommitOutcome((), error))

    def _check_continues(self, planned: _Round) -> None:
        """Raise unless the changes continue the logs, and nothing else is planned beside them.

        A log that has anything else is no history, and nothing could take that back.
        """
        ends: dict[int, int] = {}
        for part, changes in planned.changes:
            end = ends.get(part.bucket, self._buckets[part.bucket].log.log_end_offset)
            if part.start != end or part.end - end != changes.row_count:
                raise InternalError(
                    f"{self._buckets[part.bucket].where}: changes are planned from offset"
                    f" {part.start} to {part.end}, but its log ends at {end}"
                )
            ends[part.bucket] = part.end
        for number, end in ends.items():
            if self._buckets[number].rows.planned_offset != end:
                raise InternalError(
                    f"{self._buckets[number].where}: more is planned than what is stored next"
                )

    async def _finish(self, stored: _Round, outcome: CommitOutcome) -> None:
        """Apply and publish what is durable of a round, and answer it."""
        requests = stored.requests
        stored.end_commit(outcome)
        try:
            if self._planned is not None and outcome.error is not None:
                await self._plan_again(self._planned.requests)
            elif self._planned is not None:
                # The disk goes on meanwhile.
                self._store()
            if self._stored is stored:
                self._stored = None
            for (part, _), result in zip(stored.changes, outcome.results, strict=False):
                assert result.base_offset == part.start, "nobody else appends to these logs"
                part.timestamp_us = result.timestamp_us
            async with self._turn:
                if stored.is_short:
                    ends = self._apply(requests)
                else:
                    ends = await self._loop.run_in_executor(self._executor, self._apply, requests)
                self._untidy.update(b for b in ends if self._buckets[b].rows.needs_upkeep)
            stored.end_stage("apply")
            if stored.is_published:
                # In one step, with nothing else running in between.
                for number, (end, row_count) in ends.items():
                    self._buckets[number].publish(end, row_count=row_count)
            # Also where nothing was published: who waits for it must see that it failed.
            self._on_published({part.bucket for request in requests for part in request.parts})
            for request in requests:
                self._answer(request, outcome.error)
        finally:
            _fail(requests)

    async def _plan_again(self, requests: Sequence[KeyRequest]) -> None:
        """Take back the round that was planned on top of one that failed."""
        self._planned = None
        self._waiting.extendleft(reversed(requests))
        async with self._turn:
            self._planner.take_back(requests)

    async def _keep_up(self) -> None:
        """Do what is due in buckets that were written to."""
        untidy, self._untidy = self._untidy, set()
        buckets = [self._buckets[n] for n in untidy if self._buckets[n].is_usable]
        async with self._turn:
            for bucket in buckets:
                self._begin_run(bucket)
            left = [bucket for bucket in buckets if bucket.rows.needs_upkeep]
            if left:
                await self._loop.run_in_executor(self._executor, _keep_up, left)

    def _begin_run(self, bucket: KeyBucket) -> None:
        """Hand over what is due, on a thread, while rounds go on. Another has to wait for it."""
        rows = bucket.rows
        begun = rows.begin_run()
        if begun is None:
            return

        async def run() -> None:
            try:
                await self._loop.run_in_executor(self._executor, rows.write_run, begun)
            except Exception as error:  # noqa: BLE001 - outermost: what waits is tried again
                self._report(error)
            finally:
                await self.on_thread(functools.partial(rows.end_run, begun))

        task = self._loop.create_task(run())
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)

    def _load(self) -> bool:
        return sum(bucket.rows.load_some(_LOAD_ROWS) for bucket in self._buckets) > 0

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
            except (CorruptDataError, StorageFailedError) as error:
                if bucket.is_damaged:
                    # They are made again from what the log shows.
                    ends[part.bucket] = (end, bucket.row_count)
                elif bucket.is_usable:
                    bucket.fail(f"a durable change was not applied: {error.message}")
            except Exception as error:  # noqa: BLE001 - outermost: what is durable must not be lost
                bucket.fail(f"a durable change was not applied: {error!r}")
                self._report(error)
        return ends

    def _give_up(self, error: Exception) -> None:
        """Let nothing more be written until a restart, after a bug."""
        for bucket in self._buckets:
            bucket.fail("a write met a bug; the service's log says which")
        self._report(error)
        self._is_loading = False
        self._untidy.clear()
        self._fail_rounds()

    def _report(self, bug: Exception) -> None:
        _logger.error("event=bug table=%s", self._table, exc_info=bug)

    def _fail_rounds(self) -> None:
        for left in filter(None, (self._stored, self._planned)):
            _fail(left.requests)
        self._stored = self._planned = None

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
                not_applied = UnknownOutcomeError(
                    f"{bucket.where}: the changes are stored but could not be applied; restart the"
                    " service, which applies them, and repeat the request with the same writer id"
                    " and sequence"
                )
                request.done.set_exception(error or not_applied)
                return
        request.done.set_result(
            Appended(
                ranges={part.bucket: (part.start, part.end) for part in request.parts},
                timestamp_us=max((part.timestamp_us for part in request.parts), default=0)
                or clock_us(),
            )
        )


def _keep_up(buckets: Iterable[KeyBucket]) -> None:
    for bucket in buckets:
        try:
            bucket.rows.keep_up()
        except StreamhouseError as error:
            _logger.warning("event=upkeep_failed bucket=%r why=%r", bucket.where, error.message)


def _fail(requests: Iterable[KeyRequest]) -> None:
    """Answer those that have no answer because of a bug, or because the loop ends."""
    for request in requests:
        if not request.done.done():
            request.done.set_exception(InternalError("the write failed; see the log"))
