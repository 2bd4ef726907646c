"""A client asks for a topic, which makes it, and then registers the schema of what it sends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.transaction import TransactionOperation
from tests.support.fetch_world import append, fetch, fetched, raw_rows
from tests.support.held_step import around
from tests.support.in_process_service import InProcessService
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world
from tests.support.registry_world import ORDER, ask, framed, register, with_field

METADATA, CREATE = 3, 19
FIRST = b"\x02\x02\x02x"
"""`{"id": 1, "note": "x"}`."""


async def _asked(client: KafkaClient, *topics: str) -> list[Any]:
    """Ask for topics as producers do before they serialize anything."""
    names = [{"name": name} for name in topics]
    answer = await client.call(METADATA, 12, topics=names, allow_auto_topic_creation=True)
    assert {topic.error_code for topic in answer.topics} == {ErrorCode.none}
    return list(answer.topics)


async def _produce(client: KafkaClient, topic: str, *values: bytes) -> ErrorCode:
    data = [{"index": 0, "records": produced(records(values))}]
    answer = await client.call(
        0,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": topic, "partition_data": data}],
    )
    code: ErrorCode = answer.responses[0].partition_responses[0].error_code
    return code


def _as_made(service: InProcessService, topic: str) -> Any:
    """Return what a topic's table is, but for the numbers that no two tables share."""
    info: TableInfo = service.service.table(topic).info
    described = dataclasses.replace(info.descriptor, path=info.path).to_json()
    columns = [{k: v for k, v in c.items() if k != "id"} for c in described["schema"]]
    return {**described, "schema": columns, "path": ""}


async def _refused(world: KafkaWorld, subject: str, schema: Any = ORDER) -> None:
    """Register a schema for a raw topic that stays one, and see that nothing changes."""
    path = subject.rpartition("-")[0]
    before = world.service.table(path).info
    status, answer = await register(world.http, subject, schema)

    assert (status, answer["error_code"]) == (409, 409)
    assert "format = raw, and a schema is of Avro; change that with" in answer["message"]
    assert world.service.table(path).info is before
    assert (await ask(world.http, "GET", f"/subjects/{subject}/versions"))[0] == 404


async def test_a_topic_that_was_asked_for_becomes_what_its_first_schema_says(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path, kafka_partitions=3) as world:
        client = await world.client()
        before = await _asked(client, "orders")
        assert world.service.table("orders").info.schema.to_arrow().equals(RAW_TOPIC)

        status, made = await register(world.http, "orders-value", ORDER)

        assert (status, made["version"]) == (200, 1)
        await register(world.http, "others-value", ORDER)
        assert _as_made(world.http, "orders") == _as_made(world.http, "others")
        # Who has asked before need not ask again.
        assert await _asked(client, "orders") == before
        sent = framed(made["id"], FIRST)
        assert await _produce(client, "orders", sent) is ErrorCode.none
        assert await _produce(client, "orders", b"text") is ErrorCode.invalid_record
        found = fetched(await fetch(client, {"orders": {0: 0}}))
        assert [record.value for record in found["orders", 0]] == [sent]
        wider = with_field("at", ["null", "double"])
        assert (await register(world.http, "orders-value", wider))[0] == 200
    async with kafka_world(tmp_path) as world:
        assert [c.name for c in world.service.table("orders").info.schema.columns] == [
            "id",
            "note",
            "at",
        ]
        client = await world.client()
        assert len(fetched(await fetch(client, {"orders": {0: 0}}))["orders", 0]) == 1


@pytest.mark.parametrize("parts", [("key", "value"), ("value", "key")])
async def test_it_does_so_with_keys(tmp_path: Path, parts: tuple[str, ...]) -> None:
    schemas = {"key": "string", "value": ORDER}
    async with kafka_world(tmp_path) as world:
        await _asked(await world.client(), "asked")
        for topic in ("asked", "first"):
            for part in parts:
                assert (await register(world.http, f"{topic}-{part}", schemas[part]))[0] == 200

        assert _as_made(world.http, "asked") == _as_made(world.http, "first")
        table = world.service.table("asked").info
        assert table.descriptor.record_format().key_columns == ("key",)


async def test_a_consumer_that_waits_for_the_first_record_gets_it(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client, consumer = await world.client(), await world.client()
        await _asked(client, "orders")
        waiting = asyncio.create_task(fetch(consumer, {"orders": {0: 0}}, wait_ms=20_000))
        while not world.service.manager.waiter_limit.count:
            await asyncio.sleep(0)
        _, made = await register(world.http, "orders-value", ORDER)
        sent = framed(made["id"], FIRST)

        assert await _produce(client, "orders", sent) is ErrorCode.none

        found = fetched(await waiting)
        assert [record.value for record in found["orders", 0]] == [sent]


async def test_what_a_topic_was_made_with_stays(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        wanted = {
            "name": "web-clicks",
            "num_partitions": 4,
            "replication_factor": 1,
            "configs": [{"name": "retention.ms", "value": "60000"}],
        }
        await client.call(CREATE, 7, topics=[wanted])

        assert (await register(world.http, "web-clicks-value", ORDER))[0] == 200

        table = world.service.table("web_clicks").info
        assert table.bucket_count == 4
        assert table.descriptor.properties == {
            "kafka.topic": "web-clicks",
            "kafka.value.format": "avro",
            "table.log.ttl": "60000ms",
        }


async def test_a_topic_that_had_a_row_stays_raw(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _asked(client, "orders")
        assert await _produce(client, "orders", b"text") is ErrorCode.none

        await _refused(world, "orders-value")
        await _refused(world, "orders-key", "string")
        body = {"schema": json.dumps(ORDER)}
        path = "/compatibility/subjects/orders-value/versions/latest"
        assert (await ask(world.http, "POST", path, body))[1]["is_compatible"] is False
    async with kafka_world(tmp_path) as world:
        await _refused(world, "orders-value")


async def test_a_table_that_is_meant_to_be_raw_stays_it(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        configs = [{"name": "kafka.value.format", "value": "raw"}]
        said = {"name": "said", "num_partitions": 1, "replication_factor": 1, "configs": configs}
        await client.call(CREATE, 7, topics=[said])
        await _refused(world, "said-value")
        await world.http.create_table("made", RAW_TOPIC)
        await _refused(world, "made-value")
        await _asked(client, "kept", "changed")
        manager = world.service.manager
        for name, updates in (
            ("kept", {"kafka.on.schema": "keep"}),
            ("changed", {"kafka.key.format": "raw"}),
        ):
            path = world.service.table(name).path
            await manager.alter_properties(path, updates=updates, removals=[])
        await _refused(world, "kept-value")
        await _refused(world, "changed-key", "string")


async def test_a_topic_that_somebody_is_about_to_write_or_to_tier_stays_raw(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _asked(await world.client(), "orders", "others")
        manager = world.service.manager
        table = world.service.table("orders")
        begun, _ = await manager.transactions.of(table).begin(
            TransactionOperation.APPEND, columns=None, app_id=None, version=None, timeout_ms=None
        )
        await _refused(world, "orders-value")
        manager.transactions.of(table).abort(begun)
        assert (await register(world.http, "orders-value", ORDER))[0] == 200

        other = world.service.table("others")
        claimed = await manager.tiering.claim("one", tables=[other], force=True, include_idle=True)
        assert claimed.assignment is not None
        await _refused(world, "others-value")


async def test_whether_a_schema_fits_is_said_before_and_changes_nothing(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _asked(await world.client(), "orders")
        before = world.service.table("orders").info
        path = "/compatibility/subjects/orders-value/versions/latest"

        body = {"schema": json.dumps(ORDER)}
        assert await ask(world.http, "POST", path, body) == (200, {"is_compatible": True})
        body = {"schema": '"string"'}
        assert (await ask(world.http, "POST", path, body))[1]["is_compatible"] is False

        assert (await register(world.http, "orders-value", "string"))[0] == 422
        assert world.service.table("orders").info is before


async def test_a_schema_that_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        client = await world.client()
        configs = [{"name": "kafka.timestamp.column", "value": "timestamp"}]
        named = {"name": "named", "num_partitions": 1, "replication_factor": 1, "configs": configs}
        await client.call(CREATE, 7, topics=[named])
        before = world.service.table("named").info

        status, answer = await register(world.http, "named-value", ORDER)

        assert status == 422
        assert "'timestamp'" in answer["message"]
        assert world.service.table("named").info is before


async def test_records_that_come_meanwhile_are_sent_again_and_judged_as_avro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_kept, may_go_on = threading.Event(), threading.Event()

    def held(real: Any, *arguments: Any) -> Any:
        is_kept.set()
        may_go_on.wait(60)
        return real(*arguments)

    async with kafka_world(tmp_path) as world:
        client = await world.client()
        await _asked(client, "orders")
        with monkeypatch.context() as patch:
            around(patch, "table-keeping", held)
            registering = asyncio.create_task(register(world.http, "orders-value", ORDER))
            await world.service.run_blocking(is_kept.wait, 60)

            assert await _produce(client, "orders", b"text") is ErrorCode.not_leader_or_follower
            body = {"operation": "append"}
            begun = await world.http.call("POST", "/v1/tables/orders/transactions", json_body=body)
            assert begun.status == 503
            # Who registers and goes away, registers.
            registering.cancel()
            may_go_on.set()
        status, made = await register(world.http, "orders-value", ORDER)

        assert status == 200
        assert world.service.table("orders").info.schema_id == 1
        assert await _produce(client, "orders", b"text") is ErrorCode.invalid_record
        sent = framed(made["id"], FIRST)
        assert await _produce(client, "orders", sent) is ErrorCode.none


async def test_records_that_were_decoded_before_and_come_after_are_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_decoded, may_go_on = threading.Event(), threading.Event()

    def held(real: Any, *arguments: Any) -> Any:
        found = real(*arguments)
        is_decoded.set()
        may_go_on.wait(60)
        return found

    # Records are decoded on threads then.
    async with kafka_world(tmp_path, inline_bytes_max=1) as world:
        client = await world.client()
        await _asked(client, "orders")
        with monkeypatch.context() as patch:
            around(patch, "records-decoding", held)
            producing = asyncio.create_task(_produce(client, "orders", b"text"))
            while not (is_decoded.is_set() or producing.done()):
                await asyncio.sleep(0)
            assert (await register(world.http, "orders-value", ORDER))[0] == 200
            may_go_on.set()
            assert await producing is ErrorCode.not_leader_or_follower

        assert world.service.table("orders").tablet(0).log_end_offset == 0
        assert await _produce(client, "orders", b"text") is ErrorCode.invalid_record


@pytest.mark.parametrize("seed", range(2))
async def test_of_a_race_records_or_the_schema_come_first(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    topics = [f"t{number}" for number in range(6)]
    stored: dict[str, int] = {}

    async def race(world: KafkaWorld, topic: str) -> bool:
        """Return whether the schema came first."""
        clients = [await world.client() for _ in range(2)]

        async def send(client: KafkaClient) -> list[ErrorCode]:
            for _ in range(chosen.randrange(12)):
                await asyncio.sleep(0)
            return [await _produce(client, topic, b"text") for _ in range(2)]

        async def schema() -> int:
            for _ in range(chosen.randrange(20)):
                await asyncio.sleep(0)
            return (await register(world.http, f"{topic}-value", ORDER))[0]

        status, *sent = await asyncio.gather(schema(), *map(send, clients))
        codes = [code for of_one in sent for code in of_one]
        table = world.service.table(topic)
        stored[topic] = codes.count(ErrorCode.none)
        assert table.tablet(0).high_watermark == stored[topic]
        assert status == (409 if stored[topic] else 200), codes
        if not stored[topic]:
            known = {ErrorCode.invalid_record, ErrorCode.not_leader_or_follower}
            assert set(codes) <= known
        for client in clients:
            await client.close()
        return not stored[topic]

    # Records are decoded on the event loop or on threads.
    async with kafka_world(tmp_path, inline_bytes_max=(1, 64 << 10)[seed]) as world:
        await _asked(await world.client(), *topics)
        firsts = {topic: await race(world, topic) for topic in topics}
    async with kafka_world(tmp_path) as world:
        assert not world.service.manager.damaged_tables()
        client = await world.client()
        for topic, is_avro in firsts.items():
            form = world.service.table(topic).info.descriptor.record_format()
            assert form.value == ("avro" if is_avro else "raw")
            found = fetched(await fetch(client, {topic: {0: 0}}))
            assert len(found.get((topic, 0), ())) == stored[topic]


async def test_rows_that_were_made_for_the_former_columns_are_refused(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await _asked(await world.client(), "orders")
        assert (await register(world.http, "orders-value", ORDER))[0] == 200

        with pytest.raises(AssertionError, match="unknown_column"):
            await append(world, "orders", 0, raw_rows(0, 2))
        fetching = await world.http.call(
            "GET", "/v1/tables/orders/buckets/0/fetch", query={"offset": "0", "schema_id": "0"}
        )
        assert fetching.status == 400
        assert "no schema version 0; it has 1 to 1" in fetching.json()["error"]["message"]
