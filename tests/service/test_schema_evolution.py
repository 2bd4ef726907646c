"""A log table that changes its schema between rounds: every reader sees the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import InvalidSchemaError, UnsupportedError
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
        client.append("items", pa.table(row, schema=FIRST), schema_id=0)

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


KEYED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("amount", pa.int32()),
    ]
)


def _found(client: StreamhouseClient, count: int) -> list[dict[str, Any]]:
    """Rows 0 to `count` by lookup of many, each equal to the lookup of one and to its URL."""
    keys = pa.table({"id": range(count)}, schema=pa.schema([KEYED.field("id")]))
    rows = client.lookup("accounts", keys).drop(["__found"]).to_pylist()
    assert [client.lookup_one("accounts", id=i) for i in range(count)] == rows
    found: list[dict[str, Any]] = rows
    return found


def _checked(client: StreamhouseClient, expected: list[dict[str, Any]]) -> None:
    assert _found(client, len(expected)) == expected
    assert client.read("accounts").sort_by("id").to_pylist() == expected
    assert client.count("accounts") == len(expected)


def test_a_primary_key_table_changes_its_schema_and_rows_of_all_versions_are_one(
    tmp_path: Path,
) -> None:
    def upsert(client: StreamhouseClient, *rows: dict[str, Any]) -> int:
        schema = client.describe_table("accounts").schema.to_arrow()
        spans = client.upsert("accounts", pa.Table.from_pylist(list(rows), schema=schema))
        return sum(end - start for start, end in spans.values())

    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("accounts", KEYED, primary_key=["id"], bucket_count=2)
        upsert(client, *({"id": i, "name": f"n{i}", "amount": i} for i in range(6)))
        tier_once(client)
        client.alter_schema(
            "accounts",
            [
                {"widen": "amount", "to": "bigint"},
                {"rename": "name", "to": "title"},
                {"add": "note", "type": {"type": "array", "element": "string"}, "after": "id"},
            ],
        )
        rows = [{"id": i, "note": None, "title": f"n{i}", "amount": i} for i in range(6)]
        _checked(client, rows)

        # A row that is the same in the new version is no change.
        assert upsert(client, rows[0]) == 0
        rows[1] = {"id": 1, "note": ["x"], "title": "t1", "amount": 1 << 40}
        assert upsert(client, rows[1]) == 2
        # A writer of the first version; it cannot say anything of the new column.
        old = pa.Table.from_pylist([{"id": 2, "name": "old", "amount": 5}], schema=KEYED)
        client.upsert("accounts", old, schema_id=0)
        rows[2] = {"id": 2, "note": None, "title": "old", "amount": 5}
        client.upsert(
            "accounts",
            pa.table({"id": pa.array([3]), "amount": pa.array([33])}),
            columns=["id", "amount"],
        )
        rows[3]["amount"] = 33
        _checked(client, rows)
        service.kill()

    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        # Replayed: changes of both versions.
        _checked(client, rows)
        tier_once(client)
        _checked(client, rows)
        catalog = client.lake_catalog()
        lake = load_catalog(catalog.name, **catalog.properties).load_table("default.accounts")
        found = lake.scan().to_arrow().sort_by("id").select(["id", "note", "title", "amount"])
        assert found.to_pylist() == rows
        client.drop_column("accounts", "note", confirm="note")
        rows = [{name: row[name] for name in ("id", "title", "amount")} for row in rows]
        _checked(client, rows)

    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        _checked(client, rows)
        changes = [
            batch.data.drop_columns(["__retracts"]).to_pylist()
            for bucket, at in client.positions("accounts").items()
            for batch in client.read_range("accounts", bucket, 0, at.high_watermark)
        ]
        assert {tuple(change) for batch in changes for change in batch} == {
            ("id", "title", "amount", "__change_type")
        }


def test_a_schema_does_not_change_under_an_open_transaction_of_a_primary_key_table(
    tmp_path: Path,
) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("accounts", KEYED, primary_key=["id"])
        transaction = client.begin_transaction("accounts", operation="upsert")
        with pytest.raises(UnsupportedError, match="while 1 transactions are open"):
            client.add_column("accounts", "note", pa.string())
        transaction.abort()
        assert client.add_column("accounts", "note", pa.string()).schema_id == 1


def test_the_lake_is_partitioned_otherwise_from_the_next_round_on(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("items", FIRST, primary_key=["id"], partitioned_by=["bucket(4, id)"])
        rows: list[dict[str, Any]] = []

        def write(number: int, region: str) -> None:
            rows.append({"id": number, "region": region, "size": 0.5})
            client.upsert("items", pa.Table.from_pylist(rows[-1:], schema=FIRST))
            tier_once(client)

        write(1, "eu")
        client.alter_partitioning("items", ["region"])
        write(2, "us")
        client.alter_partitioning("items", ["bucket(8, id)"])
        write(3, "eu")
        client.alter_partitioning("items", ["bucket(4, id)"])
        # A row that lies in a file of another spec is replaced.
        rows[1] = {"id": 2, "region": "zz", "size": 0.5}
        client.upsert("items", pa.Table.from_pylist(rows[1:2], schema=FIRST))
        tier_once(client)

        assert _rows(client) == rows
        assert _lake_rows(client) == rows
        assert _rows(client, where="region = 'eu'") == [rows[0], rows[2]]
        catalog = client.lake_catalog()
        lake = load_catalog(catalog.name, **catalog.properties).load_table("default.items")
        assert len(lake.metadata.partition_specs) == 3
        assert [str(field.transform) for field in lake.spec().fields] == ["bucket[4]", "bucket[1]"]
        with pytest.raises(InvalidSchemaError, match="does not fit column 'region'"):
            client.alter_partitioning("items", ["day(region)"])

        # A spec of the past still needs the column that it partitioned by, and has its name.
        client.drop_column("items", "region", confirm="region")
        for name in ("region", "Region", "id_bucket"):
            with pytest.raises(InvalidSchemaError, match=f"no column can be called '{name}'"):
                client.add_column("items", name, pa.int64())
        with pytest.raises(InvalidSchemaError, match="no column can be called 'region'"):
            client.rename_column("items", "size", "region")
        client.add_column("items", "area", pa.int64())
        rows = [{"id": row["id"], "size": 0.5, "area": None} for row in rows]
        rows.append({"id": 4, "size": 1.5, "area": 7})
        schema = client.describe_table("items").schema.to_arrow()
        client.upsert("items", pa.Table.from_pylist(rows[-1:], schema=schema))
        tier_once(client)

        assert _rows(client) == rows
        assert _rows(client, where="area = 7") == rows[-1:]
        assert [{n: row[n] for n in schema.names} for row in _lake_rows(client)] == rows
