"""What goes wrong with one partition of a fetch is said of that one, whoever's error it is."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.reading.lake_only.lake_history import IcebergHistory
from tests.support.fetch_world import (
    MemoryHistory,
    append,
    fetch,
    fetched,
    list_offsets,
    raw_rows,
    tiered_clicks,
)
from tests.support.in_process_service import in_process_service
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_door, kafka_world
from tests.support.registry_world import register


async def found_in(client: KafkaClient, **offsets: int) -> dict[str, int | ErrorCode]:
    """How many records each topic's partition 0 has from an offset on, or its error."""
    answer = await fetch(client, {topic: {0: offset} for topic, offset in offsets.items()})
    return {
        topic: len(found) if isinstance(found, list) else found
        for (topic, _), found in fetched(answer).items()
    }


async def views(world: KafkaWorld) -> None:
    await world.http.create_table("views", RAW_TOPIC)
    await append(world, "views", 0, raw_rows(0, 2))


async def test_a_row_that_cannot_be_a_record_ends_the_reading_of_its_partition_alone(
    tmp_path: Path,
) -> None:
    kind = {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}
    order = {"type": "record", "name": "Order", "fields": [{"name": "kind", "type": kind}]}
    async with kafka_world(tmp_path) as world:
        status, made = await register(world.http, "orders-value", order)
        assert status == 200, made
        await views(world)
        rows = pa.schema([pa.field("kind", pa.string(), nullable=False)])
        for kinds in (["A", "B", "A", "B", "A"], ["A", "B", "no symbol", "A"]):
            await append(world, "orders", 0, pa.record_batch([pa.array(kinds)], schema=rows))
        client = await world.client()

        # Rows of the same batch that are before it come.
        assert await found_in(client, orders=0, views=0) == {"orders": 7, "views": 2}
        wrong = {"orders": ErrorCode.unknown_server_error, "views": 2}
        assert await found_in(client, orders=7, views=0) == wrong
        # The connection is as it was, and who goes on behind the row reads on.
        assert await found_in(client, orders=8, views=0) == {"orders": 1, "views": 2}


async def test_an_error_of_the_lakes_library_is_said_of_its_partition_alone(
    tmp_path: Path,
) -> None:
    history = MemoryHistory(failures=[OSError("no such file")])
    async with kafka_world(tmp_path, history=history) as world:
        await tiered_clicks(world, history)
        await views(world)
        client = await world.client()

        wrong = {"clicks": ErrorCode.unknown_server_error, "views": 2}
        assert await found_in(client, clicks=0, views=0) == wrong
        assert await found_in(client, clicks=0, views=0) == {"clicks": 60, "views": 2}


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UnavailableError("no catalog"), ErrorCode.not_leader_or_follower),
        (ImportError("no library"), ErrorCode.unknown_server_error),
    ],
)
async def test_a_history_that_cannot_be_opened_is_said_of_who_reads_it_alone(
    tmp_path: Path, failure: Exception, code: ErrorCode
) -> None:
    def fails() -> IcebergHistory:
        raise failure

    async with (
        in_process_service(tmp_path, kafka_port=0) as http,
        kafka_door(http, open_history=fails) as world,
    ):
        await tiered_clicks(world, MemoryHistory())
        await views(world)
        client = await world.client()

        assert await found_in(client, clicks=0, views=0) == {"clicks": code, "views": 2}
        assert await list_offsets(client, "clicks", 0, 1) == code
        assert (await list_offsets(client, "views", 0, 1))[0] == 0
