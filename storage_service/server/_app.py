"""The service's ASGI application: the dispatch of an admitted request to the route's code.

`_request_app.py` has the checks before the dispatch. `_process_answers.py` answers about the
process, functions of `data/` answer data routes, the FastAPI application of
`control/_control_plane.py` answers control routes, and doors (`doors.py`) answer their own routes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from streamhouse.core.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    StreamhouseError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.server._process_answers import AboutProcess
from streamhouse.storage_service.server._request_app import RequestApp
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
)
from streamhouse.storage_service.server.routes import Answer, RouteMatch
from streamhouse.storage_service.server.service import Service

__all__ = ["ServiceApp"]

_SMALL_JSON_BYTES: Final = 64 << 10
# The JSON of a table of 2,000 columns and 10,000 nested fields has 40,000 colons.
_JSON_FIELDS_MAX: Final = 50_000
_JSON_VALUES_MAX: Final = 250_000


class ServiceApp(RequestApp):
    """A service over HTTP, with the doors that this opens."""

    def __init__(self, service: Service, doors: Doors) -> None:
        super().__init__(service, doors)
        self._service = service
        with contextlib.ExitStack() as closing:
            for door in doors:
                closing.callback(door.close)
                door.open(service)
            of_doors = [door.control_routes for door in doors]
            self._control_plane = build_control_plane(service, doors.routes.rows, of_doors)
            self._closing = closing.pop_all()

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

    async def _dispatch(self, exchange: HttpExchange, match: RouteMatch | None) -> None:
        if match is not None and match.route.answer is Answer.DATA:
            exchange.route = match.route.name
            if not match.route.is_read:
                # A write always waits for its commit; a start without a task saved nothing.
                await own_task()
            elif exchange.route == "subscribe" and await self._service.hand_over(exchange):
                # It may last for weeks.
                raise ClientGone
            await DATA_ANSWERS[exchange.route](exchange, self._service, **match.parameters)
            return
        await own_task()
        if match is not None and match.route.answer is Answer.PROCESS:
            await self._answer_process(exchange, match)
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

    async def _error_for(self, error: StreamhouseError) -> StreamhouseError:
        """Return `error`, or for a missing table the error that names the shard of the table."""
        shards = self._service.shards
        if shards is None or not isinstance(error, NotFoundError) or error.table is None:
            return error
        await own_task()
        try:
            return await shards.elsewhere(TablePath.parse(error.table)) or error
        except StreamhouseError as unknown:
            return unknown


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
