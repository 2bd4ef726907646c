"""HTTP to the storage service: a request and its answer, with retries of repeatable requests.

This module turns connection errors into `StreamhouseError`s. It retries:

- repeatable requests (reads, and writes with a writer id and a sequence), on connection failures
  and on retriable answers, with growing waits, until the caller's deadline; without a wait when the
  service has closed a kept connection
- any request without an effect: no process was reached, or the process is not the owner

`Routes` decides which process of the service gets a request, and which one gets it next; for reads
that any process may answer, `AnyProcess` does. Calls to a
service with several endpoints, or with a process that names another as owner, are tried until they
reach the owner, or until `failover_s` have passed without an owner.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from streamhouse.client.http._any_process import AnyProcess
from streamhouse.client.http._connection_pool import (
    ConnectionPool,
    ReachingError,
    StrangerError,
)
from streamhouse.client.http._http_connection import (
    Answer,
    AnswerStream,
    BrokenConnectionError,
)
from streamhouse.client.http._request_routes import (
    BACKOFF,
    Routes,
    RouteSearch,
    nothing_was_done,
    table_of,
)
from streamhouse.client.http._stop_signal import STOP, StopSignal, pause
from streamhouse.client.http.endpoint import parse_endpoints, speaks_tls, tls_failure
from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    InvalidRequestError,
    LogCutError,
    NotOwnerError,
    StreamhouseError,
    UnavailableError,
    UnknownOutcomeError,
    error_for_code,
)
from streamhouse.core.model.offsets import ROLE_HEADER
from streamhouse.core.model.table import TableInfo

__all__ = ["HttpTransport"]

_ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
_REDIRECTS: Final = 300
_ERROR_BYTES_MAX: Final = 1 << 20
# The owner answers a read that another process leaves unanswered for longer.
_ANY_PROCESS_S: Final = 5.0


class _Answer(dict[str, Any]):
    """A JSON answer; a missing entry means that something else than our service answers."""

    def __init__(self, what: str, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self._what = what

    def __missing__(self, name: str) -> Any:
        raise InvalidRequestError(f"{self._what} without '{name}'; is it a Streamhouse service?")


class HttpTransport:
    """Requests to the processes of a service over kept connections. Thread-safe."""

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None,
        timeout_s: float,
        backoff: Backoff = BACKOFF,
    ) -> None:
        endpoints = parse_endpoints(endpoint)
        self.endpoint_text = endpoint.rstrip("/")
        """The endpoints in their original form, with their trust settings."""
        self.timeout_s = timeout_s
        self.token = token
        self.routes: Final = Routes(endpoints, backoff=backoff)
        self.any_process: Final = AnyProcess(endpoints)
        self._pool = ConnectionPool(endpoints, headers=_authorization(token))

    @property
    def endpoint(self) -> str:
        """The URL for requests without a learnt route."""
        return self.routes.current

    def check_open(self) -> None:
        """Raise `InvalidRequestError` if the transport was closed."""
        self._pool.check_open()

    def close(self) -> None:
        """Close all kept connections, and refuse further requests."""
        self._pool.close()

    def request_json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        is_repeatable: bool = False,
        table: str = "",
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
            table=table,
            wait_s=wait_s,
        ).data
        what = f"{self.endpoint} answered {method} {path}"
        try:
            answer = json.loads(data) if data else None
        except ValueError as error:
            raise InvalidRequestError(
                f"{what} with something that is no JSON; is it a Streamhouse service?"
            ) from error
        return _Answer(what, answer) if isinstance(answer, dict) else answer

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = _ARROW_STREAM,
        is_repeatable: bool,
        table: str = "",
        wait_s: float = 0.0,
        on_repeat: Callable[[StreamhouseError], None] | None = None,
        accepted_statuses: Container[int] = (),
    ) -> Answer:
        """Send a request and return its answer.

        Args:
            body: bytes-like, sent unchanged.
            is_repeatable: sending the request twice has the effect of sending it once.
            table: the table of the request, if the path does not name it.
            wait_s: how long the service may hold the request on purpose.
            on_repeat: called with the error of an attempt that may still arrive, before the request
                is sent again.
            accepted_statuses: error statuses of answers to return instead of raising.

        Raises:
            StreamhouseError: the service's answer, or `UnavailableError` when the service cannot be
                reached, or `UnknownOutcomeError` when a request that must not be repeated broke
                after it was sent.
        """
        deadline = time.monotonic() + self.timeout_s + wait_s
        url = self.routes.of(path, table)
        search: RouteSearch | None = None
        while True:
            try:
                answer = self._send(
                    method,
                    path,
                    query=query,
                    body=body,
                    content_type=content_type,
                    endpoint=url,
                    read_timeout_s=self.timeout_s + wait_s,
                    accepted_statuses=accepted_statuses,
                )
            except StreamhouseError as error:
                if not self._may_send_again(error, is_repeatable=is_repeatable):
                    raise
                search = search or self.search(path, table, deadline=deadline)
                step = search.after(url, error, now=time.monotonic())
                if step is None:
                    last_error = self._last_error(error, search, method=method, path=path)
                    raise last_error from (error if self.routes.is_reached else None)
                failure = error
            else:
                # A standby answers some reads, and owns nothing.
                if search is not None and ROLE_HEADER not in answer.headers:
                    search.succeed(url)
                return answer
            if on_repeat is not None and not nothing_was_done(failure):
                on_repeat(failure)
            pause(step.wait_s)
            url = step.url

    def read(
        self,
        method: str,
        path: str,
        *,
        table: TableInfo | None,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        accepted_statuses: Container[int] = (),
    ) -> Answer:
        """Send a read of rows by key: to the owner, or to any process with `read_from=any`.

        Any process may answer only with the described `table`. Raises as `request`, and
        `LogCutError` once if the service has lost what this client has written or read.
        """
        any_process, answer = self.any_process, None
        if table is not None and not any_process.takes(table):
            table = None
        if table is not None:
            query = {**(query or {}), **any_process.query(table)}
        try:
            if table is not None:
                answer = self._any_answer(
                    method, path, query=query, body=body, accepted_statuses=accepted_statuses
                )
            if answer is None:
                answer = self.request(
                    method,
                    path,
                    query=query,
                    body=body,
                    is_repeatable=True,
                    accepted_statuses=accepted_statuses,
                )
        except LogCutError:
            if table is not None:
                any_process.forget(table)
            raise
        except InvalidRequestError:
            if table is not None:
                any_process.forget_schema(table)
            raise
        if table is not None:
            any_process.note_answer(table, answer.headers)
        return answer

    def fetch_from_any(self, path: str, query: Mapping[str, str]) -> Answer | None:
        """Send a fetch of rows that exist to the process whose turn it is.

        Returns None if the owner is to be asked: also if the process does not have these rows.
        """
        if not self.any_process.is_used:
            return None
        return self._any_answer(
            "GET", path, query={**query, "read_from": "any"}, body=None, accepted_statuses=()
        )

    def _any_answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        body: Any,
        accepted_statuses: Container[int],
    ) -> Answer | None:
        """Return the answer of the process whose turn it is; None if the owner is to be asked."""
        any_process, name = self.any_process, table_of(path)
        url = any_process.next_url(name)
        if url is None:
            return None
        asked_s = time.monotonic()
        try:
            answer = self._send(
                method,
                path,
                query=query,
                body=body,
                content_type=_ARROW_STREAM,
                endpoint=url,
                read_timeout_s=min(self.timeout_s, _ANY_PROCESS_S),
                accepted_statuses=accepted_statuses,
            )
        except StreamhouseError as error:
            if not error.retriable and not isinstance(error, UnknownOutcomeError):
                raise
            if isinstance(error, NotOwnerError):
                any_process.leave_alone(url, name)
            else:
                any_process.leave_alone(url, waited_s=time.monotonic() - asked_s)
            return None
        any_process.answered(url, name)
        return answer

    def search(self, path: str, table: str = "", *, deadline: float) -> RouteSearch:
        """Return the search for a call that has failed just now."""
        return RouteSearch(
            self.routes, table or table_of(path), deadline=deadline, now=time.monotonic()
        )

    def open_stream(
        self,
        url: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        silence_s_max: float,
        stop: StopSignal,
    ) -> AnswerStream:
        """Send a GET to `url`; a read of the answer fails after `silence_s_max` without bytes.

        A read also fails once `stop` is set.
        """
        try:
            node = self._pool.node(url)
            head = node.request_head("GET", _target(path, query), content_type="", length=None)
            connection = self._pool.take(node)
            try:
                stop.attach(connection)
                status, stream = connection.open_stream(head, timeout_s=silence_s_max)
                self.routes.is_reached = True
                if status < _REDIRECTS:
                    return stream
                with stream:
                    data = stream.read(_ERROR_BYTES_MAX)
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            request = f"GET {path}"
            failure = self._failure(error, endpoint=url, request=request, is_stopped=stop.is_set())
            raise failure from _cause(error)
        raise _error_of(status, data, endpoint=url)

    def _may_send_again(self, error: StreamhouseError, *, is_repeatable: bool) -> bool:
        """Return whether a failed request may be sent again, to any process."""
        if not is_repeatable and not nothing_was_done(error):
            return False
        if not error.retriable and not isinstance(error, UnknownOutcomeError):
            return False
        stop = STOP.get()
        if stop is not None and stop.is_set():
            return False
        # A service without any answer so far is more likely misspelt than restarting. With several
        # endpoints some are expected to be away.
        return self.routes.is_reached or len(self.routes.endpoints.listed) > 1

    def _last_error(
        self, error: StreamhouseError, search: RouteSearch, *, method: str, path: str
    ) -> StreamhouseError:
        """Return the error for the caller of a call that is given up with `error`."""
        message = error.message
        if not self.routes.is_reached:
            message = f"nobody answers at {', '.join(self.routes.endpoints.urls)}: {message}"
        elif len(self.routes.endpoints.listed) > 1 or isinstance(error, NotOwnerError):
            message = (
                f"none of {', '.join(self.routes.endpoints.urls)} answered {method} {path} as the"
                f" owner for {self.routes.endpoints.failover_s:g} s (failover_s); the last answer:"
                f" {message}"
            )
        kind = UnavailableError if isinstance(error, NotOwnerError) else type(error)
        if method == "GET":
            kind = UnavailableError
        elif search.is_unknown:
            # Also if the last attempt was refused: an earlier attempt may have had an effect.
            kind = UnknownOutcomeError
        return kind(message, request_id=error.request_id)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        endpoint: str,
        read_timeout_s: float,
        accepted_statuses: Container[int],
    ) -> Answer:
        length = None if body is None else memoryview(body).nbytes
        stop = STOP.get()
        try:
            node = self._pool.node(endpoint)
            head = node.request_head(
                method, _target(path, query), content_type=content_type, length=length
            )
            connection = self._pool.take(node)
            try:
                if stop is not None:
                    stop.attach(connection)
                answer, is_kept = connection.exchange(head, body, timeout_s=read_timeout_s)
                if stop is not None and not stop.detach(connection):
                    is_kept = False
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            request, is_stopped = f"{method} {path}", stop is not None and stop.is_set()
            failure = self._failure(
                error, endpoint=endpoint, request=request, is_stopped=is_stopped
            )
            raise failure from _cause(error)
        if is_kept:
            node.give_back(connection)
        else:
            connection.close()
        self.routes.is_reached = True
        if answer.status >= _REDIRECTS and answer.status not in accepted_statuses:
            raise _error_of(answer.status, answer.data, endpoint=endpoint)
        return answer

    def _failure(
        self, error: OSError, *, endpoint: str, request: str, is_stopped: bool
    ) -> StreamhouseError:
        """Return the caller's error for a failed exchange."""
        is_mute = isinstance(error, BrokenConnectionError) and error.is_mute
        is_first = not (self.routes.is_reached or is_stopped)
        if is_mute and is_first and speaks_tls(endpoint):
            return InvalidRequestError(f"{endpoint} speaks TLS: write https:// instead of http://")
        return _failure(error, endpoint=endpoint, request=request)


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
    """Return the caller's error for a failed exchange."""
    if isinstance(error, StrangerError):
        return UnavailableError(
            f"{endpoint}, which the Streamhouse service named for {request}, is not used: {error}"
        )
    if isinstance(error, ReachingError):
        return UnavailableError(
            f"cannot reach the Streamhouse service at {endpoint}: {error}; start it with"
            " 'streamhouse serve --data-dir DIR', or name another with STREAMHOUSE_ENDPOINT or"
            " 'endpoint'"
        )
    if isinstance(error, ssl.SSLError):
        return tls_failure(error, endpoint=endpoint, request=request)
    return UnknownOutcomeError(
        f"the Streamhouse service at {endpoint} did not answer {request}: {error}"
    )


def _cause(error: OSError) -> OSError | None:
    """Return the cause to show below the caller's error: none whose sentence says everything."""
    return None if isinstance(error, ReachingError) else error


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
