"""The tables that a reader holds, and how a reader follows the owner.

The log of a table is held at once. The rows of a primary key table are loaded once, on a thread.
Afterwards each lookup first brings the rows up to the ends that the owner had published when the
request arrived: few changes on the event loop, more changes on a thread while the request waits. So
an answer has every write that was acknowledged before.

What a reader cannot do for certain ends in `UnavailableError`, and the owner gets the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from streamhouse.core.errors import StreamhouseError, UnavailableError
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.threads import Pool
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.keys.key_bucket import table_rules
from streamhouse.storage_service.engine.keys.key_lookup import KeyLookup, LookupTable
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.engine.wakeups import WaiterLimit, Wakeups
from streamhouse.storage_service.kv.kv_tablet import KvOptions
from streamhouse.storage_service.kv.row_copy import RowCopy
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.server.readers._board import Board, Published, SlotView
from streamhouse.storage_service.server.readers._messages import (
    Floor,
    Hold,
    Holds,
    Lost,
    Opened,
    State,
    Watch,
)

__all__ = ["HeldLog", "HeldRows", "HeldTables"]

_logger = logging.getLogger(__name__)

# So many changes take a few hundred microseconds.
_CHANGES_AT_ONCE: Final = 64
# One plan has so many bytes of changes; a larger frame is planned alone.
_PLAN_BYTES: Final = 4 << 20
# A request that waits longer is quicker at the owner.
_CATCH_UP_S: Final = 0.5
_THREADS: Final = 2


class HeldLog(ReadableTable[FollowedLog]):
    """The published part of a table's log. Event loop only."""

    def __init__(
        self,
        message: Hold,
        logs: Sequence[FollowedLog],
        view: SlotView,
        *,
        limit: WaiterLimit,
        send: Callable[[Watch], None],
    ) -> None:
        super().__init__(message.info, logs, lake=message.state.lake, wakeups=Wakeups(limit))
        self.generation = message.generation
        self._view = view
        self._send = send
        self._published: Published | None = None
        # What was published when the owner was asked to tell of changes; None: it was not.
        self._watched: Published | None = None
        self._state_number = 0
        self._state_waiters: set[asyncio.Future[None]] = set()
        self.take_state(message.state)

    @property
    def is_current(self) -> bool:
        """Whether the owner has the table in this form."""
        return self._view.published() is not None

    def published(self) -> Published:
        """Take the published offsets; raises `UnavailableError` for a table in another form."""
        published = self._view.published()
        if published is None:
            raise UnavailableError(f"table '{self.path}' is another one by now")
        if published is not self._published:
            self._published = published
            places = zip(self.tablets, published.starts, published.ends, strict=True)
            for log, start, end in places:
                log.publish(start, end)
        return published

    def take_state(self, state: State) -> None:
        """Take the lake state that the owner has sent."""
        self._state_number = state.number
        self.lake = state.lake
        self.truncated_offsets = dict(state.truncated_offsets)
        self.truncated_at_us = state.truncated_at_us
        for waiter in self._state_waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_state(self) -> None:
        """Return once the published state has arrived; raises `UnavailableError` for a late state.

        The owner sends a state before publishing the number of the state.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CATCH_UP_S
        while self.published().state != self._state_number:
            if loop.time() >= deadline:
                raise UnavailableError(f"the state of table '{self.path}' is late")
            waiter: asyncio.Future[None] = loop.create_future()
            self._state_waiters.add(waiter)
            await asyncio.wait([waiter], timeout=deadline - loop.time())
            self._state_waiters.discard(waiter)

    def watch(self) -> None:
        """Ask the owner for a message at the next change of the published offsets."""
        if self._watched is None:
            assert self._published is not None
            self._watched = self._published
            self._send(Watch(self.generation, self._watched))

    def changed(self) -> None:
        """Wake the requests waiting for changes, after the owner's message."""
        watched, self._watched = self._watched, None
        if watched is None or not self.is_current:
            self.wakeups.wake_all()
            return
        now = self.published()
        places = zip(watched.starts, watched.ends, now.starts, now.ends, strict=True)
        self.wakeups.wake(
            [n for n, (s, e, start, end) in enumerate(places) if (s, e) != (start, end)]
        )
        if self.wakeups.count:
            # The owner answers a `Watch` once, and who waits for another bucket waits on.
            self.watch()

    def close(self) -> None:
        """End all waits, and close the files."""
        self.wakeups.wake_all()
        for log in self.tablets:
            log.close()


class _HeldBucket:
    """The rows of one bucket by key, and the changelog."""

    def __init__(self, rows: RowCopy, log: FollowedLog, info: TableInfo) -> None:
        self.rows: Final = rows
        self._log = log
        self._info = info

    def check_usable(self) -> None:
        """Rows that cannot be used are not held."""

    def follow(self, end: int, *, at_once: bool) -> None:
        """Apply all changes below `end`, which is published; `at_once` as in `RowCopy.replay`."""
        rows, log = self.rows, self._log
        while rows.applied_offset < end:
            frames = log.read(rows.applied_offset, bytes_max=_PLAN_BYTES, end_offset=end)
            rows.replay(
                [read_stored(f.payload, self._info, stored_as=f.schema_id) for f in frames],
                base_offset=frames[0].base_offset,
                at_once=at_once,
            )

    def close(self) -> None:
        """Release files and memory."""
        self.rows.close()


class HeldRows(LookupTable):
    """The rows of a table by key. Event loop only, besides what runs on a thread of `pool`."""

    def __init__(self, log: HeldLog, buckets: Sequence[_HeldBucket], pool: Pool) -> None:
        self.lookup = KeyLookup(log.info, buckets)
        self.log: Final = log
        self._buckets = buckets
        self._pool = pool
        self._following: asyncio.Future[None] | None = None
        self._is_closed = False
        # While a thread follows, some buckets are further than others. So the ends that all buckets
        # have, and the number of rows then, are replaced together when a thread is done.
        self._counted: tuple[Sequence[int], int] = ((0,) * len(buckets), 0)

    @property
    def path(self) -> TablePath:
        """The table's path."""
        return self.lookup.info.path

    def count_rows(self) -> int:
        """See `LookupTable.count_rows`: the rows at the ends that were followed last."""
        return self._counted[1]

    def shows(self, ends: Mapping[int, int]) -> bool:
        """Whether the changes below these ends are applied: only visible changes are."""
        return all(self._buckets[b].rows.applied_offset >= end for b, end in ends.items())

    @property
    def memory_bytes(self) -> int:
        """The bytes of the rows and their index."""
        return sum(bucket.rows.memory_bytes for bucket in self._buckets)

    def missing(self, ends: Sequence[int]) -> int:
        """Return the number of changes below `ends` that are not known to be applied."""
        applied, _ = self._counted
        return sum(max(end - before, 0) for end, before in zip(ends, applied, strict=True))

    def follow_at_once(self, ends: Sequence[int]) -> bool:
        """Apply the changes below `ends` if these are few; whether all are applied."""
        if ends is self._counted[0]:
            return True
        count = self.missing(ends)
        if count:
            if self._following is not None or count > _CHANGES_AT_ONCE:
                return False
            if not all(bucket.rows.replays_at_once(count) for bucket in self._buckets):
                return False
            self.follow(ends, at_once=True)
        return True

    async def follow_soon(self, ends: Sequence[int]) -> None:
        """Return when the changes below `ends` are applied; raises `UnavailableError` if late."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CATCH_UP_S
        while self.missing(ends):
            if self._is_closed:
                # Their memory is counted no more.
                raise UnavailableError(f"the rows of table '{self.path}' are not held any more")
            if self._following is None:
                latest = self.log.published().ends
                self._following = loop.run_in_executor(self._pool, self.follow, latest)
                self._following.add_done_callback(self._followed)
            following = self._following
            await asyncio.wait([following], timeout=max(deadline - loop.time(), 0))
            if not following.done():
                raise UnavailableError(f"table '{self.path}' is followed too slowly")
            following.result()

    def _followed(self, following: asyncio.Future[None]) -> None:
        self._following = None
        # Each waiting request takes the error; without any the next request meets it again.
        following.exception()

    def follow(self, ends: Sequence[int], *, at_once: bool = False) -> None:
        """Apply all changes below `ends`. One caller at a time."""
        for end, bucket in zip(ends, self._buckets, strict=True):
            if end > bucket.rows.applied_offset:
                bucket.follow(end, at_once=at_once)
        self._counted = ends, sum(bucket.rows.row_count for bucket in self._buckets)

    async def close(self) -> None:
        """Release files and memory, after the thread that follows."""
        self._is_closed = True
        if self._following is not None:
            await asyncio.wait([self._following])
        for bucket in self._buckets:
            bucket.close()


class _Held:
    """A table: the log, and the rows by key once they are loaded."""

    def __init__(self, log: HeldLog) -> None:
        self.log: Final = log
        self.rows: HeldRows | None = None
        self.is_loading = False


class HeldTables:
    """All tables of a reader. Event loop only."""

    def __init__(
        self,
        config: ServiceConfig,
        board: Board,
        send: Callable[[Opened | Holds | Lost | Watch], None],
    ) -> None:
        # The lock is the owner's.
        self._directory = DataDirectory(config.data_dir.absolute())
        self._board = board
        self._send = send
        self._options = KvOptions.shared(
            cache_bytes=config.key_cache_bytes_max, memory_bytes=config.key_memory_bytes_max
        )
        self._waiters = WaiterLimit(config.waiting_fetches_max)
        self._pool = Pool("reader", _THREADS)
        self._tables: dict[TablePath, _Held] = {}
        # The texts in URLs that mean one of the tables.
        self._by_text: dict[str, _Held] = {}
        self._floors: dict[int, asyncio.Future[Sequence[int]]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        # Generation -> the newest state of a table that is being opened.
        self._states: dict[int, State] = {}
        # Generation -> rows sent since the last figures.
        self._read_rows: Counter[int] = Counter()

    @property
    def memory_bytes(self) -> int:
        """The bytes of all rows by key."""
        return sum(held.rows.memory_bytes for held in self._tables.values() if held.rows)

    def log(self, path: str) -> HeldLog:
        """Return a table's log by the path as in a URL; raises `UnavailableError`."""
        return self._get(path).log

    def rows(self, path: str) -> HeldRows:
        """Return a table's rows by the path as in a URL; raises `UnavailableError`."""
        rows = self._get(path).rows
        if rows is None:
            raise UnavailableError(f"the rows of table '{path}' are not held")
        return rows

    def _get(self, path: str) -> _Held:
        held = self._by_text.get(path)
        if held is None:
            held = self._tables.get(TablePath.parse(path))
            if held is None:
                raise UnavailableError(f"table '{path}' is not held")
            self._by_text[path] = held
        return held

    def look(self) -> None:
        """Take what is published of all tables, also of those that nobody reads just now."""
        for held in self._tables.values():
            with contextlib.suppress(UnavailableError):
                held.log.published()

    def take_read_rows(self) -> dict[int, int]:
        """Return how many rows were sent since the last call, by generation."""
        for held in self._tables.values():
            self._count(held.log)
        counts, self._read_rows = self._read_rows, Counter()
        return dict(counts)

    def _count(self, log: HeldLog) -> None:
        if log.read_rows:
            self._read_rows[log.generation] += log.read_rows
            log.read_rows = 0

    def let_go(self, rows: HeldRows, why: str) -> None:
        """Hold the rows of a table by key no longer, and tell the owner."""
        held = self._tables.get(rows.path)
        if held is not None and held.rows is rows:
            held.rows = None
            self._send(Lost(held.log.generation, by_key=True, why=why))
            self._run(rows.close())

    def hold(self, message: Hold) -> None:
        """Hold a table, in place of an earlier form of the table."""
        self._states[message.generation] = message.state
        self._run(self._hold(message))

    def changed(self, generation: int) -> None:
        """Wake the requests waiting for changes of a table, after the owner's message."""
        for held in self._tables.values():
            if held.log.generation == generation:
                held.log.changed()

    def state(self, message: State) -> None:
        """Take the state of a table."""
        if message.generation in self._states:
            self._states[message.generation] = message
        for held in self._tables.values():
            if held.log.generation == message.generation:
                held.log.take_state(message)

    def wake_all(self) -> None:
        """End all waits: the process stops."""
        for held in self._tables.values():
            held.log.wakeups.wake_all()

    def end_generation(self, path: TablePath, generation: int) -> None:
        """Release a table in a form that has ended."""
        held = self._tables.get(path)
        if held is not None and held.log.generation == generation:
            self._run(self._end(path))

    async def _end(self, path: TablePath) -> None:
        held = self._tables.pop(path, None)
        if held is not None:
            self._by_text.clear()
            self._count(held.log)
            held.log.close()
            if held.rows is not None:
                await held.rows.close()

    def floor(self, message: Floor) -> None:
        """Take what the owner had applied after the files of a table were opened."""
        waiting = self._floors.pop(message.generation, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.offsets)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _hold(self, message: Hold) -> None:
        generation, by_key = message.generation, False
        try:
            async with self._opening:
                held = self._tables.get(message.info.path)
                if held is None or held.log.generation != generation:
                    await self._end(message.info.path)
                    held = _Held(await self._opened(message))
                    self._tables[message.info.path] = held
                    self._send(Holds(generation, by_key=False))
            by_key = message.by_key and held.rows is None and not held.is_loading
            if by_key:
                await self._load(held)
        except Exception as error:  # whatever it is, the owner answers in place of this process
            if not isinstance(error, StreamhouseError):
                _logger.exception("event=bug table=%s", message.info.path)
            why = error.message if isinstance(error, StreamhouseError) else repr(error)
            _logger.warning("event=not_held table=%s why=%r", message.info.path, why)
            self._send(Lost(generation, by_key=by_key, why=why))
        finally:
            self._states.pop(generation, None)

    async def _load(self, held: _Held) -> None:
        held.is_loading = True
        try:
            held.rows = await self._loaded(held.log)
        finally:
            held.is_loading = False
        generation = held.log.generation
        self._send(Holds(generation, by_key=True))
        _logger.info("event=held table=%s generation=%d", held.log.path, generation)

    async def _opened(self, message: Hold) -> HeldLog:
        """Open the logs of a table."""
        info = message.info
        view = SlotView(self._board, message.slot, message.generation, info.bucket_count)
        published = view.published()
        if published is None:
            raise UnavailableError(f"table '{info.path}' is another one by now")

        def open_all() -> list[FollowedLog]:
            return [
                FollowedLog(
                    self._directory.bucket(info.table_id, number),
                    table_id=info.table_id,
                    bucket=number,
                    filesystem=self._directory.filesystem,
                    start_offset=start,
                    high_watermark=end,
                )
                for number, (start, end) in enumerate(
                    zip(published.starts, published.ends, strict=True)
                )
            ]

        logs = await asyncio.get_running_loop().run_in_executor(self._pool, open_all)
        log = HeldLog(message, logs, view, limit=self._waiters, send=self._send)
        log.take_state(self._states[message.generation])
        log.published()
        return log

    async def _loaded(self, log: HeldLog) -> HeldRows:
        """Load the rows of a table."""
        loop, buckets = asyncio.get_running_loop(), list[_HeldBucket]()
        try:
            for number in range(log.info.bucket_count):
                buckets.append(await loop.run_in_executor(self._pool, self._open, log, number))
            floor: asyncio.Future[Sequence[int]] = loop.create_future()
            self._floors[log.generation] = floor
            self._send(Opened(log.generation))
            applied = await floor
            rows = HeldRows(log, buckets, self._pool)
            await loop.run_in_executor(self._pool, rows.follow, log.published().ends)
            if rows.missing(applied):
                # Of rows that nobody may see yet: the files may have them.
                raise UnavailableError(f"table '{log.path}' has changes that are not visible yet")
            await loop.run_in_executor(self._pool, _complete, buckets, applied)
            log.published()
        except BaseException:
            for bucket in buckets:
                bucket.close()
            raise
        finally:
            self._floors.pop(log.generation, None)
        return rows

    def _open(self, log: HeldLog, number: int) -> _HeldBucket:
        """Open the files of a bucket's rows. Blocking."""
        info = log.info
        rows = RowCopy(
            self._directory.key_rows(info.table_id, number),
            table_id=info.table_id,
            bucket=number,
            rules=table_rules(info),
            options=self._options,
        )
        return _HeldBucket(rows, log.tablets[number], info)


def _complete(buckets: Sequence[_HeldBucket], applied: Sequence[int]) -> None:
    for bucket, offset in zip(buckets, applied, strict=True):
        bucket.rows.load()
        bucket.rows.finish(offset)
