"""Work that waits at the same time is done in one step, and each piece has what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.wire.arrow_body import decode_payload
from streamhouse.storage_service.kafka_door.broker._together import SharedWork
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import kafka_world, request_bytes

PRODUCE, VERSION = 0, 9


class Doublings:
    """Doubles numbers, and remembers which of them together."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.together: SharedWork[int, int] = SharedWork()

    def begin(self, key: str, number: int, share: float = 0.1) -> asyncio.Future[int]:
        return self.together.begin(key, number, share=share, work=self._work)

    def _work(self, numbers: Sequence[int]) -> Sequence[int]:
        self.steps.append(list(numbers))
        return [2 * number for number in numbers]


async def test_what_begins_at_the_same_time_is_done_in_one_step() -> None:
    doublings = Doublings()

    found = await asyncio.gather(*(doublings.begin("a", number) for number in range(5)))

    assert found == [0, 2, 4, 6, 8]
    assert doublings.steps == [[0, 1, 2, 3, 4]]
    assert await doublings.begin("a", 7) == 14
    assert doublings.steps[1:] == [[7]]


async def test_a_step_is_of_one_key_and_all_keys_have_their_turns() -> None:
    doublings = Doublings()
    places = [("a", 0), ("b", 1), ("a", 2), ("a", 3), ("c", 4)]

    await asyncio.gather(*(doublings.begin(key, number, share=0.5) for key, number in places))

    assert doublings.steps == [[0, 2], [1], [4], [3]]


async def test_what_is_larger_than_a_step_is_done_alone() -> None:
    doublings = Doublings()

    await asyncio.gather(
        *(doublings.begin("a", number, share=3 if number == 1 else 0.1) for number in range(4))
    )

    assert doublings.steps == [[0], [1], [2, 3]]


async def test_others_have_the_event_loop_between_two_steps() -> None:
    doublings = Doublings()
    seen = [0]
    waiting = [doublings.begin("a", number, share=1) for number in range(3)]

    while seen[-1] < 3:
        await asyncio.sleep(0)
        seen.append(len(doublings.steps))

    assert set(seen) == {0, 1, 2, 3}
    assert all(future.done() for future in waiting)


@pytest.mark.parametrize(
    "work", [lambda _: [][0], lambda numbers: numbers[1:]], ids=["raises", "returns too few"]
)
async def test_a_bug_is_told_to_all_that_wait(work: Callable[[Any], Any]) -> None:
    together: SharedWork[int, int] = SharedWork()
    waiting = [together.begin("a", number, share=0.1, work=work) for number in range(2)]

    found = await asyncio.gather(*waiting, return_exceptions=True)

    assert any(isinstance(one, IndexError | ValueError) for one in found)
    assert await together.begin("a", 5, share=0.1, work=lambda numbers: numbers) == 5


async def test_who_waits_no_more_is_no_bother_to_others() -> None:
    doublings = Doublings()
    gone, there = doublings.begin("a", 1), doublings.begin("a", 2)
    gone.cancel()

    assert await there == 4


async def test_requests_that_are_read_together_are_answered_each_for_itself(tmp_path: Path) -> None:
    damaged = bytearray(produced(records([b'{"v": 1}'])))
    damaged[-1] ^= 1
    batches = {
        "a": produced(records([b'{"v": 1}', b'{"v": 2}'])),
        "b": produced(records([b'{"v": 3}', b'{"v": "x"}'])),
        "c": bytes(damaged),
        "d": produced(records([b'{"v": 4}'])),
    }
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("rows", pa.schema([("v", pa.int64())]), bucket_count=2)
        clients = [await world.client() for _ in range(2)]
        sent = [
            (client, partition, name, client.send(PRODUCE, VERSION, **_request(partition, batch)))
            for name, batch in batches.items()
            for partition, client in enumerate(clients)
        ]

        for client, partition, name, number in sent:
            answer = await client.answer(PRODUCE, VERSION, number)
            (part,) = answer.responses[0].partition_responses
            assert part.index == partition
            told = {
                "a": (ErrorCode.none, 0),
                "b": (ErrorCode.invalid_record, -1),
                "c": (ErrorCode.corrupt_message, -1),
                "d": (ErrorCode.none, 2),
            }
            assert (part.error_code, part.base_offset) == told[name]
            assert [error.batch_index for error in part.record_errors] == [1] * (name == "b")
        assert world.service.metrics.appended_rows._value.get() == 6


async def test_what_is_read_together_is_stored_in_the_order_of_requests(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("key", pa.binary(), nullable=False), ("value", pa.binary())])
    requests = [
        request_bytes(PRODUCE, VERSION, _produce("rows", dict.fromkeys(partitions, batch)))
        for number, partitions in enumerate([(0, 1), (0,), (0, 1), (1,), (1,)] * 3)
        for batch in [produced(records([b"%d" % number], keys=[b"one"]))]
    ]
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("rows", schema, bucket_count=2, primary_key=("key",))
        client = await world.client()

        # All arrive at once, and the rows of all go to the bucket of their one key.
        client.writer.write(b"".join(requests))
        for _ in requests:
            await client.frame()

        (table,) = world.service.manager.open_tables()
        stored = [
            int(row["value"])
            for tablet in table.tablets
            if tablet.high_watermark
            for frame in tablet.read(0, bytes_max=1 << 20)
            for row in decode_payload(
                frame.payload, table.log_schema_of(frame.schema_id)
            ).to_pylist()
        ]
        assert stored == sorted(stored)
        assert stored[-1] == len(requests) - 1


def _request(partition: int, batch: bytes) -> dict[str, Any]:
    return _produce("rows", {partition: batch})


def _produce(topic: str, batches: Mapping[int, bytes]) -> dict[str, Any]:
    data = [{"index": partition, "records": batch} for partition, batch in batches.items()]
    return {
        "acks": -1,
        "timeout": timedelta(seconds=10),
        "topic_data": [{"name": topic, "partition_data": data}],
    }
