"""The ASGI application: what happens around every route, and which code answers it.

Order for each request: request id, liveness, whose page sends it, token and grants, stopping and
limits, then the route. `routes.py` lists the routes: what a process says of itself is in
process_answers.py, data routes are answered by functions of data/, control routes by the FastAPI
application of control_plane.py.
Whatever goes wrong, the answer is the JSON of a `StreamhouseError` with the request id.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

from streamhouse.core.errors import (
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    StreamhouseError,
    UnauthorizedError,
    UnknownOutcomeError,
)
from streamhouse.core.log_lines import REQUEST_ID
from streamhouse.core.model.lake.facts import REST_CATALOG_PATH
from streamhouse.core.model.table import TablePath
from streamhouse.core.traces.stages import STAGES
from streamhouse.storage_service.kafka_door.registry.registry_route import answer_registry
from streamhouse.storage_service.server._process_answers import AboutProcess, ProcessAnswers
from streamhouse.storage_service.server.control._control_plane import build_control_plane
from streamhouse.storage_service.server.control._iceberg_route import (
    IcebergRoutes,
    answer_error,
    read_plus_as_space,
)
from streamhouse.storage_service.server.data._key_read_route import (
    answer_count,
    answer_lookup,
    answer_prefix_lookup,
    answer_row,
)
from streamhouse.storage_service.server.data._log_read_route import answer_fetch, answer_subscribe
from streamhouse.storage_service.server.data._stage_route import answer_stage
from streamhouse.storage_service.server.data._write_route import (
    answer_append,
    answer_delete,
    answer_upsert,
)
from streamhouse.storage_service.server.http._own_task import own_task
from streamhouse.storage_service.server.http.http_exchange import (
    EXCHANGE_KEY,
    ClientGone,
    HttpExchange,
    Message,
    Receive,
    Scope,
    Send,
)
from streamhouse.storage_service.server.routes import (
    OPEN_PAGES,
    Answer,
    RouteMatch,
    find,
)
from streamhouse.storage_service.server.service import Service

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["ServiceApp"]

_logger = logging.getLogger(__name__)

_SMALL_JSON_BYTES: Final = 64 << 10
# A table of 2,000 columns and 10,000 nested fields has 40,000 of them.
_JSON_FIELDS_MAX: Final = 50_000
_JSON_VALUES_MAX: Final = 250_000
# Errors that say nothing of the data, or not that nothing was done.
_WHOEVER_OWNS: Final = (UnauthorizedError, ForbiddenError, UnknownOutcomeError, InternalError)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class ServiceApp:
    """One service over HTTP."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._iceberg = IcebergRoutes(service)
        self._control_plane = build_control_plane(service, look=self._iceberg.look)
        self._of_process = ProcessAnswers(
            service.access, service.metrics, service.run_blocking, about=self._about
        )
        self._request_prefix = secrets.token_hex(4)
        self._request_numbers = itertools.count(1)

    def _about(self) -> AboutProcess:
        service = self._service
        service_id = service.manager.service_id
        return AboutProcess(
            readiness=service.readiness(),
            role=None if service.tenure is None else "owner",
            service_id=service_id,
            known={"service_id": service_id},
        )

    def close(self) -> None:
        """Close what the routes opened; blocks until no request uses it. Call it when drained."""
        self._iceberg.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `lifespan` and web sockets are not spoken here."""
        assert scope["type"] == "http", scope["type"]
        exchange = HttpExchange(
            scope,
            receive,
            send,
            request_id=self._request_id(scope),
            stall_timeout_ms=self._service.config.answer_stall_timeout_ms,
        )
        REQUEST_ID.set(exchange.request_id)
        started = time.perf_counter()
        try:
            await self._answer(exchange)
        except ClientGone:
            pass
        except StreamhouseError as error:
            await self._answer_error(exchange, error)
        except Exception:  # the outermost loop of a request: a bug is answered, not dropped
            _logger.exception("event=bug request_id=%s path=%s", exchange.request_id, exchange.path)
            bug = InternalError(
                "the service met a bug; its log has the details under this request id"
            )
            await self._answer_error(exchange, bug)
        finally:
            await exchange.end()
            seconds = time.perf_counter() - started
            if exchange.followed is not None:
                exchange.followed.end(exchange.status)
            self._service.metrics.count_request(exchange.route, exchange.status, seconds)
            _logger.debug(
                "event=request request_id=%s method=%s route=%s status=%d ms=%.1f",
                exchange.request_id,
                exchange.method,
                exchange.route,
                exchange.status,
                seconds * 1000,
            )

    async def _answer(self, exchange: HttpExchange) -> None:
        service, answer = self._service, self._of_process.to_anybody(exchange)
        if answer is not None:
            return await exchange.answer(answer.status, answer.content_type, [answer.body])
        service.foreign_requests.check(exchange.method, exchange.scope["headers"])
        if exchange.path.startswith(REST_CATALOG_PATH):
            read_plus_as_space(exchange)
        found = None if exchange.path in OPEN_PAGES else find(exchange.method, exchange.path)
        if found is not None:
            exchange.need, exchange.body = found.need, found.route.body
            service.access.admit(exchange)
            if service.spans is not None:
                self._follow(exchange, found, service.spans)
            if service.tenure is not None and found.route.is_read:
                exchange.tenure = service.tenure
        share = exchange.share
        is_about_service = found is None or found.route.is_about_service
        service.begin_request(share, is_about_service=is_about_service)
        try:
            await self._dispatch(exchange, found)
        finally:
            service.end_request(share)

    def _follow(self, exchange: HttpExchange, found: RouteMatch, spans: Spans) -> None:
        """Begin the span of a request that says which trace it is part of."""
        route = found.route
        headers = exchange.scope["headers"]
        exchange.followed = spans.follow(exchange.method, route.path, headers)
        if exchange.followed is None:
            STAGES.set(None)
            return
        STAGES.set(exchange.followed.stages)
        exchange.followed.tell("streamhouse.request_id", exchange.request_id)
        if "path" in found.parameters:
            exchange.followed.tell("streamhouse.table", found.parameters["path"])

    async def _dispatch(self, exchange: HttpExchange, found: RouteMatch | None) -> None:
        if found is not None and found.route.answer is Answer.DATA:
            exchange.route = found.route.name
            await DATA_ANSWERS[exchange.route](exchange, self._service, **found.parameters)
            return
        await own_task()
        if found is not None and found.route.answer is Answer.PROCESS:
            exchange.route = found.route.name
            answer = await self._of_process.to_admitted(exchange)
            assert answer is not None, exchange.path
            self._service.answers.hold_built(exchange, len(answer.body), is_done=False)
            await exchange.answer(answer.status, answer.content_type, [answer.body])
        elif found is None:
            # Nobody without a token has a body read.
            await self._hand_over(exchange, b"")
        elif found.route.answer is Answer.CATALOG:
            exchange.route = found.route.name
            await self._iceberg.answer(exchange)
        elif found.route.answer is Answer.REGISTRY:
            exchange.route = found.route.name
            await answer_registry(exchange, self._service, found)
        else:
            # Also what no route answers: FastAPI says so, after the body is found in order.
            async with self._service.held_body(exchange) as body:
                await self._hand_over(exchange, body)

    async def _hand_over(self, exchange: HttpExchange, body: bytes) -> None:
        _check_extent(exchange, body)
        _check_text(exchange, body)
        is_delivered = False

        async def receive() -> Message:
            nonlocal is_delivered
            if is_delivered:
                return await exchange.receive()
            is_delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        exchange.scope[EXCHANGE_KEY] = exchange
        try:
            await self._control_plane(exchange.scope, receive, collect)
        finally:
            endpoint = exchange.scope.get("endpoint")
            # The function's name: a path would make as many metrics as there are tables.
            exchange.route = getattr(endpoint, "__name__", exchange.route)
        # Built in one go on this loop, so there is never more than one that is not counted.
        start, *rest = messages
        answer = b"".join([message.get("body", b"") for message in rest])
        self._service.answers.hold_built(exchange, len(answer), is_done=exchange.is_changing)
        await exchange.send_whole(start["status"], start["headers"], answer)

    async def _answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        exchange.tenure = None
        error = await self._or_elsewhere(error)
        if self._service.tenure is not None and not isinstance(error, _WHOEVER_OWNS):
            # That there is no such table or row may be past; and a refused write was not done.
            try:
                self._service.tenure.check()
            except StreamhouseError as lapsed:
                error = lapsed
        self._service.report(exchange, error)
        if exchange.followed is not None:
            exchange.followed.error_code = error.code
        if exchange.status == 0:
            await answer_error(exchange, error)

    async def _or_elsewhere(self, error: StreamhouseError) -> StreamhouseError:
        """Return who has the table that `error` says is not here, if anybody has."""
        shards = self._service.shards
        if shards is None or not isinstance(error, NotFoundError) or error.table is None:
            return error
        await own_task()
        try:
            return await shards.elsewhere(TablePath.parse(error.table)) or error
        except StreamhouseError as unknown:
            return unknown

    def _request_id(self, scope: Scope) -> str:
        """Return the caller's request id if it is a sane one, else a new one."""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return str(value, "ascii")
        return f"{self._request_prefix}-{next(self._request_numbers)}"


# Of each data route of the table, by name: what answers it, given the parameters of its path.
DATA_ANSWERS: Final[Mapping[str, Callable[..., Awaitable[None]]]] = {
    "append": answer_append,
    "upsert": answer_upsert,
    "delete": answer_delete,
    "stage": answer_stage,
    "fetch": answer_fetch,
    "subscribe": answer_subscribe,
    "lookup": answer_lookup,
    "prefix_lookup": answer_prefix_lookup,
    "count": answer_count,
    "row": answer_row,
}


def _check_extent(exchange: HttpExchange, body: bytes) -> None:
    """Refuse JSON of so many values that reading and judging it would hold all others up."""
    if len(body) <= _SMALL_JSON_BYTES:
        return
    for mark, limit in ((b":", _JSON_FIELDS_MAX), (b",", _JSON_VALUES_MAX)):
        if body.count(mark) > limit:
            raise RequestTooLargeError(
                f"{exchange.path[:200]}: the body has more than {limit} '{mark.decode()}', which no"
                " right request has; send less at once"
            )


def _check_text(exchange: HttpExchange, body: bytes) -> None:
    """Refuse JSON with half a surrogate pair: it is no text, and cannot be stored or sent."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{exchange.path[:200]}: the body has half a surrogate pair, which is no text"
        ) from error
    except (ValueError, RecursionError):
        # Refused by whoever reads it, with the place.
        return
