"""The parts that every process with routes has: limits in use, access, memory, worker threads.

`service.py` adds the tables of the service, a reader (`readers/`) the rows held by the reader, a
standby (`_front_app.py`) the followed rows.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import contextvars
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from streamhouse.core.errors import (
    ForbiddenError,
    OverloadedError,
    RequestTooLargeError,
    StreamhouseError,
    UnauthorizedError,
    UnavailableError,
)
from streamhouse.core.model.table_state import TableState
from streamhouse.core.traces.stages import stage_ended
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_lookup import LookupTable
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.engine.wakeups import ANY_BUCKET
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.server.access.access import (
    AccessControl,
    ForeignRequests,
    LastGrants,
)
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http._parameters import integer, offsets
from streamhouse.storage_service.server.http.answer_memory import AnswerMemory
from streamhouse.storage_service.server.http.body_memory import BodyMemory
from streamhouse.storage_service.server.http.fair_shares import FairTurns
from streamhouse.storage_service.server.http.http_exchange import (
    MESSAGE_CHARACTERS_MAX,
    Headers,
    HttpExchange,
    Tenure,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["LogRequestService", "RequestService"]

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_RESERVED_REQUESTS: Final = 100
# A single busy caller may have seven eighths of all requests, two busy callers less than half each.
_SHARE_OF_FREE: Final = 7
# An error at a limit names the limit: "... (open_requests_max); try again later".
_NAMED_LIMIT: Final = re.compile(r"\((\w+)\)")
_LIMITS: Final = frozenset(option.name for option in ServiceConfig.limits())


class RequestService(abc.ABC):
    """The limits and the access of one process. Event loop only, besides `run_blocking`'s work."""

    read_headers: Headers = ()
    """Headers of an answer with rows, besides the headers of the route."""

    def __init__(
        self,
        config: ServiceConfig,
        executor: ThreadPoolExecutor,
        metrics: ServiceMetrics,
        *,
        tenure: Tenure | None = None,
        connections: OpenConnections | None = None,
        spans: Spans | None = None,
        last_grants: LastGrants | None = None,
    ) -> None:
        self.config = config
        self.spans = spans
        """None: the service makes no traces."""
        self.tenure = tenure
        """The ownership of this shard; None without a journal."""
        self.metrics = metrics
        metrics.show_limits(
            {option.name: getattr(config, option.name) for option in config.limits()}
        )
        self.foreign_requests = ForeignRequests(config)
        self.access = AccessControl(config, last_grants=last_grants)
        self.body_memory = BodyMemory(config.bodies_bytes_max, body_bytes_max=config.body_bytes_max)
        self.answers = AnswerMemory(config.answers_bytes_max)
        self.open_requests = 0
        self._requests_by_share: dict[str, int] = {}
        # No `or`: an empty `OpenConnections` is false.
        self.connections = OpenConnections.of(config) if connections is None else connections
        self.is_draining = False
        self.on_answered: Callable[[HttpExchange], None] | None = None
        """Called after each request, for the readers beside the owner."""
        self._executor = executor
        self.turns = FairTurns(config.worker_threads)
        """The turns on worker threads."""
        self._idle = asyncio.Event()
        self._idle.set()

    @abc.abstractmethod
    def lookup_table(self, path: str) -> LookupTable:
        """Return the primary key table of a URL; raises as the table registry does."""

    @abc.abstractmethod
    async def wait_until_visible(
        self, exchange: HttpExchange, table: LookupTable, ends: Mapping[int, int]
    ) -> None:
        """Return once `table` shows the changes below `ends`; call for a table without them.

        Raises `LogCutError` for lost changes, and other errors for late changes.
        """

    async def run_blocking(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run `function` on a worker thread, in the caller's turn."""
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
        """Run `function` on a body: a small body on the event loop, else on a worker thread."""
        if len(body) > self.config.inline_bytes_max:
            return await self.run_blocking(function, body, *args)
        return function(body, *args)

    def begin_request(self, share: str, *, is_about_service: bool = False) -> None:
        """Count a request in progress; raises while stopping and at the limits.

        A caller may have at most `_SHARE_OF_FREE` times as many requests as are free, so another
        caller can always begin a request. Some places are reserved for requests about the service:
        operators must get answers from a full service.
        """
        if self.is_draining:
            raise UnavailableError("the service is stopping; try again later or on its successor")
        requests_max, caller_requests = (
            self.config.open_requests_max,
            self._requests_by_share.get(share, 0),
        )
        if self.open_requests >= requests_max + (_RESERVED_REQUESTS if is_about_service else 0):
            raise OverloadedError(
                f"{requests_max} requests are in progress (open_requests_max); try again later"
            )
        free = requests_max - self.open_requests
        if caller_requests and caller_requests >= free * _SHARE_OF_FREE and not is_about_service:
            raise OverloadedError(
                f"{caller_requests} of {requests_max} requests in progress are this caller's"
                " (open_requests_max), which leaves no more for the others; try again later"
            )
        self.open_requests += 1
        self._requests_by_share[share] = caller_requests + 1
        self._idle.clear()

    def end_request(self, share: str) -> None:
        """End the count of a request that `begin_request` has counted."""
        self.open_requests -= 1
        remaining = self._requests_by_share.pop(share) - 1
        if remaining:
            self._requests_by_share[share] = remaining
        if self.open_requests == 0:
            self._idle.set()

    @contextlib.asynccontextmanager
    async def held_body(self, exchange: HttpExchange) -> AsyncIterator[bytes]:
        """Receive the body of a request, and hold its memory within the context."""
        with self.body_memory.body(exchange.share) as memory:
            yield await exchange.read_body(memory)

    def report(self, exchange: Exchange, error: StreamhouseError) -> None:
        """Count an answered error; log the error as a warning if an operator should see it."""
        self.metrics.errors.labels(error.code).inc()
        if isinstance(error, OverloadedError | RequestTooLargeError):
            for name in _LIMITS.intersection(_NAMED_LIMIT.findall(error.message)):
                self.metrics.limits_reached.labels(name).inc()
        if isinstance(error, UnauthorizedError | ForbiddenError):
            self.access.record_refusal(exchange, error.code)
        # Refusals at a limit are normal, and a log line for each would add load.
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


class LogRequestService(RequestService):
    """A process that answers reads of logs as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subscriptions: set[HttpExchange] = set()
        """The open subscriptions."""

    @property
    def fetch_wait_ms_max(self) -> int:
        """How long a fetch may wait for rows."""
        return self.config.fetch_wait_ms_max

    @property
    @abc.abstractmethod
    def may_lose_rows(self) -> bool:
        """Whether readers see rows that would be lost with this machine."""

    @abc.abstractmethod
    def readable(self, path: str) -> ReadableTable[ReadableLog]:
        """Return the table of a URL, only for reads; raises as the table registry does."""

    @abc.abstractmethod
    def check_readable(self, table: ReadableTable[ReadableLog]) -> None:
        """Raise if `table` can no longer be read here, as `readable` does."""

    async def table_state(
        self,
        exchange: HttpExchange,
        path: str,
        *,
        after: str | None,
        max_wait_ms: str,
        table_id: int | None,
    ) -> TableState:
        """Return the state of a table, with `after` once some bucket is beyond its offset.

        The arguments are the parameters of a request.
        """
        table = self.readable(path)
        wait_ms = integer("max_wait_ms", max_wait_ms, least=0)
        seen = offsets("after", "{}" if after is None else after, table.info, table_id=table_id)
        if after is not None:
            wait_ms = min(wait_ms, self.fetch_wait_ms_max)
            deadline = asyncio.get_running_loop().time() + wait_ms / 1000
            while not any(t.high_watermark > seen.get(b, 0) for b, t in enumerate(table.tablets)):
                if not await self.wait_for_rows(exchange, table, ANY_BUCKET, deadline=deadline):
                    break
                self.check_readable(table)
        await self.settle_state(table)
        return replace(table.state(), may_lose_rows=self.may_lose_rows)

    async def settle_state(self, table: ReadableTable[ReadableLog]) -> None:
        """Return once `table.state()` is the published state, as always in the owner."""

    async def wait_for_rows(
        self, exchange: Exchange, table: ReadableTable[ReadableLog], bucket: int, *, deadline: float
    ) -> bool:
        """Wait until `bucket` of `table` may have changed; False at once after the deadline.

        The caller must check its condition right before the call, without an await in between, and
        again after the call.
        """
        remaining_s = deadline - asyncio.get_running_loop().time()
        if remaining_s <= 0 or self.is_draining:
            return False
        await exchange.wait(table.wakeups.waiter(bucket, timeout_s=remaining_s))
        return True

    @contextlib.contextmanager
    def subscription(self, exchange: HttpExchange) -> Iterator[None]:
        """Count a subscription within the context; raises `OverloadedError` at the limit."""
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
