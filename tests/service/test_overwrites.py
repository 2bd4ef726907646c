"""A log table of a running service that is overwritten: both tiers, restarts, stock pyiceberg."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

import streamhouse
from streamhouse.client import StorageClient, TieringIdle
from streamhouse.core.errors import OffsetOutOfRangeError
from tests.support.command_line import streamhouse as streamhouse_command
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


def _rows(*ids: int) -> pa.Table:
    return pa.table({"id": list(ids)}, SCHEMA)


def _ids(client: streamhouse.StreamhouseClient, name: str = "events") -> list[int]:
    return sorted(client.read(name).column("id").to_pylist())


@contextlib.contextmanager
def _served(directory: Path) -> Iterator[streamhouse.StreamhouseClient]:
    with (
        ServiceProcess(directory) as service,
        streamhouse.StreamhouseClient(service.endpoint) as client,
    ):
        yield client


def _in_lake(client: streamhouse.StreamhouseClient, part: str = "") -> list[int]:
    described = client.lake_catalog()
    catalog = load_catalog(described.name, **described.properties)
    found = catalog.load_table(f"default.events{part}").scan(selected_fields=("id",)).to_arrow()
    return sorted(found.column("id").to_pylist())


def _create(client: streamhouse.StreamhouseClient, properties: dict[str, str]) -> None:
    """Make the table with the rows 0 to 19."""
    client.create_table("events", SCHEMA, bucket_count=2, bucket_key=["id"], properties=properties)
    client.append("events", _rows(*range(20)))


def _overwrite(client: streamhouse.StreamhouseClient, *parts: pa.Table) -> None:
    with client.begin_transaction("events", operation="overwrite") as transaction:
        transaction.commit([transaction.stage(part) for part in parts])


@pytest.mark.parametrize(
    "properties",
    [{}, {"table.datalake.batch-layout.sort": "id"}, {"table.datalake.ttl": "1h"}],
    ids=["plain", "batch-layout", "ttl"],
)
def test_an_overwritten_log_table_in_both_tiers_and_after_restarts(
    tmp_path: Path, properties: dict[str, str]
) -> None:
    with _served(tmp_path) as client:
        _create(client, properties)
        tier_once(client, "events")
        client.append("events", _rows(20, 21))
        old = client.positions("events")

        _overwrite(client, _rows(30), _rows(31, 32))

        assert _ids(client) == [30, 31, 32]
        assert _ids(client, "events$lake") == []
        assert _in_lake(client) == list(range(20))
        for bucket, at in client.positions("events").items():
            assert at.truncated_offset == at.log_start_offset == old[bucket].high_watermark
            with pytest.raises(OffsetOutOfRangeError):
                list(client.read_range("events", bucket, 0, at.high_watermark))
    streamhouse_command("check", "--data-dir", tmp_path, "--lake-rows")

    with _served(tmp_path) as client:
        assert _ids(client) == [30, 31, 32]
        tier_once(client, "events")
        assert _ids(client) == _ids(client, "events$lake") == _in_lake(client) == [30, 31, 32]
        assert _in_lake(client, "$batch" if "batch" in str(properties) else "") == [30, 31, 32]
        assert sorted(client.read("events", where="id > 30").column("id").to_pylist()) == [31, 32]
        assert isinstance(StorageClient.of(client).claim_tiering("idle"), TieringIdle)

        _overwrite(client)
        assert _ids(client) == []
        tier_once(client, "events")
        assert _ids(client) == _in_lake(client) == []
        assert isinstance(StorageClient.of(client).claim_tiering("idle"), TieringIdle)
        client.append("events", _rows(40))
        assert _ids(client) == [40]
        tier_once(client, "events")
        assert _ids(client) == _in_lake(client) == [40]
    streamhouse_command("check", "--data-dir", tmp_path, "--lake-rows")


@pytest.mark.parametrize("properties", [{}, {"table.datalake.batch-layout.sort": "id"}])
def test_a_table_that_is_emptied_before_its_first_round_has_nothing_to_tier(
    tmp_path: Path, properties: dict[str, str]
) -> None:
    with _served(tmp_path) as client:
        _create(client, properties)
        _overwrite(client)

        # It once waited for two minutes to claim a table that the service had nothing of.
        assert tier_once(client, "events") == 0

        assert client.table_state("events").lake.snapshot_id is None
        assert _ids(client) == []
