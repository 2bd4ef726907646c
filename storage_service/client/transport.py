"""HTTP to the storage service: the only module of ours that imports the HTTP client library.

Errors of the library become ours here, once. What is retried: every request that is safe to
repeat (reads, and writes that carry a writer id and sequence), on connection failures and on
answers marked retriable, with growing waits, until the caller's deadline.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

import urllib3

from streamhouse.storage_service.backoff import Backoff
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
_CONNECT_TIMEOUT_S: Final = 5.0


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
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(
            num_pools=16, maxsize=16, retries=False, **parts.tls_settings()
        )
        self._is_reached = False

    def close(self) -> None:
        """Close all kept connections."""
        self._pool.clear()

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
        )
        return json.loads(data) if data else None

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/vnd.apache.arrow.stream",
        is_repeatable: bool,
        node: str = "",
        wait_s: float = 0.0,
        on_repeat: Callable[[], None] | None = None,
    ) -> bytes:
        """Send a request and return the answer's body.

        Args:
            body: bytes-like, sent as it is.
            is_repeatable: sending it twice has the effect of sending it once.
            node: endpoint of the node to ask; empty means this transport's.
            wait_s: how long the service may hold the request on purpose.
            on_repeat: called before the request is sent again; the one before may still arrive.

        Raises:
            StreamhouseError: what the service answered, or `UnavailableError` when it cannot be
                reached, or `UnknownOutcomeError` when a request that must not be repeated broke
                after it was sent.
        """
        deadline = time.monotonic() + self.timeout_s + wait_s
        failures = 0
        while True:
            try:
                response = self._send(
                    method,
                    path,
                    query=query,
                    body=body,
                    content_type=content_type,
                    node=node,
                    read_timeout_s=self.timeout_s + wait_s,
                    is_streamed=False,
                )
                data: bytes = response.data
                return data
            except StreamhouseError as error:
                is_passing = error.retriable or isinstance(error, UnknownOutcomeError)
                # A service never seen before is more likely misspelt than restarting.
                if not (is_repeatable and is_passing and self._is_reached):
                    raise
                failures += 1
                if time.monotonic() + _BACKOFF.after(failures) > deadline:
                    if method == "GET":
                        raise UnavailableError(error.message) from error
                    raise
            if on_repeat is not None:
                on_repeat()
            time.sleep(_BACKOFF.jittered_after(failures))

    def open_stream(
        self, path: str, *, query: Mapping[str, str] | None, silence_s_max: float
    ) -> urllib3.BaseHTTPResponse:
        """Send a GET; a read of the open response fails after `silence_s_max` without bytes."""
        return self._send(
            "GET",
            path,
            query=query,
            body=None,
            content_type="",
            node="",
            read_timeout_s=silence_s_max,
            is_streamed=True,
        )

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
        is_streamed: bool,
    ) -> urllib3.BaseHTTPResponse:
        endpoint = node or self.endpoint
        headers = self._headers | ({} if body is None else {"Content-Type": content_type})
        try:
            response = self._pool.request(
                method,
                f"{endpoint}{path}{'?' + urlencode(query) if query else ''}",
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=read_timeout_s),
                preload_content=not is_streamed,
                redirect=False,
            )
        except (
            urllib3.exceptions.NewConnectionError,
            urllib3.exceptions.ConnectTimeoutError,
        ) as error:
            raise UnavailableError(
                f"cannot reach the Streamhouse service at {endpoint}: start it with 'streamhouse"
                " serve --data-dir DIR', or name another with STREAMHOUSE_ENDPOINT or 'endpoint'"
            ) from error
        except urllib3.exceptions.SSLError as error:
            raise tls_failure(error, endpoint=endpoint, request=f"{method} {path}") from error
        except urllib3.exceptions.HTTPError as error:
            raise UnknownOutcomeError(
                f"the Streamhouse service at {endpoint} did not answer {method} {path}: {error}"
            ) from error
        self._is_reached = True
        if response.status >= 400:
            raise _error_of(response, endpoint=endpoint)
        return response


def _error_of(response: urllib3.BaseHTTPResponse, *, endpoint: str) -> StreamhouseError:
    data = response.data
    try:
        detail = json.loads(data)["error"]
        return error_for_code(
            str(detail["code"]), str(detail["message"]), request_id=detail.get("request_id")
        )
    except (ValueError, KeyError, TypeError):
        return InvalidRequestError(
            f"{endpoint} answered HTTP {response.status} without a Streamhouse error;"
            " is it a Streamhouse service?"
        )
