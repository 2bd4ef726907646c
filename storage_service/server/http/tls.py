"""TLS: the certificate, checked before anything is opened, and the connections that use it.

uvicorn knows a connection once its handshake is done. Until then it has a file open that nobody
counts, so connections that never shake hands would take all of them, also those of the log. Here
they are among the others: bounded in all and of one address, and closed for new ones while idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from streamhouse.storage_service.config import ServiceConfig, is_loopback
from streamhouse.storage_service.errors import InvalidRequestError, OverloadedError
from streamhouse.storage_service.secret_sources import read_private
from streamhouse.storage_service.server.http.open_connections import OpenConnections

__all__ = ["TlsListener", "certificate_fingerprint", "tls_context"]

_logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S: Final = 10
# When the system refuses another open file.
_PAUSE_S: Final = 0.1


def tls_context(config: ServiceConfig) -> ssl.SSLContext | None:
    """Return what TLS is spoken with; None without a certificate.

    Then a warning if tokens will cross the network readable by everybody on the way. Raises
    `InvalidRequestError` if certificate and key cannot be used together.
    """
    if config.tls_certificate_file is None:
        if not is_loopback(config.host):
            _logger.warning("event=tokens_in_the_clear host=%s advice='--tls-cert'", config.host)
        return None
    if config.tls_key_file is not None:
        read_private(config.tls_key_file, kind="TLS key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty password instead of None: a service must not ask on a terminal.
        context.load_cert_chain(
            config.tls_certificate_file, config.tls_key_file, config.tls_key_password or ""
        )
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"--tls-cert {config.tls_certificate_file} and --tls-key {config.tls_key_file} cannot"
            f" be used: {error}"
        ) from error
    return context


def certificate_fingerprint(path: Path) -> str:
    """Return the SHA-256 of the first certificate of a PEM file, which is the service's own."""
    end = "-----END CERTIFICATE-----"
    text = path.read_text(encoding="ascii", errors="replace")
    first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


class TlsListener:
    """Hands connections over to `make_protocol` when their handshake is done. Event loop only."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        *,
        backlog: int,
        connections: OpenConnections,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self._listening = listening
        self._context = context
        self._connections = connections
        self._make_protocol = make_protocol
        listening.setblocking(False)
        listening.listen(backlog)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        """Accept no more, and end the handshakes in progress."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listening)
            except OSError as error:
                _logger.warning("event=cannot_accept message='%s'", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            handshake = _Handshake()
            try:
                self._connections.opened(handshake, peer[0])
            except OverloadedError:
                # It could be told why only after a handshake.
                accepted.close()
                continue
            task = loop.create_task(self._shake_hands(handshake, accepted))
            handshake.task = task
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, handshake: _Handshake, peer: socket.socket) -> None:
        # Answers are small and have to leave at once.
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            # Whoever does not speak TLS, or goes away, is nobody's loss.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_protocol,
                    peer,
                    ssl=self._context,
                    ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S,
                )
        finally:
            self._connections.closed(handshake)


class _Handshake:
    """A connection before it is one of the protocol's."""

    task: asyncio.Task[None]

    def drop(self) -> None:
        """Close at once."""
        self.task.cancel()
