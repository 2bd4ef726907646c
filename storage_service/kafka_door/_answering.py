"""Answers one request: parse, admit, count, call the API's handler, and encode.

A client gets an error in the form of the API, or the connection ends: Kafka has no error that fits
every answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from streamhouse.core.errors import (
    StreamhouseError,
    UnavailableError,
)
from streamhouse.core.log_lines import REQUEST_ID
from streamhouse.storage_service.kafka.messages.answers import (
    Piece,
    answer_body,
    answer_frame,
    element_count,
)
from streamhouse.storage_service.kafka.messages.requests import (
    RequestHeader,
    parse_request,
)
from streamhouse.storage_service.kafka.messages.shapes import (
    MalformedRequestError,
    ManyElementsError,
)
from streamhouse.storage_service.kafka_door._api import Answer, Api, ConnectionEnded
from streamhouse.storage_service.kafka_door._api_versions import API_VERSIONS_KEY, versions_refused
from streamhouse.storage_service.kafka_door._error_codes import error_code_of
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from streamhouse.storage_service.server.http.http_exchange import short

__all__ = ["answer_request", "api_of", "version_refusal"]

_logger = logging.getLogger(__name__)

# Larger messages are read and written on a thread; this many elements block the event loop for a
# hundredth of a second.
_INLINE_ELEMENTS_MAX: Final = 500
_ERROR_FIELDS: Final = ("error_code", "error_message")


def api_of(apis: Mapping[int, Api], api_key: int) -> Api:
    """Return the API of a request; raises `ConnectionEnded` for an unknown API."""
    api = apis.get(api_key)
    if api is None:
        raise ConnectionEnded(f"api key {api_key} is not offered")
    return api


def version_refusal(apis: Mapping[int, Api], header: RequestHeader, api: Api) -> list[Piece] | None:
    """Return the answer to an unsupported version; None if the version is supported.

    Raises `ConnectionEnded` unless the request is ApiVersions: other clients know the versions.
    """
    oldest, newest = api.versions
    if oldest <= header.api_version <= newest:
        return None
    if api.key == API_VERSIONS_KEY:
        body = versions_refused(apis.values())
        return answer_frame(api.key, 0, header.correlation_id, [body])
    raise ConnectionEnded(
        f"version {header.api_version} of {api.name} is not in {oldest}..{newest}"
    )


async def answer_request(exchange: KafkaExchange, data: memoryview) -> list[Piece] | None:
    """Return the encoded answer; None if the client wants no answer.

    Raises `ConnectionEnded`, and `ClientGone` if the client has gone.
    """
    started = time.perf_counter()
    REQUEST_ID.set(exchange.request_id)
    try:
        exchange.admit()
        try:
            request = await _parsed(exchange, data)
        except MalformedRequestError as error:
            raise ConnectionEnded(f"a malformed request of {exchange.api.name}: {error}") from error
        answer = await _answer(exchange, request)
        return None if answer is None else await _frame(exchange, request, answer)
    finally:
        exchange.end_report()
        seconds = time.perf_counter() - started
        exchange.broker.counts.count(exchange.api.name, exchange.error.name, seconds)
        _logger.debug(
            "event=request request_id=%s method=%s route=%s error=%s ms=%.1f",
            exchange.request_id,
            exchange.method,
            exchange.route,
            exchange.error.name,
            seconds * 1000,
        )


async def _parsed(exchange: KafkaExchange, data: memoryview) -> Any:
    try:
        return _parsed_request(exchange, data, elements_max=_INLINE_ELEMENTS_MAX)
    except ManyElementsError:
        return await exchange.service.run_blocking(_parsed_request, exchange, data)


def _parsed_request(exchange: KafkaExchange, data: memoryview, **limits: int) -> Any:
    request = parse_request(exchange.header, data, **limits)
    return request if exchange.api.keep is None else exchange.api.keep(request)


async def _answer(exchange: KafkaExchange, request: Any) -> Answer:
    service = exchange.service
    try:
        service.begin_request(exchange.share)
    except StreamhouseError as error:
        refused = _refused(exchange, request, error)
        if exchange.api.is_write:
            # No later request may be stored first: the client sends all of the requests again, in
            # order.
            raise ConnectionEnded(error.message) from error
        return refused
    try:
        if exchange.api.is_read:
            exchange.tenure = service.tenure
        return await exchange.api.answer(exchange, request)
    except StreamhouseError as error:
        return _refused(exchange, request, error)
    except MalformedRequestError as error:
        raise ConnectionEnded(f"a malformed request of {exchange.api.name}: {error}") from error
    finally:
        service.end_request(exchange.share)


def _refused(exchange: KafkaExchange, request: Any, error: StreamhouseError) -> Mapping[str, Any]:
    """Return the API's answer for an error."""
    code = error_code_of(error)
    exchange.note(code)
    exchange.report(error)
    return _with_code(exchange, request, code, error)


def _with_code(
    exchange: KafkaExchange, request: Any, code: ErrorCode, error: StreamhouseError
) -> Mapping[str, Any]:
    message = short(error.message)
    exchange.tenure = None
    if exchange.api.refuse is not None:
        return exchange.api.refuse(request, code, message)
    fields = exchange.has_answer_field
    if "error_code" not in fields or isinstance(error, UnavailableError):
        raise ConnectionEnded(message)
    values: dict[str, Any] = {"error_code": code, "error_message": message}
    return {name: values[name] for name in _ERROR_FIELDS if name in fields}


async def _frame(exchange: KafkaExchange, request: Any, answer: Answer) -> list[Piece]:
    """Return the encoded answer, if this process still owns the data.

    A large answer counts in the memory for answers until sent.
    """
    try:
        if exchange.tenure is not None:
            exchange.tenure.check()
        frame = await _framed(exchange, answer)
        exchange.service.answers.hold_built(
            exchange, sum(map(len, frame)), is_done=not exchange.api.is_read
        )
    except StreamhouseError as error:
        frame = await _framed(exchange, _refused(exchange, request, error))
    return frame


async def _framed(exchange: KafkaExchange, answer: Answer) -> list[Piece]:
    header = exchange.header
    assert answer is not None
    if isinstance(answer, Mapping):
        arguments = header.api_key, header.api_version, answer
        if element_count(answer, most=_INLINE_ELEMENTS_MAX) <= _INLINE_ELEMENTS_MAX:
            body: list[Piece] = [answer_body(*arguments)]
        else:
            body = [await exchange.service.run_blocking(answer_body, *arguments)]
    else:
        body = list(answer)
    return answer_frame(header.api_key, header.api_version, header.correlation_id, body)
