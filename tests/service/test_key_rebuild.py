"""Rows by key of a real service, lost after its log was cut: they come back from a real lake."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [
        pa.field("region", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int8()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("price", pa.decimal128(9, 2)),
    ]
)
KEYS = 3_000


def _rows(number: int, ids: range) -> pa.Table:
    lines = [
        {
            "region": ("eu", "us")[i % 2],
            "id": i,
            "small": (i + number) % 100,
            "tags": None if i % 3 else [f"{number}", None],
            "price": None,
        }
        for i in ids
    ]
    return pa.Table.from_pylist(lines, SCHEMA)


def _everything(client: StorageClient) -> list[dict[str, Any]]:
    keys = _rows(0, range(KEYS)).select(["region", "id"])
    found = client.lookup("t", keys).to_pylist()
    assert client.count("t") == sum(row["__found"] for row in found)
    return found


def test_lost_rows_come_back_from_the_lake(tmp_path: Path) -> None:
    """Updates and deletes over several rounds, the log cut, the rows lost; twice, in two ways."""
    options = ("--retention-interval-ms", "50")
    properties = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
    with ServiceProcess(tmp_path, *options) as service, StorageClient(service.endpoint) as client:
        client.create_table(
            "t", SCHEMA, primary_key=["region", "id"], bucket_count=2, properties=properties
        )
        for number in range(2_000):
            client.upsert("t", _rows(number, range(number % 7 * 100, KEYS)))
            client.delete("t", _rows(0, range(number % 5, 900, 9)).select(["region", "id"]))
            tier_once(client, "default.t")
            if all(p.log_start_offset > 0 for p in client.positions("t").values()):
                break
        # And what the lake does not have.
        client.upsert("t", _rows(5_000, range(500, 700)))
        before = _everything(client)
        positions = client.positions("t")
        assert all(p.log_start_offset > 0 for p in positions.values())
        assert any(p.tiered_offset < p.high_watermark for p in positions.values())
        service.kill()
    for bucket in (0, 1):
        shutil.rmtree(tmp_path / "tables" / "1" / f"bucket-{bucket}" / "kv")
    with ServiceProcess(tmp_path, *options) as service, StorageClient(service.endpoint) as client:
        assert _everything(client) == before
        assert "event=restored" in service.log_text()
        # They are whole, versions too: writing goes on, and the lake with it.
        client.upsert("t", _rows(6_000, range(50)))
        tier_once(client, "default.t")
        before = _everything(client)
        assert service.terminate() == 0
    rebuild = ("--rebuild", "default.t")
    with (
        ServiceProcess(tmp_path, *rebuild) as service,
        StorageClient(service.endpoint) as client,
    ):
        assert _everything(client) == before
