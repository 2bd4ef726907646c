"""The Kafka door of a service in this process, and a client that sends what a test makes.

The client speaks kio: any API in any version, or bytes. What it sends is not checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from kio.serial import entity_reader

from streamhouse.reading.lake_only.lake_history import IcebergHistory
from streamhouse.storage_service.kafka.messages import answers
from streamhouse.storage_service.kafka.messages.requests import request_class, response_class
from streamhouse.storage_service.kafka_door._api import Api
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.kafka_door.door import KafkaDoor
from streamhouse.storage_service.server.history.lake_reads import LakeReads
from streamhouse.storage_service.server.http.tls import Certificate
from tests.support.in_process_service import InProcessService, in_process_service

__all__ = ["KafkaClient", "KafkaWorld", "kafka_door", "kafka_world", "request_bytes"]


def request_bytes(
    api_key: int,
    version: int,
    values: Mapping[str, Any],
    *,
    correlation_id: int = 0,
    client_id: str | None = "test",
) -> bytes:
    """Return a request with its length."""
    kind = request_class(api_key, version)
    body = answers.entity_bytes(answers._entity(kind, values))
    name = b"" if client_id is None else client_id.encode()
    length = -1 if client_id is None else len(name)
    header = struct.pack(">hhih", api_key, version, correlation_id, length) + name
    if kind.__flexible__:
        header += b"\0"
    return struct.pack(">i", len(header) + len(body)) + header + body


class KafkaClient:
    """One connection to a door."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._numbers = itertools.count(1)

    @classmethod
    async def connect(cls, address: str, **arguments: Any) -> KafkaClient:
        """Connect to `host:port`."""
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), **arguments))

    async def call(self, api_key: int, version: int, **values: Any) -> Any:
        """Send a request and return its answer as kio's entity."""
        number = self.send(api_key, version, **values)
        return await self.answer(api_key, version, number)

    def send(self, api_key: int, version: int, **values: Any) -> int:
        """Send a request; return its correlation id."""
        number = next(self._numbers)
        self.writer.write(request_bytes(api_key, version, values, correlation_id=number))
        return number

    async def answer(self, api_key: int, version: int, number: int) -> Any:
        """Return the next answer, which must be to that request."""
        data = await self.frame()
        assert struct.unpack_from(">i", data)[0] == number
        kind = response_class(api_key, version)
        begin = 5 if kind.__header_schema__.__version__ > 0 else 4
        entity, size = entity_reader(kind)(data, begin)
        assert begin + size == len(data)
        return entity

    async def frame(self) -> bytes:
        """Return the next frame without its length."""
        async with asyncio.timeout(60):
            length = struct.unpack(">i", await self.reader.readexactly(4))[0]
            return await self.reader.readexactly(length)

    async def is_closed(self) -> bool:
        """Wait for the door to close the connection, which sends nothing more."""
        async with asyncio.timeout(60):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class KafkaWorld:
    """A service, its door, and clients of both; `stop_listening` closes the door."""

    def __init__(
        self,
        http: InProcessService,
        door: KafkaDoor,
        stop_listening: Callable[[], Awaitable[None]],
    ) -> None:
        self.http = http
        self.service = http.service
        self.door = door
        self.stop_listening = stop_listening
        self._clients: list[KafkaClient] = []

    async def client(self, **arguments: Any) -> KafkaClient:
        """Connect once more; `arguments` are those of `asyncio.open_connection`."""
        client = await KafkaClient.connect(str(self.door.address), **arguments)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Close the door, then what clients have left open."""
        await self.stop_listening()
        for client in self._clients:
            await client.close()


@contextlib.asynccontextmanager
async def kafka_world(
    data_dir: Path,
    *,
    certificate: Certificate | None = None,
    history: IcebergHistory | None = None,
    apis: Mapping[int, Api] = APIS,
    **arguments: Any,
) -> AsyncIterator[KafkaWorld]:
    """Run a service with a door; `arguments` are those of `in_process_service`."""
    async with (
        in_process_service(data_dir, kafka_port=0, **arguments) as http,
        kafka_door(http, certificate=certificate, history=history, apis=apis) as world,
    ):
        yield world


@contextlib.asynccontextmanager
async def kafka_door(
    http: InProcessService,
    *,
    certificate: Certificate | None = None,
    history: IcebergHistory | None = None,
    open_history: Callable[[], IcebergHistory] | None = None,
    apis: Mapping[int, Api] = APIS,
) -> AsyncIterator[KafkaWorld]:
    """Open a door to a service; `open_history` is for one that is no `history` at once."""
    listening = socket.create_server(("127.0.0.1", 0))
    door = http.kafka
    door.apis = apis
    if history is not None:
        http.service.lake_reads = LakeReads(lambda: history)
    elif open_history is not None:
        http.service.lake_reads = LakeReads(open_history)
    accepting = contextlib.AsyncExitStack()
    connections = http.service.connections
    await accepting.enter_async_context(
        door.listen(listening, connections=connections, certificate=certificate)
    )
    world = KafkaWorld(http, door, accepting.aclose)
    try:
        yield world
    finally:
        await world.close()
        http.service.lake_reads.close()
        listening.close()
