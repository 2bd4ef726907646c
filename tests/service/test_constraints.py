"""Constraints and clients: rejected rows, replays, producers, rows in the lake, and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import Producer, StorageClient
from streamhouse.core.errors import CheckFailedError
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("size", pa.int64())])
CHECK = {"table.check.small": "size <= 100"}


def _rows(*sizes: int | None) -> pa.Table:
    return pa.table({"id": range(len(sizes)), "size": list(sizes)}, schema=SCHEMA)


def _reasons(client: StreamhouseClient, path: str) -> list[Any]:
    return client.read(f"{path}$rejected")["reason"].to_pylist()


@pytest.mark.parametrize("path", ["events", "keys"])
def test_clients_and_producers_reject_what_breaks_a_constraint(
    service: ServiceProcess, path: str
) -> None:
    key = ("id",) if path == "keys" else ()
    with StreamhouseClient(service.endpoint) as client:
        client.create_table(path, SCHEMA, primary_key=key, bucket_count=3, properties=CHECK)
        write = client.upsert if key else client.append
        with pytest.raises(CheckFailedError, match=r"'small', CHECK \(size <= 100\): size = 101"):
            write(path, _rows(5, 101, None))
        assert client.read(path).num_rows == 0

        write(path, _rows(5, 101, None), on_error="reject")
        with Producer(
            client, path, operation="upsert" if key else "append", on_error="reject"
        ) as producer:
            producer.send(pa.table({"id": [7, 8], "size": [102, 8]}, schema=SCHEMA))

        assert sorted(client.read(path)["id"].to_pylist()) == [0, 2, 8]
        shown = "breaks constraint 'small', CHECK (size <= 100): size ="
        assert sorted(_reasons(client, path)) == [f"{shown} 101", f"{shown} 102"]
        # Rows that still break it stay, and the others move.
        fixed = client.replay_rejected(
            path, fix=lambda row: row if row["id"] == 7 else {**row, "size": 100}
        )
        assert (fixed.moved, fixed.left) == (1, 1)
        assert sorted(client.read(path)["id"].to_pylist()) == [0, 1, 2, 8]
        assert _reasons(client, path) == [f"{shown} 102"]


def test_rows_in_the_lake_are_checked_and_a_restart_judges_nothing(tmp_path: Path) -> None:
    short = {"table.log.ttl": "1ms", "table.log.segment-bytes": "64kb"}
    options = ("--retention-interval-ms", "20")
    with (
        ServiceProcess(tmp_path, *options) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        client.create_table("old", SCHEMA, properties=short)
        many = pa.table({"id": range(20_000), "size": range(20_000)}, schema=SCHEMA)
        client.append("old", many)
        client.append("old", many)
        storage = StorageClient.of(client)
        while storage.positions("old")[0].log_start_offset < 10_000:
            client.append("old", many.slice(0, 1))
            tier_once(client, "old")

        with pytest.raises(CheckFailedError, match="39798 of its rows break constraint 'small'"):
            client.alter_properties("old", updates=CHECK)
        client.alter_properties("old", updates={"table.check.positive": "size >= 0"})
        existing = {"table.check.small.existing": "not enforced"}
        client.alter_properties("old", updates=CHECK | existing)

        client.create_table("keys", SCHEMA, primary_key=("id",))
        client.upsert("keys", _rows(500))
        client.alter_properties("keys", updates=CHECK | existing)
        service.kill()
    with ServiceProcess(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        assert client.read("keys").to_pylist() == [{"id": 0, "size": 500}]
        assert client.read("old").num_rows >= 40_000
        for path in ("old", "keys"):
            write = client.upsert if path == "keys" else client.append
            with pytest.raises(CheckFailedError):
                write(path, _rows(101))
            write(path, _rows(100))
