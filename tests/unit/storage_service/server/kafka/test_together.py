"""Work that waits at the same time is done in one step, and each piece has what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.storage_service.server.kafka.broker.together import Together
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import kafka_world

PRODUCE, VERSION = 0, 9


class Doublings:
    """Doubles numbers, and remembers which of them together."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.together: Together[int, int] = Together()

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
    seen: list[int] = []
    waiting = [doublings.begin("a", number, share=1) for number in range(3)]
    loop = asyncio.get_running_loop()

    def look(left: int) -> None:
        seen.append(len(doublings.steps))
        if left:
            loop.call_soon(look, left - 1)

    look(3)
    await asyncio.gather(*waiting)

    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "work", [lambda _: [][0], lambda numbers: numbers[1:]], ids=["raises", "returns too few"]
)
async def test_a_bug_is_told_to_all_that_wait(work: Callable[[Any], Any]) -> None:
    together: Together[int, int] = Together()
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


def _request(partition: int, batch: bytes) -> dict[str, Any]:
    data = [{"index": partition, "records": batch}]
    return {
        "acks": -1,
        "timeout": timedelta(seconds=10),
        "topic_data": [{"name": "rows", "partition_data": data}],
    }
