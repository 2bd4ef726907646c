"""Storing a decided transaction in the logs: piece by piece, then visible in one step.

The caller holds the table's write gate. A stored piece stays; a redo continues after the last
stored piece, which the logs alone tell: pieces are frames of `TRANSACTION_WRITER`, and the sequence
counts the transaction's rows in the bucket.

A decided transaction must be stored: a disk that refuses a piece is retried for ever, and further
writes to the table are refused meanwhile. After an unclear result of the disk, or damage, the
attempt ends with UnknownOutcomeError; the next start of the service completes the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    CorruptDataError,
    OverloadedError,
    StorageFailedError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.casts.written_rows import stored_version_of
from streamhouse.core.model.transaction import LinkedCommit
from streamhouse.core.traces.stages import STAGES
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import LogTable, OpenTable
from streamhouse.storage_service.engine.transactions._transaction_chunks import (
    StagedRows,
    chunks_of,
)
from streamhouse.storage_service.engine.transactions._transaction_key_sink import KeySink
from streamhouse.storage_service.engine.transactions.transaction_files import Decision
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.group_commit import CommitOutcome, Submit, Unit
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.log.staged_part import StagedPart
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER

__all__ = ["CommitProgress", "CommitServices", "Links", "TransactionCommit"]

_CHUNK_ROWS: Final = 400_000
_BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)


@dataclass(slots=True, kw_only=True)
class CommitProgress:
    """The stored part of a commit, and the present obstacle."""

    row_count: int = 0
    rows_stored: int = 0
    trouble: str = ""


class Links(Protocol):
    """The commit of a linked transaction in another table."""

    def hold(self, linked: LinkedCommit) -> None:
        """Keep the transaction unchanged until `release`; raises for an impossible commit."""

    def release(self, linked: LinkedCommit) -> None:
        """Undo `hold`."""

    async def commit(self, linked: LinkedCommit) -> None:
        """Return when the transaction is committed, now or earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitServices:
    """The shared parts of all tables' commits.

    `deferred` are logs that commit groups do not publish; `stopping` is set when the service stops.
    """

    submit: Submit
    runtime: Runtime
    deferred: set[LogTablet]
    chunk_bytes: int
    stopping: asyncio.Event
    links: Links


class _Sink(Protocol):
    """The destination of the pieces."""

    async def begin(self) -> None:
        """Do the steps before the first row, unless done."""

    async def store(self, chunk: Sequence[StagedRows]) -> None:
        """Make a chunk durable but not visible."""

    def publish(self) -> None:
        """Make all stored rows visible in one step."""


class TransactionCommit:
    """One attempt to complete a decided transaction."""

    def __init__(
        self,
        table: OpenTable,
        decision: Decision,
        parts: Sequence[StagedPart],
        *,
        services: CommitServices,
        progress: CommitProgress,
    ) -> None:
        self._table = table
        self._decision = decision
        self._parts = parts
        self._services = services
        self._progress = progress
        buckets = sorted(decision.starts)
        self._sink: _Sink = (
            KeySink(
                table,
                decision,
                runtime=services.runtime,
                piece_bytes=services.chunk_bytes,
                stored=self._stored,
            )
            if isinstance(table, KeyTable)
            else _LogSink(table, buckets, decision.result.timestamp_us, services, self._stored)
        )

    async def store(self) -> Mapping[int, tuple[int, int]]:
        """Make all rows durable; return bucket -> (start, end)."""
        positions = self._positions()
        self._progress.rows_stored = sum(positions.values())
        await self._sink.begin()
        chunks = chunks_of(
            self._parts, done=positions, bytes_max=self._services.chunk_bytes, rows_max=_CHUNK_ROWS
        )
        # The next piece is read while one is stored.
        reading = asyncio.ensure_future(self._services.runtime.run(next, chunks, None))
        try:
            while (chunk := await reading) is not None:
                reading = asyncio.ensure_future(self._services.runtime.run(next, chunks, None))
                await self._sink.store(chunk)
        finally:
            await asyncio.gather(reading, return_exceptions=True)
        return {
            bucket: (start, self._table.tablets[bucket].log_end_offset)
            for bucket, start in self._decision.starts.items()
        }

    async def until_stored(self, store: Callable[[], Awaitable[None]]) -> None:
        """Run `store` until the disk takes it."""
        await self._stored(store, 0)

    def publish(self) -> None:
        """Make the whole transaction visible, on the event loop, in a single step."""
        self._sink.publish()

    def _positions(self) -> dict[int, int]:
        """Return the number of stored rows of each bucket."""
        positions = {}
        for bucket, start in self._decision.starts.items():
            log = self._table.tablets[bucket]
            positions[bucket] = log.last_sequence(TRANSACTION_WRITER, since=start)
            end = log.log_end_offset
            is_log = isinstance(self._table, LogTable)
            if end < start or (is_log and end != start + positions[bucket]):
                raise CorruptDataError(
                    f"table '{self._table.path}', bucket {bucket}: the log ends at {end}, but"
                    f" transaction {self._decision.spec.transaction_id} begins at {start} and has"
                    f" {positions[bucket]} rows there; restore the table from a backup"
                )
        return positions

    async def _stored(self, store: Callable[[], Awaitable[object]], row_count: int) -> None:
        """Run `store` until it has stored its piece."""
        failures = 0
        gate = self._table.gate
        while True:
            self._check_not_stopping()
            try:
                await store()
            except (StorageFailedError, OverloadedError) as error:
                self._check_can_go_on(error)
                self._progress.trouble = error.message
                gate.refuse(
                    StorageFailedError(
                        f"table '{self._table.path}' is completing transaction"
                        f" {self._decision.spec.transaction_id} and takes no writes:"
                        f" {error.message}"
                    )
                )
            else:
                if self._progress.trouble:
                    self._progress.trouble = ""
                    gate.allow()
                self._progress.rows_stored += row_count
                return
            failures += 1
            await self._pause(_BACKOFF.after(failures))

    async def _pause(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._services.stopping.wait()
        except TimeoutError:
            return

    def _check_not_stopping(self) -> None:
        if self._services.stopping.is_set() or self._table.is_dropped:
            raise UnavailableError(
                f"the service stops; transaction {self._decision.spec.transaction_id} is decided"
                " and is completed at the next start"
            )

    def _check_can_go_on(self, error: StreamhouseError) -> None:
        """Raise if a retry before a restart is useless."""
        if not self._table.can_store:
            raise UnknownOutcomeError(error.message)


class _LogSink:
    """The logs of a log table. Frames are the staged batches, unchanged."""

    def __init__(
        self,
        table: OpenTable,
        buckets: Sequence[int],
        timestamp_us: int,
        services: CommitServices,
        stored: Callable[[Callable[[], Awaitable[object]], int], Awaitable[None]],
    ) -> None:
        self._table = table
        self._buckets = buckets
        self._timestamp_us = timestamp_us
        self._services = services
        self._stored = stored
        # Groups must not publish what they store: it becomes visible together.
        services.deferred.update(table.tablets)

    async def begin(self) -> None:
        """See `_Sink.begin`."""

    async def store(self, chunk: Sequence[StagedRows]) -> None:
        """See `_Sink.store`."""
        assert not any(staged.skipped for staged in chunk), "a frame is a staged batch"
        unit = [
            (
                self._table.tablets[staged.bucket],
                RoutedBatch(
                    bucket=staged.bucket,
                    row_count=staged.row_count,
                    payload=staged.payload,
                    schema_id=stored_version_of(self._table.info, staged.schema),
                    writer_id=TRANSACTION_WRITER,
                    sequence=staged.end,
                    timestamp_us=self._timestamp_us,
                ),
            )
            for staged in chunk
        ]
        await self._stored(lambda: self._append(unit), sum(staged.row_count for staged in chunk))

    async def _append(self, unit: Unit) -> None:
        committed: asyncio.Future[CommitOutcome] = asyncio.get_running_loop().create_future()
        self._services.submit(unit, committed.set_result)
        outcome = await committed
        outcome.tell(STAGES.get())
        if outcome.error is not None:
            raise outcome.error

    def publish(self) -> None:
        """See `_Sink.publish`."""
        self._services.deferred.difference_update(self._table.tablets)
        for bucket in self._buckets:
            self._table.tablets[bucket].publish()
        self._table.wakeups.wake(self._buckets)
