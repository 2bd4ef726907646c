"""Rejected rows and positions of readers over a lost machine, tiering, a backup and two replays."""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli import cli
from streamhouse.core.errors import StreamhouseError
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("size", pa.int32())])


def _pair(number: int) -> pa.Table:
    """Return a row that fits and one that does not."""
    return pa.table({"id": pa.array([number] * 2, pa.int64()), "size": ["1", "x"]})


def _ids(client: StreamhouseClient, path: str) -> list[int]:
    return sorted(client.read(path)["id"].to_pylist())


def _rejected(client: StreamhouseClient) -> list[int]:
    rows = client.read("events$rejected")["row"].to_pylist()
    return sorted(json.loads(row)["id"] for row in rows)


def test_a_lost_machine_leaves_both_kinds_once_and_readers_where_they_were(tmp_path: Path) -> None:
    def start(name: str, *arguments: str) -> ServiceProcess:
        journal = ["--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", "1500"]
        return ServiceProcess(tmp_path / name, *journal, *arguments)

    told: list[int] = []
    with (
        start("one") as owner,
        start("two", "--standby") as standby,
        StreamhouseClient(f"{owner.endpoint},{standby.endpoint}") as client,
        ThreadPoolExecutor(1) as threads,
    ):
        client.create_table("events", SCHEMA)
        client.append("events", _pair(0), on_error="reject")
        client.report_position("events", "billing", {0: 1})

        def write() -> None:
            for number in itertools.count(1):
                client.append("events", _pair(number), on_error="reject")
                told.append(number)
                if is_over:
                    return

        is_over: list[bool] = []
        writing = threads.submit(write)
        while len(told) < 5:
            assert not writing.done(), writing.exception()
        owner.kill()
        shutil.rmtree(tmp_path / "one")
        standby.wait_ready()
        before = len(told)
        while len(told) < before + 3:
            assert not writing.done(), writing.exception()
        is_over.append(True)
        writing.result()

        assert _ids(client, "events") == _rejected(client) == [0, *told]
        [reader] = client.consumers("events")
        assert (reader["name"], reader["offsets"]) == ("billing", {"0": 1})
        assert reader["lag_rows"] == len(told)


def test_rejected_rows_are_tiered_backed_up_and_replayed_once(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        client.create_table("events", SCHEMA, properties={"table.datalake.enabled": "true"})
        for number in range(3):
            client.append("events", _pair(number), on_error="reject")
        assert tier_once(client) == 6
        client.append("events", _pair(3), on_error="reject")
        assert _ids(client, "events") == _rejected(client) == [0, 1, 2, 3]
        where = ["--data-dir", str(data), "--to", str(backup), "--endpoint", service.endpoint]
        done = CliRunner().invoke(cli, ["backup", *where, "--with-lake"])
        assert done.exit_code == 0, done.output
    shutil.rmtree(data)
    done = CliRunner().invoke(cli, ["restore", "--from", str(backup), "--data-dir", str(data)])
    assert done.exit_code == 0, done.output
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        with ThreadPoolExecutor(2) as threads:
            replays = [
                threads.submit(client.replay_rejected, "events", fix=lambda row: row | {"size": 2})
                for _ in range(2)
            ]
            moved = sum(replay.result().moved for replay in replays)
        assert moved == 4
        assert _ids(client, "events") == [0, 0, 1, 1, 2, 2, 3, 3]
        assert _rejected(client) == []
        client.drop_table("events")
        client.create_table("events", SCHEMA)
        with pytest.raises(StreamhouseError):
            _rejected(client)
