"""The ASGI application of a process with a journal, for every role from the start on.

While the process does not own its shard, health and readiness report the role, and metrics report
the journal. A standby also answers lookups with `at_least`, the offsets to be included in the
answer, from the followed rows, and fetches with `read_from=any` from the followed logs. All other
requests with a valid token get `not_owner`; only health and the bare readiness need no token. Once
the process owns the shard, the service's application answers.

A standby answers a read only for certain. Otherwise the read gets `not_owner` as well: without
followed rows or logs of the table, after changes came too late, at the end of what is applied, for
every error besides "no such row". So the owner alone refuses requests, and no refusal is decided in
two places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from streamhouse.core.errors import (
    ForbiddenError,
    InternalError,
    RowNotFoundError,
    StreamhouseError,
    UnauthorizedError,
)
from streamhouse.core.model.offsets import ROLE_HEADER
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_lookup import LookupTable
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.engine.wakeups import ANY_BUCKET, WaiterLimit, Wakeups
from streamhouse.storage_service.log.followed_log import FollowedLog
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.ownership.roles.role import Role, Standing
from streamhouse.storage_service.server._process_answers import AboutProcess
from streamhouse.storage_service.server._request_app import RequestApp
from streamhouse.storage_service.server._request_service import LogRequestService
from streamhouse.storage_service.server.data._key_read_route import (
    answer_lookup,
    answer_prefix_lookup,
    answer_row,
)
from streamhouse.storage_service.server.data._log_read_route import answer_fetch
from streamhouse.storage_service.server.doors import Doors
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.http_exchange import (
    App,
    Headers,
    HttpExchange,
    Receive,
    Scope,
    Send,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.routes import Answer, RouteMatch
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

__all__ = ["FrontApp"]

_T = TypeVar("_T")

# A read that waits longer is quicker at the owner.
_CATCH_UP_S: Final = 0.3


class FrontApp:
    """See the module. Event loop only."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        standing: Standing,
        metrics: ServiceMetrics,
        executor: ThreadPoolExecutor,
        doors: Doors,
        connections: OpenConnections | None = None,
    ) -> None:
        service = _StandbyService(
            config, executor, metrics, standing=standing, connections=connections
        )
        self._app: App = _StandbyApp(service, doors, standing)

    def hand_over(self, app: App) -> None:
        """Let `app` answer from now on: this process owns the shard."""
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Answer one request; the present application is called without a further await."""
        return self._app(scope, receive, send)


class _StandbyService(LogRequestService):
    """The limits of a process without a shard, and the followed rows and logs."""

    read_headers: Headers = ((ROLE_HEADER, b"standby"),)

    def __init__(
        self,
        config: ServiceConfig,
        executor: ThreadPoolExecutor,
        metrics: ServiceMetrics,
        *,
        standing: Standing,
        connections: OpenConnections | None,
    ) -> None:
        super().__init__(config, executor, metrics, connections=connections)
        self._standing = standing
        self._changes = Wakeups(WaiterLimit(config.waiting_fetches_max))
        self._loop = asyncio.get_running_loop()
        standing.tables.on_change = standing.logs.on_change = self._wake

    @property
    def fetch_wait_ms_max(self) -> int:
        """See `LogRequestService.fetch_wait_ms_max`."""
        return min(super().fetch_wait_ms_max, int(1_000 * _CATCH_UP_S))

    @property
    def may_lose_rows(self) -> bool:
        """Whether the owner may lose rows, with the same options as this process."""
        return self.config.journal_ack != "journal"

    def _wake(self) -> None:
        """Wake the waiting requests; called on the following thread."""
        self._loop.call_soon_threadsafe(self._changes.wake_all)

    def lookup_table(self, path: str) -> LookupTable:
        """See `RequestService.lookup_table`; raises `NotOwnerError` for other tables."""
        return self._followed(self._standing.tables.by_path, path)

    def _followed(self, by_path: Mapping[TablePath, _T], path: str) -> _T:
        table = None
        if self._standing.role is Role.STANDBY:
            table = by_path.get(TablePath.parse(path))
        if table is None:
            raise self._standing.not_owner()
        return table

    async def wait_until_visible(
        self, exchange: HttpExchange, table: LookupTable, ends: Mapping[int, int]
    ) -> None:
        """See `RequestService.wait_until_visible`; raises `NotOwnerError` for late changes."""
        loop, path = asyncio.get_running_loop(), str(table.path)
        deadline = loop.time() + _CATCH_UP_S
        while not table.shows(ends):
            if self.lookup_table(path) is not table:
                raise self._standing.not_owner()
            await self._wait(exchange, deadline=deadline)

    def readable(self, path: str) -> ReadableTable[FollowedLog]:
        """See `LogRequestService.readable`; raises `NotOwnerError` for other tables."""
        return self._followed(self._standing.logs.by_path, path)

    def check_readable(self, table: ReadableTable[ReadableLog]) -> None:
        """See `LogRequestService.check_readable`."""
        if self.readable(str(table.path)) is not table:
            raise self._standing.not_owner()

    async def wait_until_open(self, exchange: HttpExchange, path: TablePath) -> None:
        """Return once the logs of a table are open; raises `NotOwnerError` if they come late."""
        standing, loop = self._standing, asyncio.get_running_loop()
        if path in standing.logs.by_path:
            return
        standing.logs.ask(path)
        deadline = loop.time() + _CATCH_UP_S
        while standing.role is Role.STANDBY and path not in standing.logs.by_path:
            await self._wait(exchange, deadline=deadline)

    async def wait_for_rows(
        self, exchange: Exchange, table: ReadableTable[ReadableLog], bucket: int, *, deadline: float
    ) -> bool:
        """See `LogRequestService.wait_for_rows`.

        Raises `NotOwnerError` after the deadline: the owner may have rows that are not applied.
        """
        del table, bucket
        await self._wait(exchange, deadline=deadline)
        return True

    async def _wait(self, exchange: Exchange, *, deadline: float) -> None:
        """Wait for applied changes of any table; raises `NotOwnerError` after the deadline."""
        remaining_s = deadline - asyncio.get_running_loop().time()
        if remaining_s <= 0 or self.is_draining:
            raise self._standing.not_owner()
        self._standing.is_needed.set()
        await exchange.wait(self._changes.waiter(ANY_BUCKET, timeout_s=remaining_s))


async def _answer_fetch(
    exchange: HttpExchange, service: _StandbyService, *, path: str, bucket: str
) -> None:
    await service.wait_until_open(exchange, TablePath.parse(path))
    await answer_fetch(exchange, service, path=path, bucket=bucket)


# Which route is answered, if the query has the word.
_ANSWERS: Final[Mapping[str, tuple[Callable[..., Awaitable[None]], bytes]]] = {
    "row": (answer_row, b"at_least="),
    "lookup": (answer_lookup, b"at_least="),
    "prefix_lookup": (answer_prefix_lookup, b"at_least="),
    "fetch": (_answer_fetch, b"read_from=any"),
}


class _StandbyApp(RequestApp):
    """The checks of every process, the answers about the process, and a standby's reads."""

    def __init__(self, service: _StandbyService, doors: Doors, standing: Standing) -> None:
        super().__init__(service, doors)
        self._service = service
        self._standing = standing

    def _about(self) -> AboutProcess:
        standing = self._standing
        return AboutProcess(
            # Not 200: a load balancer should send requests only to the owner.
            readiness=(503, standing.role),
            role=standing.role,
            service_id=standing.service_id,
            known={"owner": standing.owner},
        )

    async def _dispatch(self, exchange: HttpExchange, match: RouteMatch | None) -> None:
        if match is None:
            # Pages without data: the answer names the owner, which is for callers with a token.
            self._service.access.admit(exchange)
        elif match.route.answer is Answer.PROCESS:
            await own_task()
            return await self._answer_process(exchange, match)
        elif (entry := _ANSWERS.get(match.route.name)) is not None:
            answer, word = entry
            if word in exchange.scope["query_string"]:
                return await self._read(exchange, match, answer)
        raise self._standing.not_owner()

    async def _read(
        self, exchange: HttpExchange, match: RouteMatch, answer: Callable[..., Awaitable[None]]
    ) -> None:
        exchange.route = match.route.name
        try:
            await answer(exchange, self._service, **match.parameters)
        except (UnauthorizedError, ForbiddenError, InternalError, RowNotFoundError):
            raise
        except StreamhouseError as error:
            if exchange.status:
                raise
            raise self._standing.not_owner() from error
