"""What all routes share: the tables, the limits in use, waiting, and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streamhouse.core.errors import (
    ForbiddenError,
    NotFoundError,
    NotOwnerError,
    OverloadedError,
    RequestTooLargeError,
    StreamhouseError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions.table_transactions import TableTransactions
from streamhouse.storage_service.engine.upkeep.jobs import Job
from streamhouse.storage_service.server._moves import MoveDesk
from streamhouse.storage_service.server.access.access import AccessControl, ForeignRequests
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
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.answer_memory import AnswerMemory
from streamhouse.storage_service.server.http.body_memory import BodyMemory, HeldBody
from streamhouse.storage_service.server.http.fair_shares import FairTurns
from streamhouse.storage_service.server.http.http_exchange import (
    MESSAGE_CHARACTERS_MAX,
    HttpExchange,
    Tenure,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.shards import Shards
from streamhouse.storage_service.server.status._metrics import ServiceMetrics
from streamhouse.storage_service.server.status._service_figures import ServiceFigures
from streamhouse.storage_service.server.status._status import STATUS_INTERVAL_MS, StatusSampler
from streamhouse.storage_service.server.status.event_loop import LOOP_LAG_MS, LoopLag

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["Service"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_RESERVED_REQUESTS: Final = 100
_SUBSCRIPTION_END_S: Final = 1.0
# An error over a limit names it: "... (open_requests_max); try again later".
# A caller alone may have seven eighths of all requests; of two each has less than a half.
_SHARE_OF_FREE: Final = 7
_NAMED_LIMIT: Final = re.compile(r"\((\w+)\)")
_LIMITS: Final = frozenset(option.name for option in ServiceConfig.limits())


class Service:
    """A running service. Event loop only, besides what `run_blocking` runs."""

    def __init__(
        self,
        config: ServiceConfig,
        manager: TabletManager,
        executor: ThreadPoolExecutor,
        metrics: ServiceMetrics,
        *,
        tenure: Tenure | None = None,
        connections: OpenConnections | None = None,
        shards: Shards | None = None,
        moves: MoveDesk | None = None,
        spans: Spans | None = None,
        lake_reads: LakeReads | None = None,
    ) -> None:
        self.config = config
        self.lake_reads = lake_reads
        """Of a service that can read what has left the log."""
        self.spans = spans
        """Of a service that makes traces."""
        self.moves = moves
        """Of a service with a journal: tables that come from another shard, or go to one."""
        self.shards = shards
        """Of a service with a journal: which other shards there are, and what they have."""
        self.tenure = tenure
        """Of a service with a journal: until when what it reads is nobody else's."""
        self.manager = manager
        self.metrics = metrics
        metrics.show_limits(
            {option.name: getattr(config, option.name) for option in config.limits()}
        )
        self.foreign_requests = ForeignRequests(config)
        self.access = AccessControl(config)
        figures = ServiceFigures(
            manager,
            metrics,
            data_dir=config.data_dir,
            disk_bytes_max=config.disk_bytes_max,
            ownership=self._ownership,
        )
        self.status = StatusSampler(manager, figures, full_tables_max=config.metrics_tables_max)
        self.body_memory = BodyMemory(config.bodies_bytes_max, body_bytes_max=config.body_bytes_max)
        self.answers = AnswerMemory(config.answers_bytes_max)
        self.memory_return = MemoryReturn(
            held=lambda: self.answers.held + self.body_memory.bytes_held,
            ever=lambda: self.answers.held_ever,
        )
        self.kafka_address: tuple[str, int] | None = None
        """Where Kafka clients are told to connect, of a service that serves them."""
        self.open_requests = 0
        self._requests_by_share: dict[str, int] = {}
        self.catalog_requests = 0
        # One without any yet is false.
        self.connections = OpenConnections.of(config) if connections is None else connections
        self.subscriptions: set[HttpExchange] = set()
        """Those that are open."""
        self.is_draining = False
        self.on_drain: list[Callable[[], None]] = []
        """Called when stopping begins, by who ends the waits of clients then."""
        self._executor = executor
        self.turns = FairTurns(config.worker_threads)
        """On worker threads."""
        self._idle = asyncio.Event()
        self._idle.set()

    def table(self, path: str) -> OpenTable:
        """Return the table a URL names; raises as the registry does."""
        return self._found(path, self.manager.table)

    def readable(self, path: str) -> OpenTable:
        """Return the table a URL names, for who only reads; raises as the registry does."""
        return self._found(path, self.manager.readable)

    def transactions_of(self, table: OpenTable) -> TableTransactions:
        """Return the transactions of a table; raises if it is open no more."""
        self.manager.check_open(table)
        return self.manager.transactions.of(table)

    def _found(self, path: str, find: Callable[[TablePath], OpenTable]) -> OpenTable:
        parsed = TablePath.parse(path)
        try:
            return find(parsed)
        except NotFoundError as error:
            error.table = str(parsed)
            raise

    def jobs(self) -> list[Job]:
        """What is measured and given back by itself."""
        lag = LoopLag(self.metrics.loop_lag_seconds)
        return [
            *(() if self.shards is None else self.shards.jobs()),
            *(() if self.moves is None else self.moves.jobs()),
            Job(name="status", every_ms=STATUS_INTERVAL_MS, look=self.status.sample, is_eager=True),
            Job(name="memory_return", every_ms=MEMORY_LOOK_MS, look=self._return_memory),
            Job(name="loop_lag", every_ms=LOOP_LAG_MS, look=lag.look),
        ]

    def _ownership(self) -> dict[str, Any]:
        """Return the role for people to see, and how the journal is if there is one."""
        if self.shards is None:
            return {"role": "alone", "journal": None}
        return {"role": "owner", "shard": self.shards.own, "journal": self.shards.figures()}

    async def _return_memory(self) -> None:
        if self.memory_return.is_due():
            await self.run_blocking(give_back)

    async def run_blocking(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run `function` on a worker thread, when it is the caller's turn."""
        await own_task()
        handed_over = time.perf_counter()

        def run() -> _T:
            self.metrics.worker_wait_seconds.observe(time.perf_counter() - handed_over)
            stage_ended("thread")
            return function(*args)

        async with self.turns.turn():
            return await asyncio.get_running_loop().run_in_executor(
                self._executor, contextvars.copy_context().run, run
            )

    async def run_by_size(self, function: Callable[..., _T], body: bytes, *args: Any) -> _T:
        """Run `function` on a body: here if that is soon done, else on a worker thread."""
        if len(body) > self.config.inline_bytes_max:
            return await self.run_blocking(function, body, *args)
        return function(body, *args)

    async def first_since(self, questions: Sequence[TimeQuestion]) -> list[Answer]:
        """Return the first row of a time or later for each question, in log or lake.

        Whoever turns a time into an offset asks here. Raises as `run_blocking`.
        """
        return await first_since(questions, run=self.run_blocking, lake_reads=self.lake_reads)

    async def wait_for_rows(
        self, exchange: Exchange, table: OpenTable, bucket: int, *, deadline: float
    ) -> bool:
        """Wait until `bucket` of `table` may have changed; False at once if waiting is over.

        The caller has just checked its condition without awaiting since, and checks it again.
        """
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        if left_s <= 0 or self.is_draining:
            return False
        await exchange.wait(table.wakeups.waiter(bucket, timeout_s=left_s))
        return True

    def readiness(self) -> tuple[int, str]:
        """Return what somebody without a token is told: an HTTP status and a word."""
        if self.is_draining:
            return 503, "stopping"
        if self.tenure is not None:
            try:
                self.tenure.check()
            except NotOwnerError:
                return 503, "not_owner"
        return 200, "ready"

    def check_write(self) -> None:
        """Raise `NotOwnerError` if rows that are stored here now may never be the owner's."""
        if self.tenure is not None:
            self.tenure.check_write()

    def check_written(self) -> None:
        """Raise `UnknownOutcomeError` if rows that were stored here may not be the owner's."""
        try:
            self.check_write()
        except NotOwnerError as error:
            raise UnknownOutcomeError(
                f"{error.message}: the rows may or may not be stored; repeat the request there"
                " as it was, with what tells it from others"
            ) from error

    def begin_request(self, share: str, *, is_about_service: bool = False) -> None:
        """Count a request in progress; raises when stopping or when there are too many.

        One caller's are at most so many times what is left, so there is always room for another.
        A few more may be about the service itself: who looks after it must get in when it is full.
        """
        if self.is_draining:
            raise UnavailableError("the service is stopping; try again later or on its successor")
        most, own = self.config.open_requests_max, self._requests_by_share.get(share, 0)
        if self.open_requests >= most + (_RESERVED_REQUESTS if is_about_service else 0):
            raise OverloadedError(
                f"{most} requests are in progress (open_requests_max); try again later"
            )
        free = most - self.open_requests
        if own and own >= free * _SHARE_OF_FREE and not is_about_service:
            raise OverloadedError(
                f"{own} of {most} requests in progress are this caller's (open_requests_max), which"
                " leaves no more for the others; try again later"
            )
        self.open_requests += 1
        self._requests_by_share[share] = own + 1
        self._idle.clear()

    def end_request(self, share: str) -> None:
        """Count a request that `begin_request` has counted no longer."""
        self.open_requests -= 1
        left = self._requests_by_share.pop(share) - 1
        if left:
            self._requests_by_share[share] = left
        if self.open_requests == 0:
            self._idle.set()

    @contextlib.contextmanager
    def subscription(self, exchange: HttpExchange) -> Iterator[None]:
        """Count a subscription; refuses it when there are too many."""
        if len(self.subscriptions) >= self.config.subscriptions_max:
            raise OverloadedError(
                f"{self.config.subscriptions_max} subscriptions are open (subscriptions_max);"
                " try again later"
            )
        self.subscriptions.add(exchange)
        try:
            yield
        finally:
            self.subscriptions.discard(exchange)

    async def rows_body(self, exchange: HttpExchange, held: HeldBody) -> bytes:
        """Receive the body of a request that writes rows; its memory is `held`."""
        self.manager.disk_budget.check()
        # It waits for its commit in any case: measured, to begin without a task saved nothing.
        await own_task()
        body = await self.read_body(exchange, held)
        self.metrics.received_bytes.inc(len(body))
        return body

    @contextlib.asynccontextmanager
    async def held_body(self, exchange: HttpExchange) -> AsyncIterator[bytes]:
        """Receive the body that the route takes, and hold its memory while it is used."""
        with self.body_memory.body(exchange.caller.name) as held:
            yield await self.read_body(exchange, held)

    async def read_body(self, exchange: HttpExchange, held: HeldBody) -> bytes:
        """Receive the body that the route takes; its memory is `held`."""
        body = await exchange.read_body(
            held,
            bytes_max=getattr(self.config, exchange.body.limit_name),
            timeout_ms=self.config.body_read_timeout_ms,
        )
        stage_ended("body")
        return body

    def report(self, exchange: Exchange, error: StreamhouseError) -> None:
        """Count an error that is answered; log it if somebody has to look after the service."""
        self.metrics.errors.labels(error.code).inc()
        if isinstance(error, OverloadedError | RequestTooLargeError):
            for name in _LIMITS.intersection(_NAMED_LIMIT.findall(error.message)):
                self.metrics.limits_reached.labels(name).inc()
        if isinstance(error, UnauthorizedError | ForbiddenError):
            self.access.record_refusal(exchange, error.code)
        # Refusing what is too much is normal, and one line for each would make it worse.
        is_normal = error.http_status < 500 or isinstance(error, OverloadedError | UnavailableError)
        level = logging.DEBUG if is_normal else logging.WARNING
        _logger.log(
            level,
            "event=error request_id=%s route=%s code=%s message=%r",
            exchange.request_id,
            exchange.route,
            error.code,
            error.message[:MESSAGE_CHARACTERS_MAX],
        )

    async def drain(self) -> None:
        """Refuse new requests, end waits and subscriptions, return when the others are done."""
        self.is_draining = True
        self.manager.wake_all()
        for end_waits in self.on_drain:
            end_waits()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SUBSCRIPTION_END_S):
                await self._idle.wait()
        # Those left do not read: they would hold the stop up until it is cut short.
        for exchange in tuple(self.subscriptions):
            exchange.abort()
        await self._idle.wait()
