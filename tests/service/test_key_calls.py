"""The client's calls for primary key tables, one by one, against a real process."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    SchemaMismatchError,
    TableNotFoundError,
    UnsupportedError,
)
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


def test_one_row_is_the_same_alone_and_among_many(tmp_path: Path) -> None:
    keys = ["a", "", "..", "a/b", "100%", "ü", "\0", "x" * 600, "with space", "\U0010ffff+&?#"]
    types = {
        "flag": (pa.bool_(), True),
        "small": (pa.int16(), -(2**15)),
        "ratio": (pa.float32(), 0.1),
        "amount": (pa.float64(), float("inf")),
        "price": (pa.decimal128(20, 10), Decimal("1E-10")),
        "raw": (pa.binary(), b"\0\xff"),
        "day": (pa.date32(), date(1, 1, 1)),
        "at": (pa.timestamp("us", tz="UTC"), datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)),
        "local": (pa.timestamp("us"), datetime(2024, 5, 1, 12)),
        "pairs": (pa.map_(pa.string(), pa.list_(pa.date32())), [("a", [date(2024, 1, 1), None])]),
        "place": (pa.struct([("x", pa.binary()), ("y", pa.float64())]), {"x": b"1", "y": None}),
    }
    fields = [pa.field("k", pa.string(), nullable=False), pa.field("n", pa.int64(), nullable=False)]
    schema = pa.schema([*fields, *(pa.field(name, t) for name, (t, _) in types.items())])
    with ServiceProcess(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("t", schema, primary_key=["k", "n"], bucket_count=4)
        rows = [
            {"k": key, "n": n, **{name: v if n else None for name, (_, v) in types.items()}}
            for key in keys
            for n in (0, 2**63 - 1)
        ]
        client.upsert("t", pa.Table.from_pylist(rows, schema))
        asked = pa.Table.from_pylist(
            [{"k": row["k"], "n": row["n"]} for row in rows], schema=pa.schema(fields)
        )

        found = client.lookup("t", asked).drop_columns(["__found"]).to_pylist()
        alone = [client.lookup_one("t", k=row["k"], n=row["n"]) for row in rows]

        assert [repr(row) for row in alone] == [repr(row) for row in found]
        assert alone == pa.Table.from_pylist(rows, schema).to_pylist()
        assert client.lookup_one("t", k="b", n=0) is None
        with pytest.raises(SchemaMismatchError, match="no bigint; convert it"):
            client.lookup_one("t", k="b", n="one")


def test_a_row_is_never_read_as_a_version_of_its_table_that_is_over(tmp_path: Path) -> None:
    key = pa.field("id", pa.int64(), nullable=False)
    text, day = pa.schema([key, ("v", pa.string())]), pa.schema([key, ("v", pa.date32())])
    with (
        ServiceProcess(tmp_path) as service,
        StorageClient(service.endpoint) as client,
        StorageClient(service.endpoint) as other,
    ):
        client.create_table("t", text, primary_key=["id"])
        client.upsert("t", pa.Table.from_pylist([{"id": 1, "v": "2024-05-01"}], text))
        assert client.lookup_one("t", id=1) == {"id": 1, "v": "2024-05-01"}

        other.drop_column("t", "v", confirm="v")
        other.add_column("t", "v", pa.date32())
        other.upsert("t", pa.Table.from_pylist([{"id": 1, "v": date(2024, 5, 1)}], day))
        assert client.lookup_one("t", id=1) == {"id": 1, "v": date(2024, 5, 1)}

        other.drop_table("t")
        other.create_table("t", text, primary_key=["id"])
        other.upsert("t", pa.Table.from_pylist([{"id": 1, "v": "2024-05-02"}], text))
        assert client.lookup_one("t", id=1) == {"id": 1, "v": "2024-05-02"}


def test_no_row_is_missed_by_a_client_that_is_behind(tmp_path: Path) -> None:
    text = [pa.field(name, pa.string(), nullable=False) for name in ("a", "b")]
    schema = pa.schema([*text, ("v", pa.int64())])
    with (
        ServiceProcess(tmp_path) as service,
        StorageClient(service.endpoint) as client,
        StorageClient(service.endpoint) as other,
    ):
        client.create_table("t", schema, primary_key=["a", "b"], bucket_count=4)
        assert client.lookup_one("t", a="x", b="y") is None

        other.drop_table("t")
        other.create_table("t", schema, primary_key=["b", "a"], bucket_count=4)
        other.upsert("t", pa.Table.from_pylist([{"a": "x", "b": "y", "v": 2}], schema))
        assert client.lookup_one("t", a="x", b="y") == {"a": "x", "b": "y", "v": 2}

        for name, to in (("a", "c"), ("b", "a"), ("c", "b")):
            other.rename_column("t", name, to)
        assert client.lookup_one("t", a="y", b="x") == {"b": "x", "a": "y", "v": 2}
        assert client.lookup_one("t", a="x", b="y") is None

        other.drop_table("t")
        with pytest.raises(TableNotFoundError):
            client.lookup_one("t", a="x", b="y")
        numbers = pa.schema([pa.field("a", pa.int64(), nullable=False), ("v", pa.int64())])
        other.create_table("t", numbers, primary_key=["a"])
        with pytest.raises(SchemaMismatchError, match="takes the key columns"):
            client.lookup_one("t", a="x", b="y")
        assert client.lookup_one("t", a=1) is None


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
