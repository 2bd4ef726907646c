"""Fetch over a socket: which records come, how many of them, and when."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.records.record_format import RAW_TOPIC
from tests.support.fetch_world import (
    FETCH,
    FetchedRecord,
    append,
    fetch,
    fetch_values,
    fetched,
    next_offset_after,
    raw_rows,
    records_in,
)
from tests.support.in_process_service import EVENTS, append_body, event_rows, until
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world


def expected(start: int, end: int, *, first: int = 0) -> list[FetchedRecord]:
    """The records of `raw_rows(start, end)` at the offsets from `first` on."""
    return [
        FetchedRecord(
            first + i - start,
            b"k%d" % i,
            (b"v%d" % i).ljust(10, b"."),
            1_700_000_000_000 + i,
            (("h", b"%d" % i),),
        )
        for i in range(start, end)
    ]


async def raw_topic(world: KafkaWorld, name: str = "clicks", *, buckets: int = 1) -> None:
    await world.http.create_table(name, RAW_TOPIC, bucket_count=buckets)


@pytest.mark.parametrize("version", range(4, 13))
async def test_records_are_the_rows_of_a_raw_topic(tmp_path: Path, version: int) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world, buckets=2)
        await append(world, "clicks", 0, raw_rows(0, 5), raw_rows(5, 7))
        await append(world, "clicks", 1, raw_rows(7, 9))
        client = await world.client()

        answer = await fetch(client, {"clicks": {0: 0, 1: 1}}, version=version)

        assert fetched(answer) == {
            ("clicks", 0): expected(0, 7),
            ("clicks", 1): expected(8, 9, first=1),
        }
        for partition, end in zip(answer.responses[0].partitions, (7, 2), strict=True):
            assert partition.high_watermark == partition.last_stable_offset == end
            if version >= 5:
                assert partition.log_start_offset == 0
        if version >= 7:
            assert (answer.error_code, answer.session_id) == (ErrorCode.none, 0)


@pytest.mark.parametrize("offset", [0, 3, 5, 7])
async def test_records_begin_at_the_offset_that_is_asked_for(tmp_path: Path, offset: int) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        await append(world, "clicks", 0, raw_rows(0, 5), raw_rows(5, 7))
        client = await world.client()

        found = fetched(await fetch(client, {"clicks": {0: offset}}))

        assert found == {("clicks", 0): expected(offset, 7, first=offset)}


async def test_a_consumer_that_takes_few_bytes_gets_all_records_in_order(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        await append(world, "clicks", 0, *(raw_rows(i, i + 50) for i in range(0, 400, 50)))
        client = await world.client()
        records: list[FetchedRecord] = []
        fetches = 0
        while len(records) < 400:
            answer = await fetch(client, {"clicks": {0: len(records)}}, partition_max_bytes=1_000)
            assert len(answer.responses[0].partitions[0].records) < 1_600
            found = fetched(answer)["clicks", 0]
            assert isinstance(found, list)
            assert found
            records += found
            fetches += 1

        assert records == expected(0, 400)
        assert fetches > 10


async def test_a_partition_that_is_named_many_times_is_answered_once(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world, buckets=2)
        await append(world, "clicks", 0, raw_rows(0, 5))
        client = await world.client()
        values = fetch_values({"clicks": {0: 2, 1: 0}}, each=1)
        (topic,) = values["topics"]
        values["topics"] = [{**topic, "partitions": topic["partitions"] * 5_000}] * 2

        answer = await client.call(FETCH, 11, **values)

        assert [len(topic.partitions) for topic in answer.responses] == [2]
        assert fetched(answer)["clicks", 0] == expected(2, 3, first=2)


async def test_a_record_that_is_larger_than_all_limits_comes_alone(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world, buckets=2)
        for bucket in range(2):
            await append(world, "clicks", bucket, raw_rows(0, 2, value_bytes=5_000))
        client = await world.client()

        found = fetched(
            await fetch(client, {"clicks": {0: 0, 1: 0}}, max_bytes=10, partition_max_bytes=10)
        )

        assert sorted(len(records) for records in found.values() if isinstance(records, list)) == [
            0,
            1,
        ]


async def test_large_rows_behind_small_ones_do_not_make_an_answer_too_large(
    tmp_path: Path,
) -> None:
    schema = pa.schema([pa.field("text", pa.string())])
    # JSON takes six characters for each of a large one.
    texts = ["a"] * 1_100 + ["\x01" * 3_000] * 100
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("texts", schema)
        await append(world, "texts", 0, pa.record_batch([pa.array(texts)], schema=schema))
        client = await world.client()
        values: list[str] = []
        while len(values) < len(texts):
            answer = await fetch(
                client, {"texts": {0: len(values)}}, max_bytes=100_000, partition_max_bytes=100_000
            )
            assert 0 < len(answer.responses[0].partitions[0].records) <= 100_000
            found = fetched(answer)["texts", 0]
            assert isinstance(found, list)
            values += [json.loads(record.value or b"")["text"] for record in found]

        assert values == texts


async def test_partitions_take_turns_for_each_of_several_consumers(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        served: dict[str, set[int]] = {"clicks": set(), "views": set()}
        clients = {topic: await world.client() for topic in served}
        for topic in served:
            await raw_topic(world, topic, buckets=2)
            for bucket in range(2):
                await append(world, topic, bucket, raw_rows(0, 100))
        # They go in step.
        for _ in range(2):
            for topic, client in clients.items():
                answer = await fetch(client, {topic: {0: 0, 1: 0}}, max_bytes=100)
                partitions = answer.responses[0].partitions
                served[topic] |= {p.partition_index for p in partitions if p.records}

        assert served == {"clicks": {0, 1}, "views": {0, 1}}


async def test_a_request_that_waits_holds_little_of_what_it_names(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        client = await world.client()
        values = fetch_values({"clicks": {0: 0}}, wait_ms=20_000)
        (topic,) = values["topics"]
        values["topics"] = [{**topic, "partitions": topic["partitions"] * 2_000}]
        client.send(FETCH, 11, **values)
        del values, topic
        await until(lambda: world.service.manager.waiter_limit.count == 1)

        kept = [one for one in gc.get_objects() if type(one).__name__ == "FetchPartition"]

        assert len(kept) < 10


async def test_a_fetch_at_the_end_waits_for_a_row(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world, buckets=2)
        await raw_topic(world, "views")
        client = await world.client()
        waiting = asyncio.ensure_future(
            fetch(client, {"clicks": {0: 0, 1: 0}, "views": {0: 0}}, wait_ms=20_000)
        )
        await until(lambda: world.service.manager.waiter_limit.count == 1)

        await append(world, "views", 0, raw_rows(0, 2))

        assert fetched(await waiting) == {
            ("clicks", 0): [],
            ("clicks", 1): [],
            ("views", 0): expected(0, 2),
        }
        assert world.service.manager.waiter_limit.count == 0


async def test_a_fetch_without_rows_ends_when_its_time_is_up(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        client = await world.client()

        answer = await fetch(client, {"clicks": {0: 0}}, wait_ms=5)

        assert fetched(answer) == {("clicks", 0): []}
        assert answer.responses[0].partitions[0].high_watermark == 0


async def test_a_fetch_waits_for_as_many_bytes_as_it_says(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        client = await world.client()
        waiting = asyncio.ensure_future(
            fetch(client, {"clicks": {0: 0}}, wait_ms=20_000, min_bytes=2_000)
        )
        await until(lambda: world.service.manager.waiter_limit.count == 1)
        await append(world, "clicks", 0, raw_rows(0, 1))
        await until(lambda: world.service.manager.waiter_limit.count == 1)
        assert not waiting.done()

        await append(world, "clicks", 0, raw_rows(1, 100))

        assert fetched(await waiting) == {("clicks", 0): expected(0, 100)}


async def test_what_is_wrong_with_a_partition_is_said_of_it_alone(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        await append(world, "clicks", 0, raw_rows(0, 3))
        client = await world.client()

        answer = await fetch(
            client,
            {"clicks": {0: 1, 1: 0}, "default.clicks": {0: 4}, "views": {0: 0}, "no topic": {0: 0}},
            wait_ms=20_000,
        )

        assert fetched(answer) == {
            ("clicks", 0): expected(1, 3, first=1),
            ("clicks", 1): ErrorCode.unknown_topic_or_partition,
            ("default.clicks", 0): ErrorCode.offset_out_of_range,
            ("views", 0): ErrorCode.unknown_topic_or_partition,
            ("no topic", 0): ErrorCode.unknown_topic_or_partition,
        }


async def test_rows_of_an_older_schema_have_the_columns_of_today(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await world.http.create_table("events", EVENTS)
        await append(world, "events", 0, event_rows(0, 2))
        changed = await world.http.call(
            "PATCH",
            "/v1/tables/events/schema",
            json_body={"changes": [{"rename": "name", "to": "title"}]},
        )
        assert changed.status == 200, changed.body
        renamed = pa.RecordBatch.from_arrays(event_rows(2, 3).columns, names=["id", "title"])
        await append(world, "events", 0, renamed)
        client = await world.client()

        found = fetched(await fetch(client, {"events": {0: 0}}))["events", 0]

        assert isinstance(found, list)
        assert [json.loads(record.value or b"") for record in found] == [
            {"id": i, "title": f"n{i}"} for i in range(3)
        ]


async def test_a_session_is_never_given_and_one_that_is_asked_for_not_known(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        client = await world.client()
        values = fetch_values({"clicks": {0: 0}}) | {"session_id": 5, "session_epoch": 1}

        answer = await client.call(FETCH, 11, **values)

        assert answer.error_code is ErrorCode.fetch_session_id_not_found


async def test_a_consumer_that_finds_the_service_busy_asks_again_later(tmp_path: Path) -> None:
    async with kafka_world(tmp_path, waiting_fetches_max=1) as world:
        await raw_topic(world)
        first, second = await world.client(), await world.client()
        waiting = asyncio.ensure_future(fetch(first, {"clicks": {0: 0}}, wait_ms=20_000))
        await until(lambda: world.service.manager.waiter_limit.count == 1)

        answer = await fetch(second, {"clicks": {0: 0}}, wait_ms=20_000)

        assert fetched(answer) == {("clicks", 0): []}
        assert answer.throttle_time.total_seconds() == 1
        await append(world, "clicks", 0, raw_rows(0, 1))
        assert fetched(await waiting) == {("clicks", 0): expected(0, 1)}


async def test_a_client_that_goes_away_waits_no_more(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await raw_topic(world)
        client = await world.client()
        client.send(FETCH, 11, **fetch_values({"clicks": {0: 0}}, wait_ms=20_000))
        await until(lambda: world.service.manager.waiter_limit.count == 1)

        await client.close()

        await until(lambda: world.service.manager.waiter_limit.count == 0)


async def test_consumers_that_do_not_read_hold_what_answers_may_hold(tmp_path: Path) -> None:
    limit = 64 << 20
    async with kafka_world(
        tmp_path, answers_bytes_max=limit, fetch_bytes_max=8 << 20, answer_stall_timeout_ms=60_000
    ) as world:
        await raw_topic(world)
        for start in range(0, 80, 8):
            await append(world, "clicks", 0, raw_rows(start, start + 8, value_bytes=1 << 20))
        clients = [await world.client(limit=1 << 16) for _ in range(20)]
        for client in clients:
            client.send(FETCH, 11, **fetch_values({"clicks": {0: 0}}, each=8 << 20))

        answers = world.service.answers
        await until(lambda: answers.held > limit // 4)

        for client in clients:
            assert answers.held <= limit
            found = await client.answer(FETCH, 11, 1)
            # One that has found no room for a while is told to ask again.
            is_busy = found.throttle_time.total_seconds() > 0
            assert bool(found.responses[0].partitions[0].records) is not is_busy
        await until(lambda: answers.held == 0)


async def keyed(world: KafkaWorld, **properties: str) -> None:
    """A table with a key: two rows, one of them updated twice, the other deleted."""
    await world.http.create_table("keyed", EVENTS, primary_key=("id",), properties=properties)
    for route, rows in (
        ("upsert", event_rows(0, 2)),
        ("upsert", pa.record_batch([pa.array([0]), ["again"]], schema=EVENTS)),
        ("delete", pa.record_batch([pa.array([1])], names=["id"])),
        ("upsert", pa.record_batch([pa.array([0]), ["last"]], schema=EVENTS)),
    ):
        body = append_body(rows.schema, [(None, 0, rows)])
        answer = await world.http.call("POST", f"/v1/tables/keyed/{route}", body=body)
        assert answer.status == 200, answer.body


async def read_keyed(client: KafkaClient, *, each: int) -> list[tuple[int, Any, Any]]:
    """(offset, key, value) of every record, as a consumer reads them fetch by fetch."""
    records: list[FetchedRecord] = []
    offset = 0
    while True:
        answer = await fetch(client, {"keyed": {0: offset}}, partition_max_bytes=each)
        data = answer.responses[0].partitions[0].records
        if not data:
            break
        records += records_in(data, since=offset)
        offset = next_offset_after(data)
    assert offset == answer.responses[0].partitions[0].high_watermark
    return [
        (r.offset, json.loads(r.key or b"0"), None if r.value is None else json.loads(r.value))
        for r in records
    ]


async def test_the_changes_of_a_table_with_a_key_are_upserts_and_tombstones(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        await keyed(world)
        client = await world.client()

        # What an update replaces has an offset, and is no record.
        assert await read_keyed(client, each=200) == [
            (0, {"id": 0}, {"id": 0, "name": "n0"}),
            (1, {"id": 1}, {"id": 1, "name": "n1"}),
            (3, {"id": 0}, {"id": 0, "name": "again"}),
            (4, {"id": 1}, None),
            (6, {"id": 0}, {"id": 0, "name": "last"}),
        ]


async def test_an_update_has_both_rows_though_a_fetch_ends_between(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await keyed(world, **{"kafka.changes.format": "debezium-json"})
        client = await world.client()

        changes = [
            (offset, value["op"], value["before"] and value["before"]["name"])
            for offset, _, value in await read_keyed(client, each=1)
        ]

        assert changes == [
            (0, "c", None),
            (1, "c", None),
            (3, "u", "n0"),
            (4, "d", "n1"),
            (6, "u", "again"),
        ]
        # Who begins right at an update is told what it replaces, too.
        found = fetched(await fetch(client, {"keyed": {0: 3}}))["keyed", 0]
        assert isinstance(found, list)
        assert json.loads(found[0].value or b"")["before"]["name"] == "n0"
