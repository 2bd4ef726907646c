"""The ASGI application: the checks around every route, and the dispatch to the route's code.

Order for each request: request id, liveness, check of foreign web pages, token and grants, stopping
and limits, then the route. `routes.py` lists the routes. `_process_answers.py` answers about the
process, functions of `data/` answer data routes, the FastAPI application of
`control/_control_plane.py` answers control routes, and doors (`doors.py`) answer their own routes.
Every failure is answered with the JSON of a `StreamhouseError` and the request id.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    MethodNotAllowedError,
    NotFoundError,
    RequestTooLargeError,
    StreamhouseError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.log_lines import REQUEST_ID
from streamhouse.core.model.table import TablePath
from streamhouse.core.traces.stages import STAGES
from streamhouse.storage_service.server._process_answers import AboutProcess, ProcessAnswers
from streamhouse.storage_service.server.control._control_plane import build_control_plane
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
from streamhouse.storage_service.server.doors import Doors
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
)
from streamhouse.storage_service.server.service import Service

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["ServiceApp"]

_logger = logging.getLogger(__name__)

_SMALL_JSON_BYTES: Final = 64 << 10
# The JSON of a table of 2,000 columns and 10,000 nested fields has 40,000 colons.
_JSON_FIELDS_MAX: Final = 50_000
_JSON_VALUES_MAX: Final = 250_000
# Errors that say nothing about the data, or leave the outcome open: true without ownership, too.
_TRUE_WITHOUT_OWNERSHIP: Final = (
    UnauthorizedError,
    ForbiddenError,
    UnknownOutcomeError,
    InternalError,
)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class ServiceApp:
    """A service over HTTP, with the doors that this opens."""

    def __init__(self, service: Service, doors: Doors) -> None:
        self._service = service
        self._doors = doors
        with contextlib.ExitStack() as closing:
            for door in doors:
                closing.callback(door.close)
                door.open(service)
            of_doors = [door.control_routes for door in doors]
            self._control_plane = build_control_plane(service, doors.routes.rows, of_doors)
            self._closing = closing.pop_all()
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
        """Close the doors; blocks until the doors' last requests end. Call after `drain`."""
        self._closing.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `lifespan` and web sockets are not supported."""
        assert scope["type"] == "http", scope["type"]
        exchange = HttpExchange(
            scope,
            receive,
            send,
            request_id=self._request_id(scope),
            config=self._service.config,
        )
        REQUEST_ID.set(exchange.request_id)
        started = time.perf_counter()
        try:
            await self._answer(exchange)
        except ClientGone:
            pass
        except StreamhouseError as error:
            await self._answer_error(exchange, error)
        except asyncio.CancelledError:
            # The stop does not wait any longer. uvicorn would answer 500, and tell no client why.
            if exchange.status or not self._service.is_draining:
                raise
            kind = UnknownOutcomeError if exchange.is_changing else UnavailableError
            await self._answer_error(exchange, kind("the service stopped during the request"))
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
            self._service.metrics.requests.count(exchange.route, exchange.status, seconds)
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
        match = None if exchange.path in OPEN_PAGES else self._doors.find(exchange)
        if match is not None:
            service.access.admit(exchange)
            if match.route.answer is Answer.NOTHING:
                self._check_method(exchange)
            if service.spans is not None:
                self._follow(exchange, match, service.spans)
            if service.tenure is not None and match.route.is_read:
                exchange.tenure = service.tenure
        share = exchange.share
        is_about_service = match is None or match.route.is_about_service
        service.begin_request(share, is_about_service=is_about_service)
        try:
            await self._dispatch(exchange, match)
        finally:
            service.end_request(share)

    def _check_method(self, exchange: HttpExchange) -> None:
        """Raise `MethodNotAllowedError` for a path that answers other methods only."""
        methods = self._doors.routes.methods(exchange.path)
        if methods:
            exchange.error_headers = ((b"allow", ", ".join(methods).encode()),)
            raise MethodNotAllowedError(
                f"{exchange.path[:200]} has no method {exchange.method}: use {' or '.join(methods)}"
            )

    def _follow(self, exchange: HttpExchange, match: RouteMatch, spans: Spans) -> None:
        """Begin the span of a request with trace headers."""
        route = match.route
        headers = exchange.scope["headers"]
        exchange.followed = spans.follow(exchange.method, route.path, headers)
        if exchange.followed is None:
            STAGES.set(None)
            return
        STAGES.set(exchange.followed.stages)
        exchange.followed.tell("streamhouse.request_id", exchange.request_id)
        if "path" in match.parameters:
            exchange.followed.tell("streamhouse.table", match.parameters["path"])

    async def _dispatch(self, exchange: HttpExchange, match: RouteMatch | None) -> None:
        if match is not None and match.route.answer is Answer.DATA:
            exchange.route = match.route.name
            if not match.route.is_read:
                # A write always waits for its commit; a start without a task saved nothing.
                await own_task()
            await DATA_ANSWERS[exchange.route](exchange, self._service, **match.parameters)
            return
        await own_task()
        if match is not None and match.route.answer is Answer.PROCESS:
            exchange.route = match.route.name
            answer = await self._of_process.to_admitted(exchange)
            assert answer is not None, exchange.path
            self._service.answers.hold_built(exchange, len(answer.body), is_done=False)
            await exchange.answer(answer.status, answer.content_type, [answer.body])
        elif match is None:
            # A request without a token gets no body read.
            await self._hand_over(exchange, b"")
        elif match.route.answer is Answer.DOOR:
            await self._doors.answer(exchange, match)
        else:
            # Also paths without a route: FastAPI answers 404 after the checks of the body.
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
        # Built in a single step of the loop, so at most one answer at a time is not counted yet.
        start, *parts = messages
        answer = b"".join([message.get("body", b"") for message in parts])
        self._service.answers.hold_built(exchange, len(answer), is_done=exchange.is_changing)
        await exchange.send_whole(start["status"], start["headers"], answer)

    async def _answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        exchange.tenure = None
        error = await self._or_elsewhere(error)
        if self._service.tenure is not None and not isinstance(error, _TRUE_WITHOUT_OWNERSHIP):
            # A missing table or row may exist at a new owner by now, and a refusal wrote nothing.
            try:
                self._service.tenure.check()
            except StreamhouseError as lapsed:
                error = lapsed
        self._service.report(exchange, error)
        if exchange.followed is not None:
            exchange.followed.error_code = error.code
        if exchange.status == 0:
            await self._doors.answer_error(exchange, error)

    async def _or_elsewhere(self, error: StreamhouseError) -> StreamhouseError:
        """Return `error`, or for a missing table the error that names the shard of the table."""
        shards = self._service.shards
        if shards is None or not isinstance(error, NotFoundError) or error.table is None:
            return error
        await own_task()
        try:
            return await shards.elsewhere(TablePath.parse(error.table)) or error
        except StreamhouseError as unknown:
            return unknown

    def _request_id(self, scope: Scope) -> str:
        """Return the caller's request id if the id is valid, else a new id."""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return str(value, "ascii")
        return f"{self._request_prefix}-{next(self._request_numbers)}"


# Name of a data route -> handler, called with the parameters of the path.
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
    """Refuse JSON with too many values: parsing would delay all other requests."""
    if len(body) <= _SMALL_JSON_BYTES:
        return
    for mark, limit in ((b":", _JSON_FIELDS_MAX), (b",", _JSON_VALUES_MAX)):
        if body.count(mark) > limit:
            raise RequestTooLargeError(
                f"{exchange.path[:200]}: the body has more than {limit} '{mark.decode()}', which no"
                " right request has; send less at once"
            )


def _check_text(exchange: HttpExchange, body: bytes) -> None:
    """Refuse JSON with half a surrogate pair, which cannot be stored or sent as UTF-8."""
    if b"\\ud" not in body and b"\\uD" not in body:
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{exchange.path[:200]}: the body has half a surrogate pair, which is no text"
        ) from error
    except (ValueError, RecursionError):
        # The parser of the route refuses the body with the place of the mistake.
        return
