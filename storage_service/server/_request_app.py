"""The checks around every route, for each process that answers requests.

Order for each request: request id, liveness, check of foreign web pages, token and grants, stopping
and limits, then the route. `routes.py` lists the routes. Every failure is answered with the JSON of
a `StreamhouseError` and the request id.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Final

from streamhouse.core.errors import (
    ForbiddenError,
    InternalError,
    MethodNotAllowedError,
    StreamhouseError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.core.log_lines import REQUEST_ID
from streamhouse.core.traces.stages import STAGES
from streamhouse.storage_service.server._process_answers import AboutProcess, ProcessAnswers
from streamhouse.storage_service.server._request_service import RequestService
from streamhouse.storage_service.server.doors import Doors
from streamhouse.storage_service.server.http.http_exchange import (
    ClientGone,
    HttpExchange,
    Receive,
    Scope,
    Send,
)
from streamhouse.storage_service.server.routes import OPEN_PAGES, Answer, RouteMatch

if TYPE_CHECKING:
    from streamhouse.core.traces.spans import Spans

__all__ = ["RequestApp"]

_logger = logging.getLogger(__name__)

# Errors that say nothing about the data, or leave the outcome open: true without ownership, too.
_TRUE_WITHOUT_OWNERSHIP: Final = (
    UnauthorizedError,
    ForbiddenError,
    UnknownOutcomeError,
    InternalError,
)
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestApp(abc.ABC):
    """An ASGI application with the checks; a subclass answers the admitted requests."""

    def __init__(self, service: RequestService, doors: Doors) -> None:
        self._checks = service
        self._doors = doors
        self._of_process = ProcessAnswers(
            service.access, service.metrics, service.run_blocking, about=self._about
        )
        self._request_prefix = secrets.token_hex(4)
        self._request_numbers = itertools.count(1)

    @abc.abstractmethod
    def _about(self) -> AboutProcess:
        """Return the state of the process."""

    @abc.abstractmethod
    async def _dispatch(self, exchange: HttpExchange, match: RouteMatch | None) -> None:
        """Answer an admitted request."""

    async def _error_for(self, error: StreamhouseError) -> StreamhouseError:
        """Return the error to answer in place of `error`."""
        return error

    def _count(self, exchange: HttpExchange, seconds: float) -> None:
        """Count a request that was answered here."""
        if not exchange.status and exchange.connection.is_given_back:
            return
        self._checks.metrics.requests.count(exchange.route, exchange.status, seconds)
        if self._checks.on_answered is not None:
            self._checks.on_answered(exchange)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; `lifespan` and web sockets are not supported."""
        assert scope["type"] == "http", scope["type"]
        exchange = HttpExchange(
            scope,
            receive,
            send,
            request_id=self._request_id(scope),
            config=self._checks.config,
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
            if exchange.status or not self._checks.is_draining:
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
            self._count(exchange, seconds)
            _logger.debug(
                "event=request request_id=%s method=%s route=%s status=%d ms=%.1f",
                exchange.request_id,
                exchange.method,
                exchange.route,
                exchange.status,
                seconds * 1000,
            )

    async def _answer(self, exchange: HttpExchange) -> None:
        service, answer = self._checks, self._of_process.to_anybody(exchange)
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

    async def _answer_process(self, exchange: HttpExchange, match: RouteMatch) -> None:
        """Answer an admitted request about the process."""
        exchange.route = match.route.name
        answer = await self._of_process.to_admitted(exchange)
        assert answer is not None, exchange.path
        self._checks.answers.hold_built(exchange, len(answer.body), is_done=False)
        await exchange.answer(answer.status, answer.content_type, [answer.body])

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

    async def _answer_error(self, exchange: HttpExchange, error: StreamhouseError) -> None:
        exchange.tenure = None
        error = await self._error_for(error)
        if self._checks.tenure is not None and not isinstance(error, _TRUE_WITHOUT_OWNERSHIP):
            # A missing table or row may exist at a new owner by now, and a refusal wrote nothing.
            try:
                self._checks.tenure.check()
            except StreamhouseError as lapsed:
                error = lapsed
        self._checks.report(exchange, error)
        if exchange.followed is not None:
            exchange.followed.error_code = error.code
        if exchange.status == 0:
            await self._doors.answer_error(exchange, error)

    def _request_id(self, scope: Scope) -> str:
        """Return the caller's request id if the id is valid, else a new id."""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return str(value, "ascii")
        return f"{self._request_prefix}-{next(self._request_numbers)}"
