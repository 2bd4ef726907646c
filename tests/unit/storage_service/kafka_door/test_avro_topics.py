"""Avro in Confluent's framing, through the door, with the schemas that the registry has."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.registry.schema_set import (
    PRODUCER_SCHEMAS_MAX,
    SCHEMA_BYTES_MAX,
)
from streamhouse.storage_service.kafka.registry.subjects import Part
from streamhouse.storage_service.kafka_door._record_schemas import schemas_of
from tests.support.fetch_world import fetch, fetched
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world
from tests.support.registry_world import ORDER, ask, framed, register, with_field

_FIRST, _SECOND = b"\x02\x02\x02x", b"\x04\x00"
"""`{"id": 1, "note": "x"}` and `{"id": 2, "note": null}`."""


async def _produce(client: KafkaClient, *values: bytes) -> Any:
    return await _produce_batch(client, produced(records(values)))


async def _produce_batch(client: KafkaClient, batch: bytes) -> Any:
    data = [{"index": 0, "records": batch}]
    answer = await client.call(
        0,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": "orders", "partition_data": data}],
    )
    return answer.responses[0].partition_responses[0]


async def _values(client: KafkaClient) -> list[bytes | None]:
    found = fetched(await fetch(client, {"orders": {0: 0}}))
    return [record.value for record in found["orders", 0]]


async def test_records_of_avro_are_rows_and_come_back(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-value", ORDER)
        client = await world.client()
        sent = [framed(made["id"], _FIRST), framed(made["id"], _SECOND)]

        assert (await _produce(client, *sent)).error_code is ErrorCode.none

        assert await _values(client) == sent
        assert world.service.table("orders").tablet(0).high_watermark == 2


async def test_a_schema_of_another_table_is_none_of_a_topics(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        await register(world.http, "orders-value", ORDER)
        _, other = await register(world.http, "other-value", ORDER)
        client = await world.client()

        answer = await _produce(client, framed(other["id"], _FIRST))

        assert answer.error_code is ErrorCode.invalid_record
        assert "belongs to another table" in answer.record_errors[0].batch_index_error_message


async def test_old_rows_are_read_by_the_newest_schema(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-value", ORDER)
        client = await world.client()
        await _produce(client, framed(made["id"], _FIRST))
        await register(world.http, "orders-value", with_field("at", "long"))
        _, newest = await ask(world.http, "GET", "/subjects/orders-value/versions/latest")

        # Its number is that behind the one of producers, and null is its first type.
        assert newest["version"] == 3
        assert await _values(client) == [framed(newest["id"], _FIRST + b"\0")]


async def test_a_schema_that_lacks_what_an_older_one_had_leaves_rows_readable(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-value", ORDER)
        client = await world.client()
        await _produce(client, framed(made["id"], _SECOND))
        narrow = with_field("note", "string")
        _, narrower = await register(world.http, "orders-value", narrow)

        # Its text is that of the first one, which is not the newest any more.
        assert await _values(client) == [framed(narrower["id"] + 1, _SECOND)]
        for again in (ORDER, narrow):
            await register(world.http, "orders-value", again)
        _, versions = await ask(world.http, "GET", "/subjects/orders-value/versions")
        assert versions == [1, 2, 3]


async def test_records_without_a_key_or_without_a_value_need_no_schema_that_has_null(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-key", "string")
        client = await world.client()
        key = framed(made["id"], b"\x02x")
        batch = produced(records([None, None], keys=[key, None]))

        assert (await _produce_batch(client, batch)).error_code is ErrorCode.none

        found = fetched(await fetch(client, {"orders": {0: 0}}))["orders", 0]
        assert [(record.key, record.value) for record in found] == [(key, None), (None, None)]


async def test_a_table_that_was_changed_otherwise_is_read_by_a_schema_of_its_own(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-value", ORDER)
        client = await world.client()
        await _produce(client, framed(made["id"], _FIRST))
        changes = [{"add": "more", "type": "string"}]
        answer = await world.http.call(
            "PATCH", "/v1/tables/orders/schema", json_body={"changes": changes}
        )
        assert answer.status == 200, answer.body

        assert await _values(client) == [framed(made["id"] + 1, _FIRST + b"\0")]
        _, newest = await ask(world.http, "GET", "/subjects/orders-value/versions/latest")
        assert [one["name"] for one in json.loads(newest["schema"])["fields"]] == [
            "id",
            "note",
            "more",
        ]


async def _add_column(world: KafkaWorld, name: str) -> None:
    changes = [{"add": name, "type": "string"}]
    path = "/v1/tables/orders/schema"
    answer = await world.http.call("PATCH", path, json_body={"changes": changes})
    assert answer.status == 200, answer.body


async def test_producers_that_register_all_they_may_do_not_end_the_reading(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-value", ORDER)
        client = await world.client()
        await _produce(client, framed(made["id"], _FIRST))
        schemas = schemas_of(world.service.table("orders"))
        known = schemas.current()
        for number in range(PRODUCER_SCHEMAS_MAX - 1):
            known = known.with_schema(Part.VALUE, json.dumps({**ORDER, "doc": str(number)}))
        async with schemas.changing:
            await schemas.keep(known)
        status, answer = await register(world.http, "orders-value", {**ORDER, "doc": "more"})
        assert (status, "899 schemas" in answer["message"]) == (503, True)

        for number in range(3):
            await _add_column(world, f"more{number}")

            newest = framed(
                made["id"] + PRODUCER_SCHEMAS_MAX + number, _FIRST + b"\0" * (number + 1)
            )
            assert await _values(client) == [newest]


async def test_a_schema_as_large_as_may_be_does_not_end_the_reading(tmp_path: Path) -> None:
    async with kafka_world(tmp_path) as world:
        size = len(json.dumps({**ORDER, "doc": ""}))
        large = {**ORDER, "doc": "x" * (SCHEMA_BYTES_MAX - size)}
        _, made = await register(world.http, "orders-value", large)
        client = await world.client()
        await _produce(client, framed(made["id"], _FIRST))

        await _add_column(world, "more")

        assert await _values(client) == [framed(made["id"] + 1, _FIRST + b"\0")]
        _, newest = await ask(world.http, "GET", "/subjects/orders-value/versions/latest")
        # Of its columns: the one before it leaves no room for one more field.
        assert json.loads(newest["schema"])["name"] == "orders"


async def test_a_schema_does_not_mean_a_column_that_got_a_name_of_its_later(
    tmp_path: Path,
) -> None:
    async with kafka_world(tmp_path) as world:
        _, made = await register(world.http, "orders-value", ORDER)
        client = await world.client()
        changes = [{"drop": "note", "confirm": "note"}, {"add": "note", "type": "string"}]
        answer = await world.http.call(
            "PATCH", "/v1/tables/orders/schema", json_body={"changes": changes}
        )
        assert answer.status == 200, answer.body

        refused = await _produce(client, framed(made["id"], _FIRST))

        assert refused.error_code is ErrorCode.invalid_record
        message = refused.record_errors[0].batch_index_error_message
        assert "column 'note' was another column in version 0" in message
        assert "register a schema of another text" in message
        _, other = await register(world.http, "orders-value", {**ORDER, "doc": "since the change"})
        assert (await _produce(client, framed(other["id"], _FIRST))).error_code is ErrorCode.none
        assert await _values(client) == [framed(other["id"], _FIRST)]
