"""The client's calls for primary key tables, one by one, against a real process."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StreamhouseClient
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import SchemaMismatchError, UnsupportedError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

SCHEMA = pa.schema(
    [
        pa.field("region", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("tags", pa.list_(pa.string())),
    ]
)
KEY = ("region", "id")


def test_merge_engines_end_to_end(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("version", pa.int32()),
            pa.field("name", pa.string()),
        ]
    )
    writes = [
        [{"id": 1, "version": 2, "name": "b"}],
        [{"id": 1, "version": 1, "name": "a"}],
        [{"id": 1, "version": 3, "name": None}],
    ]
    engines = {
        "first_row": ({}, {"id": 1, "version": 2, "name": "b"}),
        "versioned": (
            {"table.merge-engine.versioned.ver-column": "version"},
            {"id": 1, "version": 3, "name": None},
        ),
        "aggregation": (
            {"fields.version.agg": "sum", "fields.name.agg": "listagg"},
            {"id": 1, "version": 6, "name": "b,a"},
        ),
    }
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        for engine, (properties, expected) in engines.items():
            client.create_table(
                engine,
                schema,
                primary_key=["id"],
                properties={"table.merge-engine": engine, **properties},
            )
            for rows in writes:
                client.upsert(engine, pa.Table.from_pylist(rows, schema))

            assert client.lookup_one(engine, id=1) == expected
        ids = pa.table({"id": pa.array([1], pa.int64())})
        with pytest.raises(UnsupportedError, match="takes whole rows, no partial updates"):
            client.upsert("first_row", ids, columns=["id"])


def test_the_client_says_what_is_wrong_before_and_after_sending(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=KEY)
        client.create_table("plain", SCHEMA)
        row = {"region": "eu", "id": 1, "name": "a", "score": 1.0, "tags": None}
        rows = pa.Table.from_pylist([row], SCHEMA)

        with pytest.raises(UnsupportedError, match=r"'default\.plain' has no primary key"):
            client.upsert("plain", rows)
        with pytest.raises(UnsupportedError, match="upsert rows instead of appending"):
            client.append("t", rows)
        with pytest.raises(SchemaMismatchError, match="lookup_one takes the key columns"):
            client.lookup_one("t", id=1)
        with pytest.raises(SchemaMismatchError, match="'region'"):
            client.delete("t", pa.table({"id": [1]}))
        with pytest.raises(SchemaMismatchError, match="column 'region' must not be null"):
            client.upsert("t", rows.set_column(0, "region", pa.array([None], pa.string())))
        assert client.count("t") == 0


def test_prefix_lookups_find_rows_of_every_bucket_in_key_order(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        rows = [
            {"region": region, "id": number, "name": None, "score": None, "tags": None}
            for number in range(30)
            for region in ("us", "eu")
        ]
        for path, bucket_key in (("spread", ()), ("together", ("region",))):
            client.create_table(
                path, SCHEMA, primary_key=KEY, bucket_count=4, bucket_key=bucket_key
            )
            client.upsert(path, pa.Table.from_pylist(rows, SCHEMA))

            found = client.prefix_lookup(
                path, pa.table({"region": ["us", "xx", "eu"]}), limit=10, columns=["region", "id"]
            )

            expected = [(region, number) for region in ("us", "eu") for number in range(10)]
            assert [tuple(row.values()) for row in found.to_pylist()] == expected


def test_the_rows_are_read_as_a_whole_too(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=KEY)

        assert client.read("t").num_rows == 0


def test_dictionary_columns_and_chunks_are_sent_plain(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", SCHEMA, primary_key=KEY, bucket_count=2)
        regions = pa.chunked_array([pa.array(["eu", "us"]).dictionary_encode()] * 2)
        nulls = pa.nulls(4, pa.string())
        rows = pa.table(
            {
                "id": pa.array([1, 2, 3, 4], pa.int64()),
                "region": regions,
                "name": nulls,
                "score": nulls.cast(pa.float64()),
                "tags": pa.nulls(4, SCHEMA.field("tags").type),
            }
        )

        client.upsert("t", rows)

        found = client.lookup("t", rows.select(["id", "region"]), columns=["id"])
        assert found.column("id").to_pylist() == [1, 2, 3, 4]
        assert client.lookup("t", rows.select(["id", "region"]).slice(0, 0)).num_rows == 0
