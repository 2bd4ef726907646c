"""TLS: the certificate, checked before the service opens its data, and the TLS connections.

uvicorn knows a connection only after the handshake. Connections that never finish a handshake would
take all open files of the process, including the files of the log. Therefore `OpenConnections`
counts and bounds a connection from its beginning, and closes idle handshakes for new connections.

A certificate is replaced without a restart. The service checks the files every second and shows the
new certificate to later connections. Open connections keep the old certificate.
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

from streamhouse.client.http.own_certificate import remember_own_certificate
from streamhouse.core.errors import (
    InvalidRequestError,
    OverloadedError,
    StreamhouseError,
)
from streamhouse.core.secret_sources import file_signature, read_private
from streamhouse.storage_service.config import ServiceConfig, is_loopback
from streamhouse.storage_service.server.http.open_connections import BACKLOG, OpenConnections

__all__ = ["Certificate", "TlsListener", "certificate_fingerprint"]

_logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S: Final = 10
_LOOK_INTERVAL_S: Final = 1.0
# The pause after the system refused another open file.
_PAUSE_S: Final = 0.1


class Certificate:
    """The certificate and key, read again when the files change; broken files change nothing.

    Raises `InvalidRequestError` if certificate and key cannot be used together at the start.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._signature = self._signature_now()
        self.context = self._loaded()

    @classmethod
    def of(cls, config: ServiceConfig) -> Certificate | None:
        """Return the certificate of the configuration; None without a certificate.

        Without a certificate, a warning is logged if tokens cross the network in the clear.
        """
        if config.tls_certificate_file is not None:
            return cls(config)
        if not is_loopback(config.host):
            _logger.warning("event=tokens_in_the_clear host=%s advice='--tls-cert'", config.host)
        return None

    def refresh(self) -> None:
        """Read the files if they have changed since the last look."""
        # Taken before the read: the next look then notices a change during the read.
        signature = self._signature_now()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            # A new context: a certificate without its key would spoil the context in use.
            self.context = self._loaded()
        except (StreamhouseError, OSError, ValueError) as error:
            # The two files are replaced one after the other.
            _logger.warning("event=certificate_not_reloaded why=%r", str(error))
        else:
            _logger.info("event=certificate_reloaded path=%s", self._config.tls_certificate_file)

    def _loaded(self) -> ssl.SSLContext:
        assert self._config.tls_certificate_file is not None
        context = _context(self._config)
        # Remembered before the first handshake: a worker of this process may be the first client.
        remember_own_certificate(certificate_fingerprint(self._config.tls_certificate_file))
        return context

    def _signature_now(self) -> tuple[tuple[int, ...] | None, ...]:
        files = (self._config.tls_certificate_file, self._config.tls_key_file)
        return tuple(None if path is None else file_signature(path) for path in files)


def _context(config: ServiceConfig) -> ssl.SSLContext:
    assert config.tls_certificate_file is not None
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
    """Return the SHA-256 of the first certificate of a PEM file, the service's certificate."""
    end = "-----END CERTIFICATE-----"
    text = path.read_text(encoding="ascii", errors="replace")
    first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


class TlsListener:
    """Hands connections over to `make_protocol` after the handshake. Event loop only."""

    def __init__(
        self,
        listening: socket.socket,
        certificate: Certificate,
        *,
        connections: OpenConnections,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        self._listening = listening
        self._certificate = certificate
        self._connections = connections
        self._make_protocol = make_protocol
        listening.setblocking(False)
        listening.listen(BACKLOG)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept())
        self._looking = asyncio.ensure_future(self._look())

    async def close(self) -> None:
        """Accept no more, and end the handshakes in progress."""
        tasks = [self._accepting, self._looking, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            await asyncio.to_thread(self._certificate.refresh)

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
                # Only a handshake would allow an error message.
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
            # Errors of peers that disconnect or do not speak TLS need no report.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_protocol,
                    peer,
                    ssl=self._certificate.context,
                    ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S,
                )
        finally:
            self._connections.closed(handshake)


class _Handshake:
    """A connection during the TLS handshake."""

    task: asyncio.Task[None]

    def drop(self) -> None:
        """Close at once."""
        self.task.cancel()
