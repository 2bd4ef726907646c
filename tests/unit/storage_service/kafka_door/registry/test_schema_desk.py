"""What takes long with a wide schema is done beside the event loop, for the table as it is then."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.storage_service.kafka_door._record_schemas import schemas_of
from streamhouse.storage_service.kafka_door.registry._schema_desk import keep_reading_schemas
from tests.support.held_step import around
from tests.support.in_process_service import InProcessService, in_process_service
from tests.support.registry_world import ORDER, ask, register, with_field

_NEWEST = "/subjects/orders-value/versions/latest"


class _Held:
    """A step that waits the first time, and how often it was reached."""

    def __init__(self) -> None:
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()
        self.count = 0

    def __call__(self, real: Any, *arguments: Any) -> Any:
        self.count += 1
        self.is_reached.set()
        assert self.may_go_on.wait(60)
        return real(*arguments)


async def _change(service: InProcessService, *changes: dict[str, Any]) -> None:
    path = "/v1/tables/orders/schema"
    answer = await service.call("PATCH", path, json_body={"changes": list(changes)})
    assert answer.status == 200, answer.body


async def _newest_fields(service: InProcessService) -> list[str]:
    _, newest = await ask(service, "GET", _NEWEST)
    return [one["name"] for one in json.loads(newest["schema"])["fields"]]


async def test_a_schema_is_judged_beside_the_loop_for_the_table_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _Held()
    async with in_process_service(tmp_path) as service:
        await register(service, "orders-value", ORDER)
        around(monkeypatch, "schema-judging", held)
        wider = with_field("at", ["null", "double"])
        registering = asyncio.create_task(register(service, "orders-value", wider))
        await service.service.run_blocking(held.is_reached.wait, 60)

        assert (await ask(service, "GET", _NEWEST))[0] == 200
        # What the schema lacks meanwhile, it does not lack when it is asked again.
        await _change(service, {"add": "at", "type": "double"})
        held.may_go_on.set()
        status, made = await registering

        assert (status, made["version"], held.count) == (200, 2, 2), made


async def test_a_schema_with_all_columns_is_made_beside_the_loop_of_the_table_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _Held()
    async with in_process_service(tmp_path) as service:
        await register(service, "orders-value", ORDER)
        await _change(service, {"add": "first", "type": "string"})
        table = service.service.table("orders")
        around(monkeypatch, "schemas-making", held)
        keeping = asyncio.create_task(keep_reading_schemas(table))
        await service.service.run_blocking(held.is_reached.wait, 60)

        await _change(service, {"add": "second", "type": "string"})
        held.may_go_on.set()
        await keeping

        assert await _newest_fields(service) == ["id", "note", "first", "second"]
        assert len(schemas_of(table).current().schemas) == 2
        await keep_reading_schemas(table)
        assert held.count == 2


async def test_a_schema_that_fits_already_is_not_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = _Held()
    judged.may_go_on.set()
    async with in_process_service(tmp_path) as service:
        around(monkeypatch, "schema-judging", judged)
        first = await register(service, "orders-value", ORDER)
        # Behind it comes one of the service's own, with null in the new column.
        second = await register(service, "orders-value", with_field("at", "double"))
        assert judged.count == 2

        assert await register(service, "orders-value", with_field("at", "double")) == second
        assert judged.count == 2
        # The table has changed since it was judged.
        assert await register(service, "orders-value", ORDER) == first
        assert judged.count == 3
        assert await register(service, "orders-value", ORDER) == first
        assert judged.count == 3
        await _change(service, {"drop": "note", "confirm": "note"})
        assert await register(service, "orders-value", ORDER) == first
        assert judged.count == 4
        assert "note" in service.service.table("orders").info.schema.names


async def test_a_table_that_only_a_tiering_worker_was_given_takes_any_first_schema(
    tmp_path: Path,
) -> None:
    schema = pa.schema([pa.field("kind", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
    fields = [
        {"name": "kind", "type": ["null", {"type": "enum", "name": "E", "symbols": ["A"]}]},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
    ]
    async with in_process_service(tmp_path) as service:
        # As a crash leaves it that comes before the schema is kept.
        await service.create_table("t", schema, properties={"kafka.value.format": "avro"})
        manager, table = service.service.manager, service.service.table("t")
        claimed = await manager.tiering.claim("one", tables=[table], force=True, include_idle=True)
        assert claimed.assignment is not None

        status, answer = await register(
            service, "t-value", {"type": "record", "name": "T", "fields": fields}
        )

        assert status == 200, answer
