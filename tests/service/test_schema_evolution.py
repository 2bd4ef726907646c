"""A log table that changes its schema between rounds: every reader sees the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

FIRST = pa.schema(
    [
        pa.field("id", pa.int32(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("size", pa.float32()),
    ]
)


def _lake_rows(client: StreamhouseClient) -> list[dict[str, Any]]:
    """What stock pyiceberg reads."""
    catalog = client.lake_catalog()
    lake = load_catalog(catalog.name, **catalog.properties).load_table("default.items")
    rows = lake.scan().to_arrow().sort_by("id").drop(["__bucket", "__offset", "__timestamp"])
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


def _rows(client: StreamhouseClient, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.read("items", **options).sort_by("id").to_pylist()
    return found


def test_reads_and_lake_agree_after_every_change(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table(
            "items", FIRST, bucket_count=2, bucket_key=["id"], partitioned_by=["region"]
        )

        def append(table: dict[str, list[Any]]) -> None:
            schema = client.describe_table("items").schema.to_arrow()
            client.append("items", pa.table(table, schema=schema))

        append({"id": [0, 1], "region": ["eu", "us"], "size": [0.5, None]})
        tier_once(client)
        append({"id": [2], "region": ["eu"], "size": [2.5]})
        client.alter_schema(
            "items",
            [
                {"widen": "id", "to": "bigint"},
                {"widen": "size", "to": "double"},
                {"rename": "region", "to": "area"},
                {"add": "note", "type": "string", "first": True},
                {"add": "tags", "type": {"type": "array", "element": "string"}},
            ],
        )
        append(
            {
                "note": ["n"],
                "id": [1 << 40],
                "area": ["us"],
                "size": [1e300],
                "tags": [["a", "b"]],
            }
        )
        empty: dict[str, Any] = {"note": None, "tags": None}
        expected: list[dict[str, Any]] = [
            empty | {"id": 0, "area": "eu", "size": 0.5},
            empty | {"id": 1, "area": "us", "size": None},
            empty | {"id": 2, "area": "eu", "size": 2.5},
            {"note": "n", "id": 1 << 40, "area": "us", "size": 1e300, "tags": ["a", "b"]},
        ]

        # One row group of each kind: lake of version 0, log of versions 0 and 1.
        assert _rows(client) == expected
        assert _rows(client, where="area = 'eu'") == [expected[0], expected[2]]
        assert _rows(client, where="id > 1") == expected[2:]
        assert _rows(client, where="size >= 2") == expected[2:]
        assert _rows(client, where="note IS NULL") == expected[:3]

        tier_once(client)
        assert _lake_rows(client) == expected
        assert _rows(client) == expected
        assert _rows(client, where="area = 'us' AND id < 5") == [expected[1]]

        # A new column with a dropped one's name is another column, also before the lake knows it.
        client.drop_column("items", "size", confirm="size")
        client.add_column("items", "size", pa.string())
        kept = [
            {name: value for name, value in row.items() if name != "size"} | {"size": None}
            for row in expected
        ]
        assert _rows(client) == kept
        assert _rows(client, where="size = '2.5'") == []
        append({"note": [None], "id": [9], "area": ["eu"], "tags": [None], "size": ["large"]})
        kept.insert(3, empty | {"id": 9, "area": "eu", "size": "large"})
        assert _rows(client) == kept
        tier_once(client)
        assert _lake_rows(client) == kept
        assert _rows(client, where="size = 'large'") == [kept[3]]


def test_a_range_is_read_in_the_version_asked_for_across_pages(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("items", FIRST)
        row = {"id": [1], "region": ["eu"], "size": [0.5]}
        client.append("items", pa.table(row, schema=FIRST))
        client.rename_column("items", "region", "area")
        client.append("items", pa.table(row, schema=FIRST))

        batches = client.read_range("items", 0, 0, 2, schema_id=0, page_bytes=1)
        assert [batch.data.schema.names for batch in batches] == [FIRST.names, FIRST.names]
        batches = client.read_range("items", 0, 0, 2, page_bytes=1)
        assert [batch.data.column("area").to_pylist() for batch in batches] == [["eu"], ["eu"]]


def test_a_subscription_keeps_the_schema_it_began_with(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("items", FIRST)
        row = pa.table({"id": [1], "region": ["eu"], "size": [0.5]}, schema=FIRST)
        client.append("items", row)
        batches = client.subscribe("items", start="earliest")
        assert next(batches).data.schema.names == FIRST.names

        client.add_column("items", "note", pa.string())
        client.append("items", row)

        assert next(batches).data.schema.names == FIRST.names
        assert client.fetch("items", 0, 1)[0].data.schema.names == [*FIRST.names, "note"]
