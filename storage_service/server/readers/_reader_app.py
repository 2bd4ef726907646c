"""A reader's ASGI application: the checks of every process, and the routes of reads.

A request that this process cannot answer for certain goes to the owner, with its connection: any
other route, a table that is not held, and every error besides "no such row". So the owner alone
refuses requests, and no refusal is decided in two places.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from streamhouse.core.errors import (
    InternalError,
    RowNotFoundError,
    StreamhouseError,
    UnavailableError,
)
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.keys.key_lookup import LookupTable
from streamhouse.storage_service.engine.open_table import ReadableTable
from streamhouse.storage_service.log.readable_log import ReadableLog
from streamhouse.storage_service.server._process_answers import AboutProcess
from streamhouse.storage_service.server._request_app import RequestApp
from streamhouse.storage_service.server._request_service import LogRequestService
from streamhouse.storage_service.server.access.access import LastGrants
from streamhouse.storage_service.server.data._key_read_route import (
    answer_count,
    answer_lookup,
    answer_row,
)
from streamhouse.storage_service.server.data._log_read_route import answer_fetch, answer_subscribe
from streamhouse.storage_service.server.doors import Doors
from streamhouse.storage_service.server.exchange import Exchange
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http._parameters import table_id
from streamhouse.storage_service.server.http.http_exchange import (
    ClientGone,
    HttpExchange,
    Tenure,
)
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.readers._held_table import HeldLog, HeldTables
from streamhouse.storage_service.server.routes import RouteMatch
from streamhouse.storage_service.server.status.metrics import ServiceMetrics

__all__ = ["ReaderApp", "ReaderService"]

_BY_KEY: Final = (answer_row, answer_lookup, answer_count)
_TABLES: Final = "/v1/tables/"


class ReaderService(LogRequestService):
    """The limits of a reader, and the tables that the reader holds."""

    def __init__(
        self,
        config: ServiceConfig,
        executor: ThreadPoolExecutor,
        metrics: ServiceMetrics,
        tables: HeldTables,
        *,
        may_lose_rows: bool,
        tenure: Tenure | None,
        connections: OpenConnections,
        last_grants: LastGrants | None,
    ) -> None:
        super().__init__(
            config,
            executor,
            metrics,
            tenure=tenure,
            connections=connections,
            last_grants=last_grants,
        )
        self.tables = tables
        self._may_lose_rows = may_lose_rows

    @property
    def may_lose_rows(self) -> bool:
        """See `LogRequestService.may_lose_rows`."""
        return self._may_lose_rows

    def readable(self, path: str) -> HeldLog:
        """See `LogRequestService.readable`; raises `UnavailableError` for other tables."""
        table = self.tables.log(path)
        table.published()
        return table

    def check_readable(self, table: ReadableTable[ReadableLog]) -> None:
        """See `LogRequestService.check_readable`; takes the published offsets."""
        assert isinstance(table, HeldLog)
        table.published()

    async def settle_state(self, table: ReadableTable[ReadableLog]) -> None:
        """See `LogRequestService.settle_state`."""
        assert isinstance(table, HeldLog)
        await table.wait_for_state()

    async def wait_for_rows(
        self, exchange: Exchange, table: ReadableTable[ReadableLog], bucket: int, *, deadline: float
    ) -> bool:
        """See `LogRequestService.wait_for_rows`."""
        assert isinstance(table, HeldLog)
        table.watch()
        return await super().wait_for_rows(exchange, table, bucket, deadline=deadline)

    def lookup_table(self, path: str) -> LookupTable:
        """See `RequestService.lookup_table`; raises `UnavailableError` for other tables."""
        return self.tables.rows(path)

    async def wait_until_visible(
        self,
        exchange: HttpExchange,
        table: LookupTable,
        ends: Mapping[int, int],
    ) -> None:
        """See `RequestService.wait_until_visible`: all visible changes are applied already."""
        del exchange, ends
        raise UnavailableError(f"table '{table.path}' has no such changes here")


async def _answer_state(exchange: HttpExchange, service: ReaderService, *, path: str) -> None:
    await own_task()
    query = exchange.query(("after", "max_wait_ms", "table_id"))
    state = await service.table_state(
        exchange,
        path,
        after=query.get("after"),
        max_wait_ms=query.get("max_wait_ms", "0"),
        table_id=table_id(query),
    )
    await exchange.answer_json(state.to_json())


_ANSWERS: Final[Mapping[str, Callable[..., Awaitable[None]]]] = {
    "row": answer_row,
    "lookup": answer_lookup,
    "count": answer_count,
    "fetch": answer_fetch,
    "subscribe": answer_subscribe,
    "table_state": _answer_state,
}


class ReaderApp(RequestApp):
    """See the module."""

    def __init__(self, service: ReaderService, *, is_traced: bool) -> None:
        super().__init__(service, Doors())
        self._service = service
        self._is_traced = is_traced

    def _about(self) -> AboutProcess:
        raise InternalError("a reader answers nothing about itself")

    async def _answer(self, exchange: HttpExchange) -> None:
        is_traced = self._is_traced and exchange.header(b"traceparent") is not None
        if is_traced or not exchange.path.startswith(_TABLES):
            # The owner makes all spans. `/health` is about the owner as well.
            raise self._given_back(exchange)
        await super()._answer(exchange)

    async def _dispatch(self, exchange: HttpExchange, match: RouteMatch | None) -> None:
        answer = None if match is None else _ANSWERS.get(match.route.name)
        if match is None or answer is None:
            raise self._given_back(exchange)
        exchange.route = match.route.name
        if answer in _BY_KEY:
            await self._follow_owner(match.parameters["path"])
        await answer(exchange, self._service, **match.parameters)

    async def _follow_owner(self, path: str) -> None:
        """Bring the rows of a table up to what was published when the request arrived."""
        rows = self._service.tables.rows(path)
        try:
            ends = rows.log.published().ends
            if not rows.follow_at_once(ends):
                await own_task()
                await rows.follow_soon(ends)
        except Exception as error:  # whatever it is, the owner answers from now on
            if isinstance(error, UnavailableError) and rows.log.is_current:
                raise
            self._service.tables.let_go(rows, str(error))
            raise

    async def _answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        if isinstance(error, RowNotFoundError) or exchange.status:
            await super()._answer_error(exchange, error)
        else:
            exchange.connection.give_back()

    @staticmethod
    def _given_back(exchange: HttpExchange) -> ClientGone:
        exchange.connection.give_back()
        return ClientGone()
