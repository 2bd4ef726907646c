"""The Kafka door: listens while this process owns the data."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import socket
from collections.abc import Mapping
from typing import Final

from streamhouse.storage_service.config import ServiceConfig, kafka_address
from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.kafka_door._connection import KafkaConnection
from streamhouse.storage_service.kafka_door._preparing import Preparing
from streamhouse.storage_service.kafka_door.broker._broker import Broker
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerAddress
from streamhouse.storage_service.server.http.open_connections import OpenConnections
from streamhouse.storage_service.server.http.tls import Certificate, TlsListener
from streamhouse.storage_service.server.service import Service

__all__ = ["KafkaDoor"]

_logger = logging.getLogger(__name__)

_BACKLOG: Final = 2_048
_CLOSE_TIMEOUT_S: Final = 2


class KafkaDoor:
    """Kafka's protocol on an already bound socket. Event loop only."""

    def __init__(
        self,
        service: Service,
        listening: socket.socket,
        *,
        connections: OpenConnections,
        certificate: Certificate | None,
        apis: Mapping[int, Api] = APIS,
    ) -> None:
        self._apis = apis
        self._listening = listening
        self._connections = connections
        self._certificate = certificate
        self.address = _advertised(service.config, listening)
        self._broker = Broker(service, self.address)
        self.preparing = Preparing(apis.values())
        self._open: set[KafkaConnection] = set()
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._tls: TlsListener | None = None

    async def open(self) -> None:
        """Begin to accept connections."""
        make = functools.partial(
            KafkaConnection,
            self._broker,
            self._connections,
            apis=self._apis,
            next_id=self._next_id,
            on_open=self._open.add,
            on_close=self._open.discard,
        )
        if self._certificate is not None:
            self._tls = TlsListener(
                self._listening,
                self._certificate,
                backlog=_BACKLOG,
                connections=self._connections,
                make_protocol=make,
            )
        else:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(make, sock=self._listening, backlog=_BACKLOG)
        self.preparing.begin()
        service = self._broker.service
        service.kafka_address = (self.address.host, self.address.port)
        _logger.info("event=kafka_listening address=%s", self.address)

    async def close(self) -> None:
        """Accept no more connections, and return when all connections have ended."""
        try:
            await self._end_connections()
        finally:
            await self._broker.groups.settle()
            await self.preparing.close()

    async def _end_connections(self) -> None:
        self._broker.groups.close()
        if self._server is not None:
            self._server.close()
        if self._tls is not None:
            await self._tls.close()
        ending = list(self._open)
        for connection in ending:
            connection.close_when_answered()
        if not ending:
            return
        closed = asyncio.gather(*(connection.wait_closed() for connection in ending))
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.shield(closed)
        except TimeoutError:
            # The remaining clients do not read their answers, or the stop was cut short.
            for connection in list(self._open):
                connection.drop()
            await closed

    def _next_id(self) -> str:
        return f"{self._prefix}-k{next(self._numbers)}"


def _advertised(config: ServiceConfig, listening: socket.socket) -> BrokerAddress:
    if config.kafka_advertised is not None:
        return BrokerAddress(*kafka_address(config.kafka_advertised))
    host, port = listening.getsockname()[:2]
    return BrokerAddress(host, port)
