"""Several writes of one connection at a time: stored and answered in the order of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamhouse.storage_service.kafka_door._api import Api, ConnectionEnded
from streamhouse.storage_service.kafka_door._apis import APIS
from streamhouse.storage_service.kafka_door._exchange import KafkaExchange
from tests.support.in_process_service import until
from tests.support.kafka_world import kafka_world

METADATA, PRODUCE = 3, 0
VERSION = 9


class Writes:
    """An API that stores what its requests are called, each when a test lets it go on."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.stored: list[str] = []
        self.go_on: dict[str, asyncio.Event] = {}

    async def answer(self, exchange: KafkaExchange, request: Any) -> Mapping[str, Any] | None:
        name = request.transactional_id
        self.begun.append(name)
        await self.go_on.setdefault(name, asyncio.Event()).wait()
        if name.startswith("breaks"):
            raise ConnectionEnded("before its rows are handed over")
        await exchange.my_turn()
        self.stored.append(name)
        exchange.pass_turn()
        if name.startswith("ends"):
            raise ConnectionEnded("as a test wants it")
        return None if request.acks == 0 else {"responses": []}

    def apis(self) -> dict[int, Api]:
        """Return every API, and this one in the place of Produce."""
        row = Api(key=PRODUCE, name="writes", versions=(3, 9), answer=self.answer, is_write=True)
        return {**APIS, PRODUCE: row}


async def test_writes_are_stored_and_answered_in_their_order(tmp_path: Path) -> None:
    writes = Writes()
    async with kafka_world(tmp_path, apis=writes.apis()) as world:
        client = await world.client()
        numbers = [client.send(PRODUCE, VERSION, transactional_id=str(n), acks=1) for n in range(4)]
        last = client.send(METADATA, 12, topics=[])
        await until(lambda: len(writes.begun) == 4)

        for n in (3, 1, 2, 0):
            writes.go_on[str(n)].set()

        for number in numbers:
            await client.answer(PRODUCE, VERSION, number)
        await client.answer(METADATA, 12, last)
        assert writes.stored == ["0", "1", "2", "3"]
        await until(lambda: world.service.body_memory.held == 0)


async def test_so_many_are_in_progress_and_no_more(tmp_path: Path) -> None:
    writes = Writes()
    async with kafka_world(tmp_path, kafka_pipelined_max=2, apis=writes.apis()) as world:
        client = await world.client()
        numbers = [client.send(PRODUCE, VERSION, transactional_id=str(n), acks=1) for n in range(5)]
        for n in range(5):
            await until(lambda n=n: len(writes.begun) >= n + 1)  # type: ignore[misc]
            assert len(writes.begun) <= n + 2
            writes.go_on[str(n)].set()
            await client.answer(PRODUCE, VERSION, numbers[n])


async def test_who_asks_for_no_acknowledgement_gets_none(tmp_path: Path) -> None:
    writes = Writes()
    async with kafka_world(tmp_path, apis=writes.apis()) as world:
        client = await world.client()
        client.send(PRODUCE, VERSION, transactional_id="a", acks=0)
        after = client.send(METADATA, 12, topics=[])
        await until(lambda: writes.begun == ["a"])
        writes.go_on["a"].set()

        await client.answer(METADATA, 12, after)


async def test_a_write_may_end_its_connection_and_those_behind_it_are_stored(
    tmp_path: Path,
) -> None:
    writes = Writes()
    async with kafka_world(tmp_path, apis=writes.apis()) as world:
        client = await world.client()
        for name in ("ends", "b"):
            client.send(PRODUCE, VERSION, transactional_id=name, acks=0)
        await until(lambda: len(writes.begun) == 2)
        writes.go_on["ends"].set()

        assert await client.is_closed()
        writes.go_on["b"].set()
        await until(lambda: writes.stored == ["ends", "b"])
        await until(lambda: len(world.service.connections) == 0)


async def test_behind_a_write_that_never_handed_its_rows_over_nothing_is_stored(
    tmp_path: Path,
) -> None:
    writes = Writes()
    async with kafka_world(tmp_path, kafka_pipelined_max=2, apis=writes.apis()) as world:
        client = await world.client()
        for name in ("a", "breaks", "b", "c"):
            client.send(PRODUCE, VERSION, transactional_id=name, acks=1)
        await until(lambda: len(writes.begun) == 2)
        writes.go_on["a"].set()
        await until(lambda: writes.begun == ["a", "breaks", "b"])
        for name in ("breaks", "b"):
            writes.go_on[name].set()
        await until(lambda: len(world.service.connections) == 0)

        await until(lambda: world.service.open_requests == 0)
        assert (writes.begun, writes.stored) == (["a", "breaks", "b"], ["a"])
        assert world.service.body_memory.held == 0


async def test_a_client_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    writes = Writes()
    async with kafka_world(tmp_path, apis=writes.apis()) as world:
        client = await world.client()
        client.send(PRODUCE, VERSION, transactional_id="a", acks=1)
        await until(lambda: writes.begun == ["a"])

        await client.close()
        writes.go_on["a"].set()

        await until(lambda: world.service.body_memory.held == 0)
        assert writes.stored == ["a"]
        assert world.service.open_requests == 0
