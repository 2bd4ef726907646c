"""HTTP to the storage service: one request and its answer, sent again where that is safe.

What breaks a connection becomes an error of ours here, once. What is retried: every request that is
safe to repeat (reads, and writes that carry a writer id and sequence), on connection failures and
on answers marked retriable, with growing waits, until the caller's deadline. It is sent again at
once where the service has closed a kept connection: that says nothing of the service.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from streamhouse.storage_service.backoff import Backoff
from streamhouse.storage_service.client.connection import (
    Answer,
    AnswerStream,
    BrokenConnectionError,
)
from streamhouse.storage_service.client.connection_pool import ConnectionPool, ReachingError
from streamhouse.storage_service.client.endpoint import parse_endpoint, tls_failure
from streamhouse.storage_service.errors import (
    InvalidRequestError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    error_for_code,
)

__all__ = ["HttpTransport"]

_BACKOFF: Final = Backoff(first_s=0.05, most_s=2.0)
_ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
_REDIRECTS: Final = 300
_ERROR_BYTES_MAX: Final = 1 << 20


class HttpTransport:
    """Requests to one or several nodes over kept connections. Thread-safe."""

    def __init__(self, endpoint: str, *, token: str | None, timeout_s: float) -> None:
        parts = parse_endpoint(endpoint)
        self.endpoint = parts.url
        """The service's URL, without what vouches for its certificate."""
        self.endpoint_text = endpoint.rstrip("/")
        """The same with it, as it was given."""
        self.timeout_s = timeout_s
        self.token = token
        self._pool = ConnectionPool(parts, headers=_authorization(token))
        if parts.url.startswith("https:"):
            # A CA file that is none is said now.
            self._pool.tls  # noqa: B018
        self._is_reached = False

    def close(self) -> None:
        """Close all kept connections."""
        self._pool.close()

    def request_json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        is_repeatable: bool = False,
        wait_s: float = 0.0,
    ) -> Any:
        """Send a JSON request and return the decoded JSON answer."""
        data = self.request(
            method,
            path,
            query=query,
            body=None if body is None else json.dumps(body).encode(),
            content_type="application/json",
            is_repeatable=is_repeatable or method == "GET",
            wait_s=wait_s,
        ).data
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise InvalidRequestError(
                f"{self.endpoint} answered {method} {path} with something that is no JSON;"
                " is it a Streamhouse service?"
            ) from error

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = _ARROW_STREAM,
        is_repeatable: bool,
        node: str = "",
        wait_s: float = 0.0,
        on_repeat: Callable[[], None] | None = None,
        passed: Container[int] = (),
    ) -> Answer:
        """Send a request and return its answer.

        Args:
            body: bytes-like, sent as it is.
            is_repeatable: sending it twice has the effect of sending it once.
            node: endpoint of the node to ask; empty means this transport's.
            wait_s: how long the service may hold the request on purpose.
            on_repeat: called before the request is sent again; the one before may still arrive.
            passed: statuses of answers that are returned although they are errors.

        Raises:
            StreamhouseError: what the service answered, or `UnavailableError` when it cannot be
                reached, or `UnknownOutcomeError` when a request that must not be repeated broke
                after it was sent.
        """
        deadline = time.monotonic() + self.timeout_s + wait_s
        failures = 0
        while True:
            try:
                return self._send(
                    method,
                    path,
                    query=query,
                    body=body,
                    content_type=content_type,
                    node=node,
                    read_timeout_s=self.timeout_s + wait_s,
                    passed=passed,
                )
            except StreamhouseError as error:
                is_passing = error.retriable or isinstance(error, UnknownOutcomeError)
                # A service never seen before is more likely misspelt than restarting.
                if not (is_repeatable and is_passing and self._is_reached):
                    raise
                cause = error.__cause__
                is_stale = isinstance(cause, BrokenConnectionError) and cause.is_stale
                failures += not is_stale
                if time.monotonic() + _BACKOFF.after(failures) > deadline:
                    if method == "GET":
                        raise UnavailableError(error.message) from error
                    raise
            if on_repeat is not None:
                on_repeat()
            if not is_stale:
                time.sleep(_BACKOFF.jittered_after(failures))

    def open_stream(
        self, path: str, *, query: Mapping[str, str] | None, silence_s_max: float
    ) -> AnswerStream:
        """Send a GET; a read of the open answer fails after `silence_s_max` without bytes."""
        try:
            node = self._pool.node(self.endpoint)
            head = node.request_head("GET", _target(path, query), content_type="", length=None)
            connection = self._pool.take(node)
            try:
                status, stream = connection.open_stream(head, timeout_s=silence_s_max)
                self._is_reached = True
                if status < _REDIRECTS:
                    return stream
                with stream:
                    data = stream.read(_ERROR_BYTES_MAX)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise _failure(error, endpoint=self.endpoint, request=f"GET {path}") from error
        raise _error_of(status, data, endpoint=self.endpoint)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        node: str,
        read_timeout_s: float,
        passed: Container[int],
    ) -> Answer:
        endpoint = node or self.endpoint
        length = None if body is None else memoryview(body).nbytes
        try:
            asked = self._pool.node(endpoint)
            head = asked.request_head(
                method, _target(path, query), content_type=content_type, length=length
            )
            connection = self._pool.take(asked)
            try:
                answer, is_kept = connection.exchange(head, body, timeout_s=read_timeout_s)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            raise _failure(error, endpoint=endpoint, request=f"{method} {path}") from error
        if is_kept:
            asked.give_back(connection)
        else:
            connection.close()
        self._is_reached = True
        if answer.status >= _REDIRECTS and answer.status not in passed:
            raise _error_of(answer.status, answer.data, endpoint=endpoint)
        return answer


def _authorization(token: str | None) -> str:
    """Return the header line with a token."""
    if token is None:
        return ""
    if not token.isprintable() or not token.isascii():
        raise InvalidRequestError("the bearer token has characters that no HTTP header may have")
    return f"Authorization: Bearer {token}\r\n"


def _target(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _failure(error: OSError, *, endpoint: str, request: str) -> StreamhouseError:
    """Return what a failed exchange means to the caller."""
    if isinstance(error, ReachingError):
        return UnavailableError(
            f"cannot reach the Streamhouse service at {endpoint}: start it with 'streamhouse"
            " serve --data-dir DIR', or name another with STREAMHOUSE_ENDPOINT or 'endpoint'"
        )
    if isinstance(error, ssl.SSLError):
        return tls_failure(error, endpoint=endpoint, request=request)
    return UnknownOutcomeError(
        f"the Streamhouse service at {endpoint} did not answer {request}: {error}"
    )


def _error_of(status: int, data: bytes | bytearray, *, endpoint: str) -> StreamhouseError:
    try:
        detail = json.loads(data)["error"]
        owner = detail.get("owner")
        return error_for_code(
            str(detail["code"]),
            str(detail["message"]),
            request_id=detail.get("request_id"),
            owner=owner if isinstance(owner, str) else None,
        )
    except (ValueError, KeyError, TypeError):
        return InvalidRequestError(
            f"{endpoint} answered HTTP {status} without a Streamhouse error;"
            " is it a Streamhouse service?"
        )
