"""The door of Kafka's protocol: listens while this process owns the data."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Final

from streamhouse.storage_service.config import ServiceConfig, kafka_address
from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.kafka_door._connection import KafkaConnection
from streamhouse.storage_service.kafka_door._kafka_routes import KAFKA_ROUTES, kafka_routes
from streamhouse.storage_service.kafka_door._preparing import Preparing
from streamhouse.storage_service.kafka_door._record_schemas import RecordSchemas
from streamhouse.storage_service.kafka_door.broker._broker import Broker
from streamhouse.storage_service.kafka_door.broker._broker_state import BrokerAddress
from streamhouse.storage_service.server.control.control_routes import ControlRoutes
from streamhouse.storage_service.server.doors import Door
from streamhouse.storage_service.server.http.open_connections import BACKLOG, OpenConnections
from streamhouse.storage_service.server.http.tls import Certificate, TlsListener
from streamhouse.storage_service.server.service import Service

__all__ = ["KafkaDoor"]

_logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 2


class KafkaDoor(Door):
    """Kafka's protocol."""

    routes = KAFKA_ROUTES
    sidecars = (RecordSchemas,)
    port_option = "--kafka-port"
    apis: Mapping[int, Api] = APIS

    def __init__(self, config: ServiceConfig) -> None:
        self.port = config.kafka_port
        self.address: BrokerAddress | None = None
        """The address advertised to clients, once the door listens."""
        self._open: set[KafkaConnection] = set()
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def open(self, service: Service) -> None:
        """See `Door.open`."""
        self._service = service
        self._counts = service.metrics.request_counts(
            "kafka_request",
            ("api", "error"),
            count_text="Requests of Kafka clients answered, by API and by the first error of the"
            " answer.",
            time_text="Time from a Kafka client's whole request to its answer, waits included.",
        )

    def control_routes(self, routes: ControlRoutes) -> None:
        """See `Door.control_routes`."""
        kafka_routes(routes, self._service, address=lambda: self.address)

    @contextlib.asynccontextmanager
    async def listen(
        self,
        listening: socket.socket,
        *,
        connections: OpenConnections,
        certificate: Certificate | None,
    ) -> AsyncIterator[str]:
        """See `Door.listen`."""
        self.address = _advertised(self._service.config, listening)
        self._broker = Broker(self._service, self.address, self._counts)
        self.preparing = Preparing(self.apis.values())
        make = functools.partial(
            KafkaConnection,
            self._broker,
            connections,
            apis=self.apis,
            next_id=self._next_id,
            on_open=self._open.add,
            on_close=self._open.discard,
        )
        async with contextlib.AsyncExitStack() as ending:
            ending.push_async_callback(self.preparing.close)
            ending.push_async_callback(self._broker.groups.settle)
            ending.push_async_callback(self._end_connections)
            ending.callback(setattr, self, "address", None)
            if certificate is not None:
                tls = TlsListener(
                    listening,
                    certificate,
                    connections=connections,
                    make_protocol=make,
                )
                ending.push_async_callback(tls.close)
            else:
                loop = asyncio.get_running_loop()
                server = await loop.create_server(make, sock=listening, backlog=BACKLOG)
                ending.callback(server.close)
            ending.callback(self._broker.groups.close)
            self.preparing.begin()
            _logger.info("event=kafka_listening address=%s", self.address)
            yield f"serving Kafka clients on {self.address}"

    async def _end_connections(self) -> None:
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
