"""Lookups of a join against real processes: keys, prefixes, a whole table, over a takeover."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.connector.lookup._joined_batches import joined, looked_up_by
from streamhouse.connector.lookup._lookup_plan import LookupPlan, key_order
from streamhouse.reading.options.connection import client_for
from tests.support.moved_service import MovedService, OwnedService
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [
        pa.field("country", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
    ]
)
KEY = ["country", "id"]


def _plan(client: StorageClient, path: str, on: list[str], **changes: Any) -> LookupPlan:
    info = client.describe_table(path)
    return LookupPlan(
        **{
            "table": path,
            "endpoint": client.endpoint,
            "token": None,
            "frame_columns": tuple(on),
            "key_schema": info.schema.select(key_order(info, on), table=path).to_arrow(),
            "is_whole_key": len(on) == len(info.descriptor.primary_key),
            "columns": ("name",),
            "row_schema": pa.schema([info.schema.to_arrow().field("name")]),
            "cache_bytes": 1 << 27,
            **changes,
        }
    )


def _rows(start: int, end: int, version: str = "") -> pa.Table:
    return pa.table(
        {
            "country": [f"c{i % 50}" for i in range(start, end)],
            "id": list(range(start, end)),
            "name": [f"{version}n{i}" for i in range(start, end)],
        },
        schema=SCHEMA,
    )


def _looked_up(plan: LookupPlan, batches: list[pa.RecordBatch]) -> list[Any]:
    out = list(joined(batches, plan, looked_up_by(plan)))
    return [tuple(row.values()) for batch in out for row in batch.to_pylist()]


@pytest.mark.parametrize("bucket_key", [["country"], ["id"]])
def test_keys_and_prefixes_before_and_after_tiering(tmp_path: Path, bucket_key: list[str]) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=KEY, bucket_count=3, bucket_key=bucket_key)
        client.upsert("t", _rows(0, 30_000))
        client.delete("t", _rows(10, 20).select(KEY))
        keys = _rows(0, 31_000).select(KEY).to_batches()[0]
        few = keys.slice(0, 100)
        prefixes = pa.RecordBatch.from_pydict({"country": ["c1", None, "x", "c1", "c10"]})
        expected = [
            (f"c{i % 50}", i, None if 10 <= i < 20 or i >= 30_000 else f"n{i}")
            for i in range(31_000)
        ]
        under = {
            c: sorted(f"n{i}" for i in range(c, 30_000, 50) if not 10 <= i < 20) for c in (1, 10)
        }
        for is_tiered in (False, True):
            plan = _plan(client, "default.t", KEY)
            assert _looked_up(plan, [few]) == expected[:100]
            # More keys than a task asks one by one: the table is read, log or lake.
            assert _looked_up(plan, [keys]) == expected
            found = _looked_up(_plan(client, "default.t", ["country"]), [prefixes])
            assert sorted(n for c, n in found if c == "c1") == sorted(under[1] * 2)
            assert sorted(n for c, n in found if c == "c10") == under[10]
            assert [(c, n) for c, n in found if c in (None, "x")] == [(None, None), ("x", None)]
            if not is_tiered:
                assert tier_once(client, "t") > 0


@pytest.fixture(params=[MovedService, OwnedService])
def moved(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MovedService | OwnedService]:
    with request.param(tmp_path) as service:
        yield service


def test_a_task_goes_on_over_a_takeover(moved: MovedService | OwnedService) -> None:
    client = client_for(moved.endpoint, None)
    client.create_table("t", SCHEMA, primary_key=KEY, bucket_count=2)
    client.upsert("t", _rows(0, 100))
    plan = _plan(client, "default.t", KEY)

    def batches() -> Iterator[pa.RecordBatch]:
        keys = _rows(0, 100).select(KEY).to_batches()[0]
        for number in range(4):
            if number == 2:
                moved.move()
                client.upsert("t", _rows(99, 100, "moved "))
            yield keys.slice(number * 25, 25)

    out = list(joined(batches(), plan, looked_up_by(plan), window_rows=1))

    names = [name for batch in out for name in batch.column("name").to_pylist()]
    assert names == [*(f"n{i}" for i in range(99)), "moved n99"]
