"""Consumer groups of a real service that is killed: members join again, positions are there."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from kio.schema.errors import ErrorCode

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.consumers import command
from tests.support.kafka_world import KafkaClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

OFFSET_COMMIT, OFFSET_FETCH, JOIN, HEARTBEAT, SYNC = 8, 9, 11, 12, 14
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


async def _connect(service: ServiceProcess) -> KafkaClient:
    host, _, port = service.kafka_address.rpartition(":")
    return KafkaClient(*await asyncio.open_connection(host, int(port)))


async def _join(client: KafkaClient, member_id: str = "") -> Any:
    joined = await client.call(
        JOIN,
        9,
        group_id="billing",
        session_timeout=datetime.timedelta(minutes=5),
        rebalance_timeout=datetime.timedelta(minutes=5),
        member_id=member_id,
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b""}],
    )
    if joined.error_code is ErrorCode.member_id_required:
        return await _join(client, joined.member_id)
    return joined


async def _commit(client: KafkaClient, joined: Any, offset: int) -> ErrorCode:
    answer = await client.call(
        OFFSET_COMMIT,
        8,
        group_id="billing",
        generation_id_or_member_epoch=joined.generation_id,
        member_id=joined.member_id,
        topics=[
            {
                "name": "t",
                "partitions": [{"partition_index": 0, "committed_offset": offset}],
            }
        ],
    )
    return ErrorCode(answer.topics[0].partitions[0].error_code)


async def _position(client: KafkaClient) -> int:
    topics = [{"name": "t", "partition_indexes": [0]}]
    answer = await client.call(OFFSET_FETCH, 8, groups=[{"group_id": "billing", "topics": topics}])
    return int(answer.groups[0].topics[0].partitions[0].committed_offset)


async def _work(client: KafkaClient, *offsets: int) -> Any:
    """Join, get the assignment and commit; return the generation."""
    joined = await _join(client)
    who = {
        "group_id": "billing",
        "generation_id": joined.generation_id,
        "member_id": joined.member_id,
    }
    synced = await client.call(SYNC, 5, **who)
    assert synced.error_code is ErrorCode.none
    for offset in offsets:
        assert await _commit(client, joined, offset) is ErrorCode.none
    return joined


async def _judge_after_kill(service: ServiceProcess, joined: Any, position: int) -> Any:
    """What a member of before may do is to join again; the position is what was answered last."""
    client = await _connect(service)
    try:
        beat = await client.call(
            HEARTBEAT,
            4,
            group_id="billing",
            generation_id=joined.generation_id,
            member_id=joined.member_id,
        )
        assert beat.error_code is ErrorCode.unknown_member_id
        assert await _commit(client, joined, position + 1) is ErrorCode.illegal_generation
        lost = await _join(client, joined.member_id)
        assert lost.error_code is ErrorCode.unknown_member_id
        assert await _position(client) == position
        return await _work(client, position + 2, position + 1)
    finally:
        await client.close()


def test_members_join_again_after_a_kill_and_go_on_where_they_committed(tmp_path: Path) -> None:
    async def begin(service: ServiceProcess) -> Any:
        client = await _connect(service)
        try:
            return await _work(client, 3, 7, 5)
        finally:
            await client.close()

    with ServiceProcess(tmp_path, "--kafka-port", "0") as service:
        with StreamhouseClient(service.endpoint) as streamhouse:
            streamhouse.create_table("default.t", SCHEMA)
            streamhouse.append("default.t", pa.table({"id": range(20)}, schema=SCHEMA))
        joined = asyncio.run(begin(service))
        service.kill()
    for position in (5, 6):
        with ServiceProcess(tmp_path, "--kafka-port", "0") as service:
            joined = asyncio.run(_judge_after_kill(service, joined, position))
            with StreamhouseClient(service.endpoint) as streamhouse:
                (standing,) = streamhouse.consumers("default.t")
                assert (standing["name"], standing["offsets"]) == ("billing", {"0": position + 1})
            shown = CliRunner().invoke(command, ["--endpoint", service.endpoint])
            assert "billing" in shown.output
            service.kill()
