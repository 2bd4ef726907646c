"""The door of the Iceberg REST catalog: requests below `/iceberg`, answered on separate threads.

Catalogs, object stores and the Iceberg library block, so the event loop hands requests to a thread.
The first request loads the library and starts the threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote

from streamhouse.core.errors import (
    AlreadyExistsError,
    CommitConflictError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    FencedError,
    ForbiddenError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    NotOwnerError,
    OverloadedError,
    StreamhouseError,
    TableNotFoundError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import (
    REST_CATALOG_PATH,
    VIA_HEADER,
    LakeState,
)
from streamhouse.core.model.table import TablePath
from streamhouse.core.threads import Pool
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.storage_service.catalog_door._live_requests import live_part
from streamhouse.storage_service.catalog_door._shard_of_request import handed_on
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.live.live_cuts import LiveCuts
from streamhouse.storage_service.live.live_places import LivePlaces
from streamhouse.storage_service.rest_catalog.rest_request import (
    LIVE,
    LivePart,
    RestAnswer,
    RestRequest,
)
from streamhouse.storage_service.server.control.control_routes import ControlRoutes, TableName
from streamhouse.storage_service.server.doors import Door
from streamhouse.storage_service.server.http.http_exchange import Body, Headers, HttpExchange, short
from streamhouse.storage_service.server.routes import (
    ANY,
    ANY_TOKEN,
    READING,
    Answer,
    Route,
    RouteMatch,
    control,
)
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.service_tables import ServiceTables, served_table

if TYPE_CHECKING:
    from streamhouse.storage_service.rest_catalog.rest_api import RestCatalogApi

__all__ = [
    "CatalogDoor",
    "iceberg_error",
]

_logger = logging.getLogger(__name__)

_VERSION_PATH: Final = f"{REST_CATALOG_PATH}/v1/"
_SERVICES_PASSED_MAX: Final = 16
# Error class -> the protocol's status and type; the first matching class counts.
_TYPES: Final[tuple[tuple[type[StreamhouseError], int, str], ...]] = (
    (UnauthorizedError, 401, "NotAuthorizedException"),
    (ForbiddenError, 403, "ForbiddenException"),
    (TableNotFoundError, 404, "NoSuchTableException"),
    (DatabaseNotFoundError, 404, "NoSuchNamespaceException"),
    (NotFoundError, 404, "NotFoundException"),
    (DatabaseNotEmptyError, 409, "NamespaceNotEmptyException"),
    (AlreadyExistsError, 409, "AlreadyExistsException"),
    (CommitConflictError, 409, "CommitFailedException"),
    (FencedError, 409, "CommitFailedException"),
    (UnknownOutcomeError, 500, "CommitStateUnknownException"),
    (OverloadedError, 503, "ServiceUnavailableException"),
    (UnavailableError, 503, "ServiceUnavailableException"),
    # Iceberg clients do not know owners; with this status they repeat the request later.
    (NotOwnerError, 503, "ServiceUnavailableException"),
    (UnsupportedError, 501, "UnsupportedOperationException"),
    (InvalidRequestError, 400, "BadRequestException"),
)


def _row(method: str, path: str, need: str, body: Body = Body.JSON) -> Route:
    return Route(
        method=method,
        path=REST_CATALOG_PATH + path,
        need=need,
        name="iceberg",
        answer=Answer.DOOR,
        body=body,
    )


class CatalogDoor(Door):
    """Hands requests to the REST catalog; refuses requests at the limit of waiting requests."""

    path = REST_CATALOG_PATH
    sidecars = (LivePlaces,)
    # Namespaces are databases. The catalog answers unknown paths in the form of its protocol.
    routes = (
        *control(
            "state", "/v1/tables/{path}", ("POST", "/lake/look", "read:{path}", "look_at_lake")
        ),
        _row(ANY, "/v1/config", ANY_TOKEN),
        # Only OAuth's own route takes a form, to say that there is no OAuth.
        _row(ANY, "/v1/oauth/tokens", ANY_TOKEN, Body.FORM),
        # The grants decide which namespaces are listed.
        _row(READING, "/v1/namespaces", ANY_TOKEN),
        _row(ANY, "/v1/namespaces", "write:*"),
        _row(ANY, "/v1/transactions/commit", "write:*"),
        _row(READING, "/v1/namespaces/{name}/...", "read:{name}.*"),
        _row(ANY, "/v1/namespaces/{name}/...", "admin:{name}.*"),
        _row(READING, "/v1/namespaces/{name}/tables", "read:{name}.*"),
        _row(ANY, "/v1/namespaces/{name}/tables", "write:{name}.*"),
        _row(READING, "/v1/namespaces/{name}/tables/{table}/...", "read:{name}.{table}"),
        _row("DELETE", "/v1/namespaces/{name}/tables/{table}/...", "admin:{name}.{table}"),
        _row(ANY, "/v1/namespaces/{name}/tables/{table}/...", "write:{name}.{table}"),
        _row("DELETE", "/v1/namespaces/{name}/tables/{table}/metrics", "admin:{name}.{table}"),
        _row(ANY, "/v1/namespaces/{name}/tables/{table}/metrics", "read:{name}.{table}"),
        _row(ANY, "/v1/namespaces/{name}/tables/{table}/plan", "read:{name}.{table}"),
        _row(ANY, "/v1/namespaces/{name}/tables/{table}/plan/{id}", "read:{name}.{table}"),
        _row(ANY, "/v1/namespaces/{name}/tables/{table}/tasks", "read:{name}.{table}"),
        _row(ANY, "/v1/namespaces/{name}/tables/{table}/credentials", "read:lake"),
        # The warehouse `live` refuses every change by itself, in a sentence.
        _row(ANY, "/v1/live/...", ANY_TOKEN),
        _row(READING, "/v1/live/namespaces", ANY_TOKEN),
        _row(ANY, "/v1/live/namespaces/{name}/...", "read:{name}.*"),
        _row(ANY, "/v1/live/namespaces/{name}/tables/{table}/...", "read:{name}.{table}"),
        _row(ANY, "/v1/live/namespaces/{name}/tables/{table}/credentials", "read:lake"),
        _row(ANY, "/...", "admin:*"),
    )

    def __init__(self, config: ServiceConfig) -> None:
        # A pool starts its threads with the first requests.
        self._threads = Pool("catalog", config.catalog_threads)
        self._lock = threading.Lock()
        self._api: RestCatalogApi | None = None
        self._live: LiveCuts | None = None
        self._requests = 0

    def open(self, service: Service) -> None:
        """See `Door.open`."""
        self._service = service
        self._live = LiveCuts(service)
        service.manager.upkeep.start(self._live.jobs())
        service.status.live_state = self._live.state_of
        service.door_gauges["catalog_requests"] = (
            "Requests to /iceberg in progress.",
            lambda: self._requests,
        )

    def control_routes(self, routes: ControlRoutes) -> None:
        """See `Door.control_routes`."""

        @routes.answers("Register new commits of other engines to the lake table.")
        async def look_at_lake(path: TableName) -> dict[str, Any]:
            return (await self._look(self._service.table(path))).to_json()

    def before_grants(self, exchange: HttpExchange) -> None:
        """Read a `+` in the path as a space, the meaning in Iceberg Java.

        Grants are checked for the final name. Every client sends a plus sign as %2B.
        """
        scope = exchange.scope
        if b"+" in scope["raw_path"]:
            scope["raw_path"] = scope["raw_path"].replace(b"+", b"%20")
            exchange.path = scope["path"] = unquote(exchange.raw_path)

    async def answer(self, exchange: HttpExchange, _: RouteMatch) -> None:
        """Answer one request below `/iceberg`."""
        path, via = self._path(exchange), self._services_passed(exchange)
        async with self._service.held_body(exchange) as body:
            await self._answer(exchange, self._request(exchange, path, via, body))

    async def _answer(self, exchange: HttpExchange, request: RestRequest) -> None:
        config = self._service.config
        if self._requests >= config.catalog_requests_max:
            raise OverloadedError(
                f"{config.catalog_requests_max} requests to the lake catalog are in progress"
                " (catalog_requests_max); try again later"
            )
        self._requests += 1
        try:
            answer = await self._answer_of_any_shard(exchange, request)
        finally:
            self._requests -= 1
        headers = [] if answer.etag is None else [(b"etag", answer.etag.encode())]
        if request.method == "HEAD" or answer.status in (204, 304):
            await _answer_empty(exchange, answer.status, headers)
        else:
            # Only a few answers are built at once, at most one per thread.
            self._service.answers.hold_built(
                exchange, len(answer.body), is_done=exchange.is_changing
            )
            await exchange.answer(
                answer.status, b"application/json", [answer.body], headers=headers
            )

    async def _answer_of_any_shard(
        self, exchange: HttpExchange, request: RestRequest
    ) -> RestAnswer:
        of_peer = await handed_on(self._service, exchange, request)
        if of_peer is not None:
            return RestAnswer(of_peer.status, of_peer.body, etag=of_peer.etag)
        elsewhere: Mapping[int, TablePath] = {}
        if self._service.shards is not None and not (request.is_read or request.is_live):
            elsewhere = await self._service.shards.ids_elsewhere()
        tables = ServiceTables(self._service, elsewhere=elsewhere)
        live = LivePart()
        if request.is_live and request.is_read:
            live = await self._live_part(exchange, request)
        answer = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._blocking_answer, request, tables, live
        )
        for identifier in answer.committed:
            await self._register_commit(identifier)
        return answer

    async def _live_part(self, exchange: HttpExchange, request: RestRequest) -> LivePart:
        assert self._live is not None
        try:
            return await live_part(self._service, self._live, exchange, request)
        except StreamhouseError as error:
            loop = asyncio.get_running_loop()
            (await loop.run_in_executor(self._threads, self._opened)).raise_shown(error)

    async def _register_commit(self, identifier: tuple[str, ...]) -> None:
        """Register a commit to a table before the answer, so that readers see the commit."""
        try:
            await self._look(self._service.table(".".join(identifier)))
        except StreamhouseError as error:
            # The commit has succeeded in any case; the next read of the table registers it, too.
            if not isinstance(error, NotFoundError | InvalidNameError):
                _logger.warning(
                    "event=lake_not_looked_at table=%s why=%r", ".".join(identifier), error.message
                )

    async def _look(self, table: OpenTable) -> LakeState:
        """Register commits of other engines to the lake table; return the registered state."""

        def head() -> Awaitable[int | None]:
            return asyncio.get_running_loop().run_in_executor(
                self._threads, self._blocking_head, served_table(table)
            )

        return await self._service.manager.tiering.look(table, head)

    def _path(self, exchange: HttpExchange) -> str:
        if not exchange.raw_path.startswith(_VERSION_PATH):
            raise NotFoundError(
                f"there is no route {exchange.path[:200]}; the REST catalog's routes begin with"
                f" {_VERSION_PATH}"
            )
        return exchange.raw_path[len(_VERSION_PATH) :]

    def _request(
        self, exchange: HttpExchange, path: str, via: tuple[str, ...], body: bytes
    ) -> RestRequest:
        segments = tuple(unquote(part) for part in path.split("/"))
        is_live = segments[0] == LIVE
        etags = (exchange.header(b"if-none-match") or b"").decode("latin-1").split(",")
        pairs = parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        delegation = exchange.header(b"x-iceberg-access-delegation") or b""
        return RestRequest(
            method=exchange.method,
            segments=segments[1:] if is_live else segments,
            query=dict(pairs),
            wants_credentials=b"vended-credentials" in delegation
            and exchange.caller.may_read_secrets(),
            sees=exchange.caller.sees_database,
            body=body,
            via=via,
            etags=tuple(etag.strip().removeprefix("W/") for etag in etags),
            is_live=is_live,
        )

    def _services_passed(self, exchange: HttpExchange) -> tuple[str, ...]:
        """Return the services that the request came through; raises if this service is one."""
        text = (exchange.header(VIA_HEADER.encode()) or b"").decode("latin-1")
        passed = tuple(name.strip() for name in text.split(",") if name.strip())
        service_id = self._service.manager.service_id
        if passed[-1:] == (service_id,):
            raise InvalidRequestError(
                "the catalog of this service is this service itself: give --catalog-property that"
                " lead elsewhere; for workers that go through the service, --catalog-access service"
            )
        if service_id in passed:
            between = ", ".join(passed[passed.index(service_id) + 1 :])
            raise InvalidRequestError(
                f"the catalog of service {service_id} leads back to it, through {between}: give one"
                " of these services --catalog-property that lead elsewhere"
            )
        if len(passed) >= _SERVICES_PASSED_MAX or not all(map(str.isalnum, passed)):
            raise InvalidRequestError(
                f"{VIA_HEADER} must name less than {_SERVICES_PASSED_MAX} services by their ids"
            )
        return passed

    def _blocking_answer(
        self, request: RestRequest, tables: ServiceTables, live: LivePart
    ) -> RestAnswer:
        return self._opened().answer(request, tables, live)

    def _blocking_head(self, table: ServedTable) -> int | None:
        return self._opened().readable_head(table)

    def _opened(self) -> RestCatalogApi:
        with self._lock:
            if self._api is None:
                from streamhouse.storage_service.rest_catalog.rest_api import RestCatalogApi  # noqa: PLC0415 - pyiceberg loads with the first request

                config = self._service.config
                self._api = RestCatalogApi(
                    config.lake_catalog(),
                    service_id=self._service.manager.service_id,
                    data_directory=str(config.data_dir.absolute()),
                )
            return self._api

    def close(self) -> None:
        """Wait for the requests in progress and close the catalog."""
        self._threads.shutdown()
        if self._live is not None:
            self._live.close()
        if self._api is not None:
            self._api.close()

    async def answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        """Send an error in the form of the catalog's protocol."""
        status, body = iceberg_error(error)
        if exchange.method == "HEAD":
            await _answer_empty(exchange, status)
        else:
            await exchange.answer_error(error, form=(status, body))


def iceberg_error(error: StreamhouseError) -> tuple[int, dict[str, Any]]:
    """Return the status and body of `error` in the Iceberg protocol."""
    status, name = error.http_status, "InternalServerError"
    for kind, kind_status, kind_name in _TYPES:
        if isinstance(error, kind):
            status, name = kind_status, kind_name
            break
    return status, {
        "error": {
            "message": short(error.message),
            "type": name,
            "code": status,
        }
    }


async def _answer_empty(exchange: HttpExchange, status: int, headers: Headers = ()) -> None:
    length = [] if status in (204, 304) else [(b"content-length", b"0")]
    await exchange.send_whole(status, [*headers, *length], b"")
