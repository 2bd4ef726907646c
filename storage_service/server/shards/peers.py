"""Requests from one process of a service to another, with the token of the original caller.

The request goes to the endpoint in the other shard's lease; all shards of a service have the same
tokens and grants. A request is forwarded at most once, and never from https to http: otherwise an
attacker who can write leases would get the token.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from streamhouse.client.http.endpoint import parse_endpoint
from streamhouse.core.errors import UnavailableError, UnknownOutcomeError
from streamhouse.core.threads import Pool

__all__ = [
    "HANDED_ON",
    "HttpPeers",
    "PeerAnswer",
    "PeerRequest",
]

HANDED_ON: Final = b"x-streamhouse-handed-on"
"""The header of a request forwarded by another shard, which is not forwarded again."""
_TIMEOUT_S: Final = 30.0
_THREADS: Final = 8
_ANSWER_BYTES_MAX: Final = 256 << 20
_READS: Final = ("GET", "HEAD")
_PASSED_ON: Final = (
    b"authorization",
    b"content-type",
    b"if-none-match",
    b"x-iceberg-access-delegation",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest:
    """A request to another process; `target` is the original path and query."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""
    timeout_s: float = _TIMEOUT_S

    @classmethod
    def of(
        cls,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        body: bytes = b"",
        timeout_s: float = _TIMEOUT_S,
    ) -> PeerRequest:
        """Return a caller's request in the form to forward, with the necessary `headers`."""
        passed = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in _PASSED_ON
        }
        return cls(
            method=method,
            target=target,
            headers={**passed, HANDED_ON.decode(): "1"},
            body=body,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The answer of another process, with any status."""

    status: int
    content_type: str
    body: bytes
    etag: str | None = None


class HttpPeers:
    """The other processes by HTTP; each request has its own connection and thread."""

    def __init__(self, *, is_tls: bool = False) -> None:
        """`is_tls`: all processes of the service are reached by https."""
        self._is_tls = is_tls
        # A pool starts its threads with the first requests.
        self._threads = Pool("peers", _THREADS)

    def close(self) -> None:
        """Wait for the requests in progress."""
        self._threads.shutdown()

    async def ask(self, endpoint: str, request: PeerRequest) -> PeerAnswer:
        """Return the answer of the process at `endpoint`.

        Raises `UnavailableError` if the request had no effect, and `UnknownOutcomeError` if a
        change may have happened: a caller may repeat the request only after `UnavailableError`.
        """
        if self._is_tls and not endpoint.startswith("https:"):
            raise UnavailableError(
                f"the shard at {endpoint} is not asked: it has no TLS, and this one has; give all"
                " shards --tls-cert, or --advertise https://..."
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, _ask, endpoint, request
        )


def _ask(endpoint: str, request: PeerRequest) -> PeerAnswer:
    connection = _connection(endpoint, timeout_s=request.timeout_s)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise UnavailableError(f"the shard at {endpoint} does not answer: {error}") from error
        try:
            connection.request(
                request.method, request.target, body=request.body or None, headers=request.headers
            )
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MAX + 1)
            content_type = answer.getheader("content-type") or "application/json"
            etag = answer.getheader("etag")
        except (OSError, http.client.HTTPException) as error:
            kind = UnavailableError if request.method in _READS else UnknownOutcomeError
            raise kind(f"the shard at {endpoint} did not answer: {error}") from error
    finally:
        connection.close()
    if len(body) > _ANSWER_BYTES_MAX:
        kind = UnavailableError if request.method in _READS else UnknownOutcomeError
        raise kind(f"the shard at {endpoint} answers more than is handed on")
    return PeerAnswer(answer.status, content_type, body, etag)


def _connection(endpoint: str, *, timeout_s: float) -> http.client.HTTPConnection:
    parsed = parse_endpoint(endpoint)
    host = urlsplit(parsed.url)
    assert host.hostname is not None, endpoint
    if host.scheme == "http":
        return http.client.HTTPConnection(host.hostname, host.port, timeout=timeout_s)
    return http.client.HTTPSConnection(
        host.hostname, host.port, timeout=timeout_s, context=parsed.tls_context()
    )
