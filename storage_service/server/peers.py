"""One process of a service asks another: for what only that one has, in the caller's name.

The caller's own token is sent on, to the endpoint that the other's lease names: all shards of a
service have the same tokens and grants. A request is handed on once, and never from https to http:
whoever may write leases would have the token.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from streamhouse.client.http.endpoint import parse_endpoint
from streamhouse.core.errors import UnavailableError, UnknownOutcomeError

__all__ = ["HANDED_ON", "HttpPeers", "PeerAnswer", "PeerRequest", "Peers"]

HANDED_ON: Final = b"x-streamhouse-handed-on"
"""Of a request that another shard has handed on: it is not handed on again."""
_TIMEOUT_S: Final = 30.0
_THREADS: Final = 8
_ANSWER_BYTES_MAX: Final = 256 << 20
_READS: Final = ("GET", "HEAD")
_PASSED_ON: Final = (b"authorization", b"content-type", b"x-iceberg-access-delegation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest:
    """What is asked; `target` is path and query as they were sent."""

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
        """Return a caller's request as it is handed on, with its `headers` that matter."""
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
    """What another process answered, whatever that was."""

    status: int
    content_type: str
    body: bytes


class Peers(Protocol):
    """The other processes."""

    async def ask(self, endpoint: str, request: PeerRequest) -> PeerAnswer:
        """Return what the process at `endpoint` answers.

        Raises `UnavailableError` if nothing of the request was done, `UnknownOutcomeError` if a
        change may have been: who is told `unavailable` takes it for undone, and repeats it.
        """


class HttpPeers:
    """The other processes by HTTP, each request on a connection and a thread of its own."""

    def __init__(self, *, is_tls: bool = False) -> None:
        """`is_tls`: this process is reached by https, and so are the others."""
        self._is_tls = is_tls
        # Threads start when there is something to ask.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="peers")

    def close(self) -> None:
        """Wait for the requests in progress."""
        self._threads.shutdown()

    async def ask(self, endpoint: str, request: PeerRequest) -> PeerAnswer:
        """See `Peers.ask`."""
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
        except (OSError, http.client.HTTPException) as error:
            kind = UnavailableError if request.method in _READS else UnknownOutcomeError
            raise kind(f"the shard at {endpoint} did not answer: {error}") from error
    finally:
        connection.close()
    if len(body) > _ANSWER_BYTES_MAX:
        kind = UnavailableError if request.method in _READS else UnknownOutcomeError
        raise kind(f"the shard at {endpoint} answers more than is handed on")
    return PeerAnswer(answer.status, content_type, body)


def _connection(endpoint: str, *, timeout_s: float) -> http.client.HTTPConnection:
    parsed = parse_endpoint(endpoint)
    host = urlsplit(parsed.url)
    assert host.hostname is not None, endpoint
    if host.scheme == "http":
        return http.client.HTTPConnection(host.hostname, host.port, timeout=timeout_s)
    return http.client.HTTPSConnection(
        host.hostname, host.port, timeout=timeout_s, context=parsed.tls_context()
    )
