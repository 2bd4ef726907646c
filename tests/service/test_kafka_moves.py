"""Tables move between shards under Kafka clients: metadata leads them there, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from tests.support.kafka_producers import (
    IdempotentProducer,
    ShardedPlace,
    StandingGroup,
    create_topics,
    judge_topics,
    topic_producers,
)
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow


def _move(client: StorageClient, table: str) -> None:
    """Move a table to the other shard; it is refused while a transaction is open."""
    shown = client.status()["tables"]
    (shard,) = (one["shard"] for one in shown if one["table"] == f"default.{table}")
    while True:
        try:
            return client.move_table(table, "1" if shard == "0" else "0")
        except StreamhouseError as error:
            if not error.retriable:
                raise


async def _move_all(
    client: StorageClient, producers: Sequence[IdempotentProducer], moves: int
) -> None:
    """Move every topic so many times; producers are at work in each, and after the last."""
    for move in range(moves):
        for producer in producers:
            producer.may_send(len(producer.batches) * (move + 1) // (moves + 1))
        for topic in dict.fromkeys(producer.topic for producer in producers):
            await asyncio.to_thread(_move, client, topic)
    for producer in producers:
        assert producer.acknowledged < len(producer.batches)
        producer.may_send(len(producer.batches))


@pytest.mark.parametrize(
    ("batches", "moves"), [(40, 1), pytest.param(400, 8, marks=pytest.mark.long)]
)
async def test_producers_and_a_group_go_on_while_their_topics_move(
    tmp_path: Path, batches: int, moves: int
) -> None:
    arguments = ("--shards", "2", "--kafka-port", "0", "--journal", f"file://{tmp_path / 'store'}")
    with (
        ServiceProcess(tmp_path / "data", *arguments, is_executed=True) as service,
        StorageClient(service.endpoint) as client,
    ):
        create_topics(client)
        producers = topic_producers(ShardedPlace(service.kafka_address), batch_count=batches)
        group = StandingGroup(producers[0], seed=1)
        standing = asyncio.create_task(group.run())
        moving = asyncio.create_task(_move_all(client, producers, moves))
        await asyncio.gather(moving, *(producer.run() for producer in producers))
        await group.end(standing)
        await asyncio.to_thread(judge_topics, client, producers)
