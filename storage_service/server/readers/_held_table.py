"""The primary key tables whose rows a reader holds, and how a reader follows the owner.

A table is loaded once, on a thread. Afterwards each request first brings the rows up to the ends
that the owner had published when the request arrived: few changes on the event loop, more changes
on a thread while the request waits. So an answer has every write that was acknowledged before.

What a reader cannot do for certain ends in `UnavailableError`, and the owner gets the request.
"""

from __future__ import annotations

import asyncio
import logging
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
from streamhouse.storage_service.kv.kv_tablet import KvOptions
from streamhouse.storage_service.kv.row_copy import RowCopy
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.server.readers._board import Board, SlotView
from streamhouse.storage_service.server.readers._messages import (
    Floor,
    Hold,
    Holds,
    Lost,
    Opened,
)

__all__ = ["HeldTables"]

_logger = logging.getLogger(__name__)

# So many changes take a few hundred microseconds.
_CHANGES_AT_ONCE: Final = 64
# One plan has so many bytes of changes; a larger frame is planned alone.
_PLAN_BYTES: Final = 4 << 20
# A request that waits longer is quicker at the owner.
_CATCH_UP_S: Final = 0.5
_THREADS: Final = 2


class _HeldBucket:
    """One bucket: the rows, and the place in the changelog."""

    def __init__(self, rows: RowCopy, log: FollowedLog, info: TableInfo) -> None:
        self.rows: Final = rows
        self._log = log
        self._info = info

    def check_usable(self) -> None:
        """Rows that cannot be used are not held."""

    def follow(self, end: int, *, at_once: bool) -> None:
        """Apply all changes below `end`, which is published; `at_once` as in `RowCopy.replay`."""
        rows, log = self.rows, self._log
        # Older changes are in the rows already.
        log.publish(rows.applied_offset, end)
        while rows.applied_offset < end:
            frames = log.read(rows.applied_offset, bytes_max=_PLAN_BYTES)
            rows.replay(
                [read_stored(f.payload, self._info, stored_as=f.schema_id) for f in frames],
                base_offset=frames[0].base_offset,
                at_once=at_once,
            )

    def close(self) -> None:
        """Release files and memory."""
        self._log.close()
        self.rows.close()


class _HeldTable(LookupTable):
    """A loaded table. Event loop only, besides what runs on a thread of `pool`."""

    def __init__(
        self, info: TableInfo, view: SlotView, buckets: Sequence[_HeldBucket], pool: Pool
    ) -> None:
        self.lookup = KeyLookup(info, buckets)
        self._view = view
        self._buckets = buckets
        self._pool = pool
        self._following: asyncio.Future[None] | None = None
        self._followed_ends: Sequence[int] = ()
        """The object with the ends that were applied last."""

    @property
    def path(self) -> TablePath:
        """The table's path."""
        return self.lookup.info.path

    def count_rows(self) -> int:
        """See `LookupTable.count_rows`."""
        return sum(bucket.rows.row_count for bucket in self._buckets)

    def shows(self, ends: Mapping[int, int]) -> bool:
        """Whether the changes below these ends are applied: only visible changes are."""
        return all(self._buckets[b].rows.applied_offset >= end for b, end in ends.items())

    @property
    def memory_bytes(self) -> int:
        """The bytes of the rows and their index."""
        return sum(bucket.rows.memory_bytes for bucket in self._buckets)

    def published(self) -> tuple[int, ...]:
        """Return the published ends; raises `UnavailableError` for a table in another form."""
        ends = self._view.ends()
        if ends is None:
            raise UnavailableError(f"table '{self.path}' is another one by now")
        return ends

    @property
    def is_current(self) -> bool:
        """Whether the owner has the table in this form."""
        return self._view.ends() is not None

    def missing(self, ends: Sequence[int]) -> int:
        """Return the number of changes below `ends` that are not applied."""
        return sum(
            end - bucket.rows.applied_offset
            for end, bucket in zip(ends, self._buckets, strict=True)
            if end > bucket.rows.applied_offset
        )

    def follow_at_once(self, ends: Sequence[int]) -> bool:
        """Apply the changes below `ends` if these are few; whether all are applied."""
        if ends is self._followed_ends:
            return True
        if self._following is not None:
            return self.missing(ends) == 0
        count = self.missing(ends)
        if count:
            is_quick = all(bucket.rows.replays_at_once(count) for bucket in self._buckets)
            if count > _CHANGES_AT_ONCE or not is_quick:
                return False
            self.follow(ends, at_once=True)
        self._followed_ends = ends
        return True

    async def follow_soon(self, ends: Sequence[int]) -> None:
        """Return when the changes below `ends` are applied; raises `UnavailableError` if late."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CATCH_UP_S
        while self.missing(ends):
            if self._following is None:
                latest = self.published()
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

    async def close(self) -> None:
        """Release files and memory, after the thread that follows."""
        if self._following is not None:
            await asyncio.wait([self._following])
        for bucket in self._buckets:
            bucket.close()


class HeldTables:
    """All tables of a reader. Event loop only."""

    def __init__(
        self, config: ServiceConfig, board: Board, send: Callable[[Opened | Holds | Lost], None]
    ) -> None:
        # The lock is the owner's.
        self._directory = DataDirectory(config.data_dir.absolute())
        self._board = board
        self._send = send
        self._options = KvOptions.shared(
            cache_bytes=config.key_cache_bytes_max, memory_bytes=config.key_memory_bytes_max
        )
        self._pool = Pool("reader", _THREADS)
        self._tables: dict[TablePath, tuple[int, _HeldTable]] = {}
        # The texts in URLs that mean one of the tables.
        self._by_text: dict[str, _HeldTable] = {}
        self._floors: dict[int, asyncio.Future[Sequence[int]]] = {}
        self._loads: set[asyncio.Task[None]] = set()

    @property
    def memory_bytes(self) -> int:
        """The bytes of all rows."""
        return sum(table.memory_bytes for _, table in self._tables.values())

    def get(self, path: str) -> _HeldTable:
        """Return a held table by the path as in a URL; raises `UnavailableError`."""
        table = self._by_text.get(path)
        if table is None:
            held = self._tables.get(TablePath.parse(path))
            if held is None:
                raise UnavailableError(f"table '{path}' is not held")
            table = self._by_text[path] = held[1]
        return table

    def let_go(self, path: TablePath, why: str) -> None:
        """Hold a table no longer, and tell the owner."""
        held = self._removed(path)
        if held is not None:
            self._send(Lost(held[0], why))
            self._run(held[1].close())

    def _removed(self, path: TablePath) -> tuple[int, _HeldTable] | None:
        self._by_text.clear()
        return self._tables.pop(path, None)

    def hold(self, message: Hold) -> None:
        """Load a table, in place of an earlier form of the table."""
        self._run(self._load(message))

    def end_generation(self, path: TablePath, generation: int) -> None:
        """Release the rows of a generation that has ended."""
        held = self._tables.get(path)
        if held is not None and held[0] == generation:
            self._removed(path)
            self._run(held[1].close())

    def floor(self, message: Floor) -> None:
        """Take what the owner had applied after the files of a table were opened."""
        waiting = self._floors.pop(message.generation, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.offsets)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _load(self, message: Hold) -> None:
        info, path = message.info, message.info.path
        former = self._removed(path)
        if former is not None:
            await former[1].close()
        buckets: list[_HeldBucket] = []
        try:
            table = await self._loaded(message, buckets)
            table.published()
        except Exception as error:  # whatever it is, the owner answers in place of this process
            if not isinstance(error, StreamhouseError):
                _logger.exception("event=bug table=%s", info.path)
            why = error.message if isinstance(error, StreamhouseError) else repr(error)
            _logger.warning("event=not_held table=%s why=%r", info.path, why)
            for bucket in buckets:
                bucket.close()
            self._send(Lost(message.generation, why))
            return
        finally:
            self._floors.pop(message.generation, None)
        self._tables[path] = (message.generation, table)
        self._send(Holds(message.generation))
        _logger.info("event=held table=%s generation=%d", info.path, message.generation)

    async def _loaded(self, message: Hold, buckets: list[_HeldBucket]) -> _HeldTable:
        info, loop = message.info, asyncio.get_running_loop()
        view = SlotView(self._board, message.slot, message.generation, info.bucket_count)
        for number in range(info.bucket_count):
            buckets.append(await loop.run_in_executor(self._pool, self._open, info, number))
        floor: asyncio.Future[Sequence[int]] = loop.create_future()
        self._floors[message.generation] = floor
        self._send(Opened(message.generation))
        applied = await floor
        table = _HeldTable(info, view, buckets, self._pool)
        ends = table.published()
        await loop.run_in_executor(self._pool, table.follow, ends)
        if table.missing(applied):
            # Of rows that nobody may see yet: the files may have them.
            raise UnavailableError(f"table '{info.path}' has changes that are not visible yet")
        await loop.run_in_executor(self._pool, _complete, buckets, applied)
        return table

    def _open(self, info: TableInfo, number: int) -> _HeldBucket:
        """Open the files of a bucket's rows and log. Blocking."""
        table_id = info.table_id
        rows = RowCopy(
            self._directory.key_rows(table_id, number),
            table_id=table_id,
            bucket=number,
            rules=table_rules(info),
            options=self._options,
        )
        try:
            log = FollowedLog(
                self._directory.bucket(table_id, number),
                table_id=table_id,
                bucket=number,
                filesystem=self._directory.filesystem,
                start_offset=rows.applied_offset,
                high_watermark=rows.applied_offset,
            )
        except BaseException:
            rows.close()
            raise
        return _HeldBucket(rows, log, info)


def _complete(buckets: Sequence[_HeldBucket], applied: Sequence[int]) -> None:
    for bucket, offset in zip(buckets, applied, strict=True):
        bucket.rows.load()
        bucket.rows.finish(offset)
