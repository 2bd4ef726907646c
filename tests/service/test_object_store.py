"""A lake on S3: tiering, union reads, other engines, credentials; a store that fails or is slow."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from integration.judges.duckdb_read import connect
from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import StreamhouseError
from tests.support.flaky_proxy import FlakyProxy
from tests.support.object_store import REGION, SECRET_KEY, ObjectStore
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
EXPIRING = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}


def _rows(start: int, end: int) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids]}, schema=SCHEMA)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with ObjectStore() as started:
        yield started


@contextlib.contextmanager
def _service(
    folder: Path, store: ObjectStore, endpoint: str, *more: str
) -> Iterator[ServiceProcess]:
    """A service whose warehouse is a folder of its own in the store behind `endpoint`."""
    arguments = (
        *("--warehouse", f"s3://lake/{folder.name}", "--lake-credentials", "shared"),
        *("--catalog-property", f"s3.endpoint={endpoint}"),
        *("--catalog-property", f"s3.region={REGION}"),
        *("--catalog-property", "s3.connect-timeout=2"),
        *("--catalog-property", "s3.request-timeout=5"),
    )
    with ServiceProcess(folder / "data", *arguments, *more, env=store.environment()) as started:
        yield started


@pytest.mark.parametrize("access", ["direct", "service"])
def test_rows_go_to_the_store_and_come_back(
    tmp_path: Path, store: ObjectStore, access: str
) -> None:
    with (
        _service(tmp_path, store, store.endpoint, "--catalog-access", access) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table("default.t", SCHEMA, bucket_count=2, properties=EXPIRING)
        for start in (0, 1_000):
            client.append("default.t", _rows(start, start + 1_000))
            assert tier_once(client, "default.t") == 1_000
        client.append("default.t", _rows(2_000, 2_100))

        assert sorted(client.read("default.t")["id"].to_pylist()) == list(range(2_100))
        assert any(key.endswith(".parquet") for key in store.keys(tmp_path.name))
        assert not list((tmp_path / "data" / "lake" / "warehouse").rglob("*"))

        # Clients of the REST catalog know neither keys nor endpoint; they come with the table.
        catalog = load_catalog("judge", type="rest", uri=f"{service.endpoint}/iceberg")
        table = catalog.load_table("default.t")
        assert table.scan().to_arrow().num_rows == 2_000
        table.delete("id < 500")
        assert catalog.load_table("default.t").scan().to_arrow().num_rows == 1_500

        duckdb = connect()
        duckdb.execute(
            f"ATTACH 'lake' AS lake (TYPE ICEBERG, ENDPOINT '{service.endpoint}/iceberg',"
            " AUTHORIZATION_TYPE 'none')"
        )
        found = duckdb.execute('SELECT count(*), min(id) FROM lake."default".t').fetchall()
        assert found == [(1_500, 500)]
        assert SECRET_KEY not in service.log_text()


def test_maintenance_packs_files_in_the_store(tmp_path: Path, store: ObjectStore) -> None:
    with (
        _service(tmp_path, store, store.endpoint) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table("default.t", SCHEMA, primary_key=["id"], properties=EXPIRING)
        for number in range(10):
            client.upsert("default.t", _rows(number * 5, number * 5 + 50))
            tier_once(client, "default.t")

        table = load_catalog("judge", type="rest", uri=f"{service.endpoint}/iceberg").load_table(
            "default.t"
        )
        assert len(list(table.scan().plan_files())) < 10
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(95))
        assert sorted(client.read("default.t")["id"].to_pylist()) == list(range(95))


def test_secrets_come_only_to_those_who_ask_for_them(tmp_path: Path, store: ObjectStore) -> None:
    with (
        _service(tmp_path, store, store.endpoint) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table("default.t", SCHEMA)
        client.append("default.t", _rows(0, 10))
        tier_once(client, "default.t")
        uri = f"{service.endpoint}/iceberg"
        silent = {"header.X-Iceberg-Access-Delegation": "remote-signing"}

        asked = load_catalog("a", type="rest", uri=uri).load_table("default.t")
        unasked = load_catalog("b", type="rest", uri=uri, **silent).load_table("default.t")

        assert asked.io.properties["s3.secret-access-key"] == SECRET_KEY
        assert "s3.secret-access-key" not in unasked.io.properties
        assert unasked.io.properties["s3.endpoint"] == store.endpoint
        assert SECRET_KEY not in repr(client.lake_catalog())
        assert SECRET_KEY in pickle.dumps(client.lake_catalog().properties).decode("latin-1")


@pytest.mark.long
def test_a_store_that_fails_loses_nothing_and_repeats_nothing(
    tmp_path: Path, store: ObjectStore
) -> None:
    with (
        FlakyProxy(store.port) as proxy,
        _service(tmp_path, store, proxy.endpoint) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table("default.t", SCHEMA, bucket_count=2)
        client.append("default.t", _rows(0, 500))
        assert tier_once(client, "default.t") == 500

        proxy.is_down = True
        proxy.cut_all()
        # Writing and reading the log do not need the store.
        client.append("default.t", _rows(500, 1_000))
        with pytest.raises(StreamhouseError, match="lake"):
            tier_once(client, "default.t")
        proxy.is_down = False

        # Answers get lost after the store has done its work: at any place in the round.
        for number in range(3):
            client.append("default.t", _rows(1_000 + number, 1_001 + number))
            proxy.answers_to_lose = 1 + number
            with contextlib.suppress(StreamhouseError):
                tier_once(client, "default.t")
            proxy.answers_to_lose = 0
            proxy.cut_all()
        assert proxy.answers_lost > 0
        tier_once(client, "default.t")

        expected = list(range(1_003))
        assert sorted(client.read("default.t")["id"].to_pylist()) == expected
        table = load_catalog("judge", type="rest", uri=f"{service.endpoint}/iceberg")
        found = table.load_table("default.t").scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == expected


def test_a_slow_store_is_waited_for_and_holds_nobody_up(tmp_path: Path, store: ObjectStore) -> None:
    with (
        FlakyProxy(store.port) as proxy,
        _service(tmp_path, store, proxy.endpoint, "--tiering", "embedded") as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        proxy.answer_delay_s = 0.2
        properties = {"table.datalake.freshness": "1s"}
        client.create_table("default.t", SCHEMA, bucket_count=2, properties=properties)
        for start in range(0, 500, 100):
            client.append("default.t", _rows(start, start + 100))

        while sum(client.table_state("default.t").lake.tiered_offsets.values()) < 500:
            client.table_state("default.t", after={0: 10_000, 1: 10_000}, max_wait_ms=200)

        assert sorted(client.read("default.t")["id"].to_pylist()) == list(range(500))
