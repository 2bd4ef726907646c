"""Records that were read by a table's schema, and come to the table after it has changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from streamhouse.core.model.changelog import DELETE, INSERT
from streamhouse.core.wire.arrow_body import decode_payload
from tests.support.held_step import around
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world

PRODUCE = 0
_ITEMS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("x", pa.int32()),
        pa.field("y", pa.int32()),
    ]
)
_ROW = b'{"id": 1, "name": "a", "x": 3, "y": 4}'
_CHANGES = {
    "add": [{"add": "z", "type": "bigint"}],
    "rename": [{"rename": "x", "to": "z"}],
    "drop": [{"drop": "x", "confirm": "x"}],
    "rename the key": [{"rename": "id", "to": "key"}],
    "another of the name": [{"rename": "name", "to": "z"}, {"add": "name", "type": "string"}],
}
_SWAP = [{"rename": "x", "to": "z"}, {"rename": "y", "to": "x"}, {"rename": "z", "to": "y"}]


async def _produce(
    client: KafkaClient, values: Sequence[bytes | None], keys: Sequence[bytes | None] | None = None
) -> ErrorCode:
    batch = produced(records(values, keys=keys))
    answer = await client.call(
        PRODUCE,
        9,
        acks=-1,
        timeout=timedelta(seconds=10),
        topic_data=[{"name": "items", "partition_data": [{"index": 0, "records": batch}]}],
    )
    code: ErrorCode = answer.responses[0].partition_responses[0].error_code
    return code


async def _change(world: KafkaWorld, changes: Sequence[dict[str, Any]]) -> None:
    body = {"changes": changes}
    answer = await world.http.call("PATCH", "/v1/tables/items/schema", json_body=body)
    assert answer.status == 200, answer.body


async def _produce_around(
    world: KafkaWorld,
    monkeypatch: pytest.MonkeyPatch,
    changes: Sequence[dict[str, Any]],
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
) -> ErrorCode:
    """Produce records whose table changes its schema once they are decoded."""
    is_decoded, may_go_on = threading.Event(), threading.Event()

    def held(real: Any, *arguments: Any) -> Any:
        found = real(*arguments)
        is_decoded.set()
        may_go_on.wait(60)
        return found

    client = await world.client()
    with monkeypatch.context() as patch:
        around(patch, "records-decoding", held)
        producing = asyncio.create_task(_produce(client, values, keys))
        while not (is_decoded.is_set() or producing.done()):
            await asyncio.sleep(0)
        await _change(world, changes)
        may_go_on.set()
        return await producing


def _rows(world: KafkaWorld) -> list[dict[str, Any]]:
    """Return the changes that the table's log has, without what only a changelog has."""
    table = world.service.table("items")
    (tablet,) = table.tablets
    return [
        {name: value for name, value in row.items() if name != "__retracts"}
        for batch in tablet.read(tablet.log_start_offset, bytes_max=1 << 30)
        for row in decode_payload(batch.payload, table.log_schema_of(batch.schema_id)).to_pylist()
    ]


@pytest.mark.parametrize(
    ("changes", "on_error"),
    [*((changes, "refuse") for changes in _CHANGES.values()), (_CHANGES["add"], "reject")],
    ids=[*_CHANGES, "add, kept apart"],
)
async def test_deletes_come_through_every_change_beside_other_records(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: list[dict[str, Any]],
    on_error: str,
) -> None:
    # Records are decoded on threads then.
    async with kafka_world(tmp_path, inline_bytes_max=1) as world:
        properties = {"kafka.on.error": on_error}
        await world.http.create_table("items", _ITEMS, primary_key=["id"], properties=properties)
        client = await world.client()
        stored = b'{"id": 2, "name": "b"}'
        assert await _produce(client, [stored]) is ErrorCode.none
        bad = [b"{"] if on_error == "reject" else []

        values, keys = [_ROW, None, *bad], [None, b'{"id": 2}', *[None] * len(bad)]
        code = await _produce_around(world, monkeypatch, changes, values, keys)

        assert code is ErrorCode.none
        key = world.service.table("items").info.descriptor.primary_key[0]
        changed = [(row[key], row["__change_type"]) for row in _rows(world)[1:]]
        assert changed == [(1, INSERT), (2, DELETE)]


@pytest.mark.parametrize("changes", _CHANGES.values(), ids=list(_CHANGES))
async def test_a_batch_of_deletes_only_comes_through_every_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[dict[str, Any]]
) -> None:
    async with kafka_world(tmp_path, inline_bytes_max=1) as world:
        await world.http.create_table("items", _ITEMS, primary_key=["id"])
        client = await world.client()
        assert await _produce(client, [_ROW]) is ErrorCode.none

        code = await _produce_around(world, monkeypatch, changes, [None], [b'{"id": 1}'])

        assert code is ErrorCode.none
        assert world.service.table("items").row_count == 0


@pytest.mark.parametrize("on_error", ["refuse", "reject"])
async def test_columns_that_change_their_names_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    async with kafka_world(tmp_path, inline_bytes_max=1) as world:
        properties = {"kafka.on.error": on_error}
        await world.http.create_table("items", _ITEMS, primary_key=["id"], properties=properties)
        values = [_ROW, b"{"] if on_error == "reject" else [_ROW]

        assert await _produce_around(world, monkeypatch, _SWAP, values) is ErrorCode.none

        (row,) = _rows(world)
        assert (row["x"], row["y"]) == (4, 3)
