"""The only writer of a primary key table: writes are planned, stored, applied, published.

A write group (`_write_group.py`) takes the waiting writes, plans them against the present rows,
appends all changes to the logs as one commit unit, applies the durable changes to the rows, and
publishes all touched buckets in one step on the event loop. The callers are answered last.

Promises to callers:
- A request is all or nothing: nothing of a refused request is stored, in no bucket.
- The changes become visible to fetches at one instant, in all buckets. A lookup never shows a
  change before fetches can return the change (readers wait for publication), and never misses a
  published change.
- Writes of a table are applied in the order of their offsets, the same order in every bucket.
- A repeated sequence is answered with its first offsets. A write without changes is not remembered:
  a repetition takes effect at its own time, and the sequence is still the writer's next. Its rows
  may be those of an earlier request of its group: if these fail, it fails as well.

Access to the rows: the event loop plans and applies short groups; a thread does long groups and all
work that waits for a disk. The holder of the turn alone touches the rows. No answer waits for the
upkeep after a group (evicting, loading), but the next plan does. Only a run handed over to RocksDB
needs no turn: groups continue during the run until the next run is due, which waits for the first.

Groups overlap: the next group is planned while the last is being synced, and is submitted once the
last is in the logs. With an awaited journal several groups are then in flight to the journal. They
are applied, published and answered in order, each once the journal has it, and so is a group that
stores nothing: its answer is about rows that the journal may lack. If anything of a group failed,
the next group is taken back and planned again, because the rows under its plan are missing; nothing
is planned until the failed group is finished. Successive batches of a writer are in different
groups, because a log knows a batch only once the batch is synced. A piece of a transaction has a
group of its own, and no group overlaps with the piece.

The writer publishes these logs, not their commit group (`CommitGroup.complete(deferred=...)`),
which would show changes before lookups do. Nothing else appends to these logs.

When the disk fails to sync some buckets of a group, the changes of the healthy buckets are applied
and published, the changes of the failed buckets are taken back, and the caller gets an unknown
outcome, as for log tables. Changes of damaged rows are published as well: the rows are made again
from these changes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from streamhouse.core.errors import (
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.traces.stages import STAGES
from streamhouse.storage_service.engine._commit_clock import CommitClock
from streamhouse.storage_service.engine.keys._key_planner import KeyPlanner, KeyRequest
from streamhouse.storage_service.engine.keys._write_group import WriteGroup
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.group_commit import CommitOutcome, Submit

__all__ = ["KeyWriter"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# A group is planned as a whole before any of it is stored: larger ones would only wait longer.
_GROUP_ROWS_MAX: Final = 100_000
_GROUP_WRITES_MAX: Final = 64
_LOAD_ROWS: Final = 20_000
# More groups in flight would be more plans of fewer rows. Large groups fill the journal's objects
# alone, and must leave room in the queue of the commit thread.
_SUBMITTED_GROUPS_MAX: Final = 8
_SUBMITTED_BYTES_MAX: Final = 8 << 20
# Less waits for a sync to end, and shares a plan with what comes meanwhile.
_OVERLAPPING_ROWS: Final = 512
# A client needs about so long for its next request after an answer.
_QUIET_TURNS: Final = 2


class KeyWriter:
    """Writes to the buckets of one table. Event loop only; `executor` runs long work."""

    def __init__(
        self,
        buckets: Sequence[KeyBucket],
        *,
        table: str,
        submit: Submit,
        clock: CommitClock,
        executor: Executor,
        on_published: Callable[[Iterable[int]], None],
        frame_bytes_max: int,
    ) -> None:
        self._buckets = buckets
        self._table = table
        self._planner = KeyPlanner(buckets, table=table, frame_bytes_max=frame_bytes_max)
        self._submit = submit
        self._clock = clock
        self._executor = executor
        self._on_published = on_published
        self._waiting: deque[KeyRequest] = deque()
        self._submitted: deque[WriteGroup] = deque()
        """The groups whose changes the commit thread has, in order; the last may be unsynced."""
        self._planned: WriteGroup | None = None
        """The next group, planned on top of the submitted groups."""
        self._is_shared = False
        """Whether the last group had several requests."""
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

    def write(
        self,
        writes: Sequence[KeyWrite],
        *,
        columns: Sequence[str] | None,
        writer_id: int,
        timestamp_us: int | None = None,
    ) -> asyncio.Future[Appended]:
        """Store all of `writes`, each of another bucket, or nothing; durable and visible once done.

        An accepted write happens without its caller.

        A write with `timestamp_us` is a piece of a transaction of this time: `publish_all` shows
        the piece, and lookups of its rows wait until then. The caller holds the table's write gate
        and has called `settle`. Rows of the transaction have `TRANSACTION_WRITER`, and a `sequence`
        that counts the transaction's rows in the bucket; no piece counts as a repetition.
        """
        if self._is_stopping:
            raise UnavailableError(f"table '{self._table}' is being closed and takes no writes")
        answer: asyncio.Future[Appended] = self._loop.create_future()
        stages = STAGES.get() if writes else None
        request = KeyRequest(writes, columns, writer_id, answer, timestamp_us, stages)
        self._waiting.append(request)
        self._changed.set()
        return answer

    async def settle(self) -> None:
        """Return when all accepted writes are answered."""
        await self.write((), columns=None, writer_id=0)

    def publish_all(self) -> None:
        """Make all applied changes visible in one step."""
        for bucket in self._buckets:
            bucket.publish(bucket.rows.applied_offset, row_count=bucket.rows.row_count)
        self._on_published(range(len(self._buckets)))

    def load_rows(self) -> None:
        """Load rows into memory again, after the rows of a bucket were replaced."""
        self._is_loading = True
        self._changed.set()

    @property
    def waiting_count(self) -> int:
        """The number of writes waiting for their turn."""
        return len(self._waiting)

    async def on_thread(self, function: Callable[[], _T]) -> _T:
        """Run `function` on a thread that holds the rows, between the steps of two groups.

        Once its turn has come, the function runs without its caller.
        """

        async def run() -> _T:
            async with self._turn:
                return await self._loop.run_in_executor(self._executor, function)

        # The rows are somebody else's again when the thread is done, not when nobody waits for it.
        return await asyncio.shield(self._loop.create_task(run()))

    async def stop(self, *, flush: bool) -> None:
        """Finish the waiting writes, accept no more, close the rows; stopping twice is harmless."""
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
            is_ended = False
            while not is_ended:
                try:
                    await self._work()
                    is_ended = True
                except Exception as error:  # noqa: BLE001 - outermost loop: later writes go on
                    self._give_up(error)
        finally:
            self._fail_rounds()
            for request in self._waiting:
                request.give_up()

    async def _work(self) -> None:
        """Do the next step, again and again, until the writer is stopped and nothing waits."""
        while not self._is_stopping or self._waiting or self._planned or self._submitted:
            oldest = self._submitted[0] if self._submitted else None
            if self._planned is not None and self._has_failed:
                await self._plan_again(self._planned.requests)
            elif self._planned is not None and self._may_submit:
                # The disk goes on meanwhile.
                self._store()
                continue
            elif oldest is not None and oldest.outcome is not None:
                await self._finish(oldest, oldest.outcome)
            elif self._untidy:
                await self._keep_up()
            elif self._waiting and (requests := self._next_requests()):
                if not self._may_grow(requests):
                    await self._plan(requests)
            elif self._is_loading and not self._is_stopping and oldest is None:
                self._is_loading = await self.on_thread(self._load)
            else:
                self._changed.clear()
                await self._changed.wait()
                continue
            if self._waiting or self._planned or self._untidy or self._is_loading:
                # The event loop's other work comes in between.
                await asyncio.sleep(0)

    @property
    def _has_failed(self) -> bool:
        """Whether the logs refused the newest group, so that nothing may be planned on top."""
        return bool(self._submitted) and self._submitted[-1].error is not None

    @property
    def _may_submit(self) -> bool:
        """Whether the commit thread may have another group now."""
        groups = self._submitted
        return not groups or (
            groups[-1].is_synced
            and not self._has_failed
            and len(groups) < _SUBMITTED_GROUPS_MAX
            and sum(group.size_bytes for group in groups) < _SUBMITTED_BYTES_MAX
        )

    def _next_requests(self) -> list[KeyRequest]:
        """Return the waiting requests to be planned as a group now; empty if it is too early."""
        chosen: list[KeyRequest] = []
        if self._planned is not None or self._has_failed:
            return chosen
        newest = self._submitted[-1] if self._submitted else None
        before = None if newest is None else newest.requests
        unsynced = before if newest is not None and not newest.is_synced else None
        numbered: set[tuple[int, int]] = set().union(
            *(request.numbered_buckets for request in unsynced or ())
        )
        rows = writes = 0
        for request in self._waiting:
            rows += request.row_count
            writes += max(len(request.writes), 1)
            if chosen and (rows > _GROUP_ROWS_MAX or writes > _GROUP_WRITES_MAX):
                break
            neighbours = chosen or before
            if neighbours and not (request.is_published and neighbours[0].is_published):
                break
            # The log knows the writer's last batch only once that is synced: one a group.
            if not numbered.isdisjoint(request.numbered_buckets):
                break
            numbered |= request.numbered_buckets
            chosen.append(request)
        is_worth_it = rows >= _OVERLAPPING_ROWS or writes >= _GROUP_WRITES_MAX
        return chosen if self._may_submit or is_worth_it else []

    def _may_grow(self, requests: Sequence[KeyRequest]) -> bool:
        """Whether a group of these requests waits for the requests of the loop's next turn.

        More requests share a plan and a sync, and nothing idles. After a group of several requests
        the next group waits, until some turns bring no request or the group is full.
        """
        count = len(requests)
        self._quiet_turns = 0 if count > self._seen else self._quiet_turns + 1
        self._seen = count
        is_full = count < len(self._waiting)
        return self._is_shared and not is_full and self._quiet_turns < _QUIET_TURNS

    async def _plan(self, requests: Sequence[KeyRequest]) -> None:
        """Plan the first waiting requests, on top of the group being stored, if any."""
        planned = WriteGroup(requests, self._buckets, on_changed=self._changed.set)
        self._planned = planned
        if planned.is_followed:
            planned.end_stage("turn")
        self._is_shared, self._seen = len(requests) > 1, 0
        for _ in requests:
            self._waiting.popleft()
        async with self._turn:
            planned.is_short, steps = self._planner.plan_at_once(requests)
            if steps is not None:
                await self._loop.run_in_executor(self._executor, deque, steps, 0)
        if planned.is_followed:
            planned.end_stage("plan")

    def _store(self) -> None:
        """Make the planned changes durable, all as one unit."""
        assert self._planned is not None
        unit = self._planned.unit(self._clock)
        group, self._planned = self._planned, None
        self._submitted.append(group)
        if not unit:
            group.end_commit(CommitOutcome((), None))
            return

        def on_synced(outcome: CommitOutcome) -> None:
            self._loop.call_soon_threadsafe(group.end_sync, outcome)

        try:
            self._submit(unit, group.end_commit, on_synced=on_synced)
        except StreamhouseError as error:
            group.end_commit(CommitOutcome((), error))

    async def _finish(self, group: WriteGroup, outcome: CommitOutcome) -> None:
        """Apply and publish the durable changes of a group, then answer the requests."""
        try:
            self._submitted.popleft()
            async with self._turn:
                if group.is_short:
                    group.apply()
                else:
                    await self._loop.run_in_executor(self._executor, group.apply)
            # In one step, with nothing else running in between.
            self._untidy |= group.untidy
            self._on_published(group.publish())
            for request in group.requests:
                request.answer(self._buckets, outcome.error)
        finally:
            for request in group.requests:
                request.give_up()

    async def _plan_again(self, requests: Sequence[KeyRequest]) -> None:
        """Take back the group planned on top of a failed group."""
        self._planned = None
        self._waiting.extendleft(reversed(requests))
        async with self._turn:
            self._planner.take_back(requests)

    async def _keep_up(self) -> None:
        """Do the due upkeep of written buckets."""
        untidy, self._untidy = self._untidy, set()
        buckets = [self._buckets[n] for n in untidy if self._buckets[n].is_usable]
        async with self._turn:
            for bucket in buckets:
                self._begin_run(bucket)
            due_buckets = [bucket for bucket in buckets if bucket.rows.needs_upkeep]
            if due_buckets:
                await self._loop.run_in_executor(self._executor, _keep_up, due_buckets)

    def _begin_run(self, bucket: KeyBucket) -> None:
        """Hand over due changes, on a thread, while groups continue. A further run waits."""
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

    def _give_up(self, error: Exception) -> None:
        """Refuse all writes until a restart, after a bug."""
        for bucket in self._buckets:
            bucket.fail("a write met a bug; the service's log says which")
        self._report(error)
        self._is_loading = False
        self._untidy.clear()
        self._fail_rounds()

    def _report(self, bug: Exception) -> None:
        _logger.error("event=bug table=%s", self._table, exc_info=bug)

    def _fail_rounds(self) -> None:
        for unfinished in filter(None, (*self._submitted, self._planned)):
            for request in unfinished.requests:
                request.give_up()
        self._submitted.clear()
        self._planned = None


def _keep_up(buckets: Iterable[KeyBucket]) -> None:
    for bucket in buckets:
        try:
            bucket.rows.keep_up()
        except StreamhouseError as error:
            _logger.warning("event=upkeep_failed bucket=%r why=%r", bucket.where, error.message)
