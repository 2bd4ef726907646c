"""The HTTP server of a process: uvicorn, with our connections, TLS and end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.server.http._http_protocol import (
    BoundedHttpProtocol,
    bounded_protocol,
)
from streamhouse.storage_service.server.http.http_exchange import App
from streamhouse.storage_service.server.http.open_connections import BACKLOG, OpenConnections
from streamhouse.storage_service.server.http.tls import Certificate, TlsListener

__all__ = ["HttpServer", "http_config"]

# How long a stopping server waits for its connections after the last request.
_CLOSE_TIMEOUT_S: Final = 2


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handling, with `TlsListener`, and with `is_listening`."""

    def __init__(
        self, config: uvicorn.Config, connections: OpenConnections, certificate: Certificate | None
    ) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()
        self._connections = connections
        self._certificate = certificate
        self._tls: list[TlsListener] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the service drains before the shutdown of uvicorn."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and set `is_listening`."""
        if self._certificate is None:
            await super().startup(sockets=sockets)
        else:
            await super().startup(sockets=[])
            self._tls = [self._listen(listening, self._certificate) for listening in sockets or ()]
        self.is_listening.set()

    def _listen(self, listening: socket.socket, certificate: Certificate) -> TlsListener:
        protocol: Any = self.config.http_protocol_class
        return TlsListener(
            listening,
            certificate,
            connections=self._connections,
            make_protocol=functools.partial(
                protocol,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            ),
        )

    async def adopt(
        self, connection: socket.socket, data: bytes, *, moves: int, stays_s: float
    ) -> None:
        """Serve a connection that another process has accepted, and that has received `data`.

        No reader gets the connection for the next `stays_s`.
        """
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        make: Any = self.config.http_protocol_class
        protocol: BoundedHttpProtocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.moves, protocol.stays_until_s = moves, loop.time() + stays_s
        protocol.go_on_with(data)
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:
            # The client has gone meanwhile.
            connection.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening and end the connections."""
        for listener in self._tls:
            await listener.close()
        await super().shutdown(sockets=sockets)


def http_config(
    config: ServiceConfig,
    app: App,
    connections: OpenConnections,
    *,
    protocol: type[BoundedHttpProtocol] | None = None,
) -> uvicorn.Config:
    """Return uvicorn's configuration to serve `app` to these connections, as `protocol`."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        loop="uvloop",
        http=bounded_protocol(connections, timeout_ms=config.keep_alive_timeout_ms, base=protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
