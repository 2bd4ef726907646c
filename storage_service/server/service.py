"""The parts that all routes share: tables, limits in use, waiting, and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from streamhouse.core.errors import (
    CheckFailedError,
    LogCutError,
    NotFoundError,
    NotOwnerError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_bucket import KeyBucket
from streamhouse.storage_service.engine.keys.key_lookup import LookupTable
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable, ReadableTable
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.upkeep.jobs import Job
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.server._request_service import LogRequestService
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.history.since_time import (
    Answer,
    TimeQuestion,
    first_since,
)
from streamhouse.storage_service.server.http._memory_return import (
    MEMORY_LOOK_MS,
    MemoryReturn,
    give_back,
)
from streamhouse.storage_service.server.http.body_memory import HeldBody
from streamhouse.storage_service.server.http.fair_shares import WorkingMemory
from streamhouse.storage_service.server.http.http_exchange import (
    HttpExchange,
    Tenure,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.shards._moves import MoveDesk
from streamhouse.storage_service.server.shards.other_shards import Shards
from streamhouse.storage_service.server.status._service_figures import ServiceFigures
from streamhouse.storage_service.server.status._status import STATUS_INTERVAL_MS, StatusSampler
from streamhouse.storage_service.server.status.event_loop import LOOP_LAG_MS, LoopLag
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["ReaderFigures", "Service", "nobody_takes"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_WORKING_SHARE: Final = 2
_SUBSCRIPTION_END_S: Final = 1.0
_PUBLICATION_WAIT_S: Final = 30.0
# A standby may show rows a moment before the commit thread here has noted their end.
_NOTED_WAIT_S: Final = 1.0


async def nobody_takes(_: HttpExchange) -> bool:
    """Hand nothing over: there are no readers."""
    return False


class ReaderFigures(NamedTuple):
    """The readers beside the owner: processes, connections, memory and subscriptions."""

    processes: int = 0
    connections: int = 0
    key_bytes: int = 0
    subscriptions: int = 0


class Service(LogRequestService):
    """A running service. Event loop only, besides what `run_blocking` runs."""

    def __init__(
        self,
        config: ServiceConfig,
        manager: TabletManager,
        executor: ThreadPoolExecutor,
        metrics: ServiceMetrics,
        *,
        lake_reads: LakeReads,
        tenure: Tenure | None = None,
        connections: OpenConnections | None = None,
        shards: Shards | None = None,
        moves: MoveDesk | None = None,
        spans: Spans | None = None,
    ) -> None:
        super().__init__(
            config, executor, metrics, tenure=tenure, connections=connections, spans=spans
        )
        self.lake_reads = lake_reads
        """Reads of rows that have left the log."""
        self.moves = moves
        """Moves of tables between shards; None without a journal."""
        self.shards = shards
        """All shards of the service; None without a journal."""
        self.manager = manager
        figures = ServiceFigures(
            manager,
            metrics,
            data_dir=config.data_dir,
            disk_bytes_max=config.disk_bytes_max,
            ownership=self._ownership,
            request_memory_bytes=lambda: self.request_memory_bytes,
        )
        self.status = StatusSampler(manager, figures, full_tables_max=config.metrics_tables_max)
        self.working_memory = WorkingMemory(config.bodies_bytes_max // _WORKING_SHARE)
        self.memory_return = MemoryReturn(
            held_bytes=lambda: self.request_memory_bytes,
            total_bytes=lambda: self.answers.held_ever,
        )
        self.door_gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """Metrics of the doors: name -> help text, and the function that reads the value."""
        self.hand_over: Callable[[HttpExchange], Awaitable[bool]] = nobody_takes
        """Gives a request and the connection to a reader; whether a reader has the request."""
        self.reader_figures: Callable[[], ReaderFigures] = ReaderFigures
        self.on_drain: list[Callable[[], None]] = []
        """Functions to call when stopping begins, which end the waits of clients."""

    @property
    def request_memory_bytes(self) -> int:
        """The bytes that requests hold: their bodies, the records being decoded, the answers."""
        return self.body_memory.held + self.working_memory.held + self.answers.held

    @property
    def subscription_count(self) -> int:
        """The number of open subscriptions, also at readers."""
        return len(self.subscriptions) + self.reader_figures().subscriptions

    def table(self, path: str) -> OpenTable:
        """Return the table of a URL; raises as the table registry does."""
        return self._find(path, self.manager.table)

    @property
    def may_lose_rows(self) -> bool:
        """See `LogRequestService.may_lose_rows`."""
        return self.manager.may_lose_rows

    def readable(self, path: str) -> OpenTable:
        """See `LogRequestService.readable`."""
        return self._find(path, self.manager.readable)

    def check_readable(self, table: ReadableTable[ReadableLog]) -> None:
        """See `LogRequestService.check_readable`."""
        assert isinstance(table, OpenTable), "the service has no other"
        self.manager.check_readable(table)

    def lookup_table(self, path: str) -> LookupTable:
        """See `RequestService.lookup_table`; raises `UnsupportedError` for a log table."""
        table = self.readable(path)
        if isinstance(table, LookupTable):
            return table
        raise UnsupportedError(
            f"table '{table.path}' has no primary key, so rows cannot be looked up in it; fetch"
            " its log"
        )

    async def wait_until_visible(
        self, exchange: HttpExchange, table: LookupTable, ends: Mapping[int, int]
    ) -> None:
        """See `RequestService.wait_until_visible`: until fetches see the changes."""
        assert isinstance(table, KeyTable), "the service has no other"
        loop = asyncio.get_running_loop()
        for number, end in ends.items():
            bucket, started = table.key_buckets[number], loop.time()
            while bucket.log.high_watermark < end:
                is_noted = end <= bucket.log.log_end_offset
                deadline = started + (_PUBLICATION_WAIT_S if is_noted else _NOTED_WAIT_S)
                if loop.time() >= deadline:
                    raise _late(bucket, end)
                waiter = table.wakeups.waiter(number, timeout_s=deadline - loop.time())
                await exchange.wait(waiter)
                self.manager.check_readable(table)
                bucket.check_usable()
                stage_ended("visible")

    def transactions_of(self, table: OpenTable) -> TableTransactions:
        """Return the transactions of a table; raises if the table is not open any more."""
        self.manager.check_open(table)
        return self.manager.transactions.of(table)

    def _find(self, path: str, find: Callable[[TablePath], OpenTable]) -> OpenTable:
        parsed = TablePath.parse(path)
        try:
            return find(parsed)
        except NotFoundError as error:
            error.table = str(parsed)
            raise

    def jobs(self) -> list[Job]:
        """Return the regular jobs: samples, the return of memory, records and moves."""
        lag = LoopLag(self.metrics.loop_lag_seconds)
        return [
            *(() if self.shards is None else self.shards.jobs()),
            *(() if self.moves is None else self.moves.jobs()),
            Job(name="status", every_ms=STATUS_INTERVAL_MS, look=self.status.sample, is_eager=True),
            Job(name="memory_return", every_ms=MEMORY_LOOK_MS, look=self._return_memory),
            Job(name="loop_lag", every_ms=LOOP_LAG_MS, look=lag.look),
        ]

    def _ownership(self) -> dict[str, Any]:
        """Return the role, and the figures of the journal, for the status page."""
        if self.shards is None:
            return {"role": "alone", "journal": None}
        return {"role": "owner", "shard": self.shards.own, "journal": self.shards.figures()}

    async def _return_memory(self) -> None:
        if self.memory_return.is_due():
            await self.run_blocking(give_back)

    async def decode(self, function: Callable[..., _T], body: bytes, *args: Any) -> _T:
        """Decode the body of a write as `run_by_size`; then check that this process may write."""
        if len(body) > self.config.inline_bytes_max:
            decoded = await self.run_blocking(function, body, *args)
        else:
            decoded = function(body, *args)
        stage_ended("decode")
        if self.tenure is not None:
            self.tenure.check_write()
        return decoded

    async def first_since(self, questions: Sequence[TimeQuestion]) -> list[Answer]:
        """Return the first row of a time or later for each question, in log or lake.

        All conversions of a time to an offset use this method. Raises as `run_blocking`.
        """
        return await first_since(questions, run=self.run_blocking, lake_reads=self.lake_reads)

    def readiness(self) -> tuple[int, str]:
        """Return the readiness for callers without a token: an HTTP status and a word."""
        if self.is_draining:
            return 503, "stopping"
        if self.tenure is not None:
            try:
                self.tenure.check()
            except NotOwnerError:
                return 503, "not_owner"
        return 200, "ready"

    def check_write(self) -> None:
        """Raise `NotOwnerError` if rows stored by this process may be lost to the next owner."""
        if self.tenure is not None:
            self.tenure.check_write()

    def check_written(self) -> None:
        """Raise `UnknownOutcomeError` if rows already stored may be lost to the next owner."""
        try:
            self.check_write()
        except NotOwnerError as error:
            raise UnknownOutcomeError(
                f"{error.message}: the rows may or may not be stored; repeat the request there"
                " as it was, with what tells it from others"
            ) from error

    def check_answer(self, exchange: HttpExchange, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Check that this process may answer a write with the offsets `ranges`.

        Raises as `check_written`. A write without changes is a read: the answer is about the rows
        of this process, and a new owner may have different rows by now.
        """
        if all(start == end for start, end in ranges.values()):
            exchange.tenure = self.tenure
        else:
            self.check_written()

    async def rows_body(self, exchange: HttpExchange, memory: HeldBody) -> bytes:
        """Receive the body of a request that writes rows; `memory` counts the body's memory."""
        self.manager.disk_budget.check()
        body = await exchange.read_body(memory)
        self.metrics.received_bytes.inc(len(body))
        return body

    def count_broken(self, error: StreamhouseError | None) -> None:
        """Count the refused rows of an error, if they broke a constraint."""
        if isinstance(error, CheckFailedError) and error.broken is not None:
            path, constraint, count = error.broken
            with contextlib.suppress(StreamhouseError):
                table = self.manager.table(TablePath.parse(path))
                table.broken_rows[constraint, "refused"] += count

    def report(self, exchange: Exchange, error: StreamhouseError) -> None:
        """See `RequestService.report`."""
        self.count_broken(error)
        super().report(exchange, error)

    async def drain(self) -> None:
        """Refuse new requests, end waits, subscriptions and slow bodies, wait for all others."""
        self.is_draining = True
        self.manager.wake_all()
        for end_waits in self.on_drain:
            end_waits()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUBSCRIPTION_END_S):
                await self._idle.wait()
        # The remaining subscribers do not read and would delay the stop until its time limit.
        for exchange in tuple(self.subscriptions):
            exchange.abort()
        self.body_memory.stop()
        await self._idle.wait()


def _late(bucket: KeyBucket, end: int) -> StreamhouseError:
    """Return the error for changes up to `end` that stay invisible."""
    log_end = bucket.log.log_end_offset
    if end <= log_end:
        return UnavailableError(f"{bucket.where} is busy writing; try again later")
    return LogCutError(
        f"{bucket.where}: the log ends at offset {log_end}, but the client has seen changes up to"
        f" {end}: those that were not in the journal yet were lost with their machine; see"
        " --journal-ack in docs/journal.md"
    )
