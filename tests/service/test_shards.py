"""`serve --shards 2` as real processes: two shards are one service, and come back one by one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.cli import cli
from streamhouse.client import StorageClient
from tests.support.command_line import streamhouse
from tests.support.in_process_service import EVENTS, event_rows
from tests.support.service_process import DiedAtStart, ServiceProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

_TABLES = ("a", "b", "c", "d")


@contextlib.contextmanager
def _service(tmp_path: Path) -> Iterator[ServiceProcess]:
    journal = f"file://{tmp_path / 'store'}"
    with ServiceProcess(
        tmp_path / "data",
        "--shards",
        "2",
        "--journal",
        journal,
        "--lease-ms",
        "2000",
        is_executed=True,
    ) as service:
        yield service


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _check(tmp_path: Path) -> str:
    """Return the verdict of a check of all shards, which finds nothing."""
    checked = CliRunner().invoke(cli, ["check", "--journal", f"file://{tmp_path / 'store'}"])
    assert checked.exit_code == 0, checked.output
    return checked.output.splitlines()[-1]


def _wait_gone(pids: list[int]) -> None:
    # A process that is not a child of this one cannot be waited for.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"{pids} end")


def _ids(client: StorageClient, table: str) -> list[int]:
    end = client.positions(table)[0].high_watermark
    batches = client.read_range(table, 0, 0, end)
    return [i for batch in batches for i in batch.data.column("id").to_pylist()]


def _write(client: StorageClient, start: int) -> None:
    for table in _TABLES:
        client.append(table, pa.Table.from_batches([event_rows(start, start + 10)], EVENTS))


def test_two_shards_are_one_service(tmp_path: Path) -> None:
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        for table in _TABLES:
            client.create_table(table, EVENTS)
        shards = client.shards()
        assert [(s["shard"], s["is_live"], s["table_count"]) for s in shards] == [
            ("0", True, 2),
            ("1", True, 2),
        ]
        _write(client, 0)
        assert client.list_tables() == [f"default.{table}" for table in _TABLES]
        assert len(client.status()["tables"]) == 4
        shown = CliRunner().invoke(cli, ["shards", "--endpoint", service.endpoint])
        assert shown.exit_code == 0, shown.output
        for shard in shards:
            assert shard["endpoint"] in shown.output
            assert shard["journal"]["lease_left_ms"] > 0
        picture = CliRunner().invoke(cli, ["top", "--once", "--endpoint", service.endpoint])
        assert "shard" in picture.output
        assert "2 shards, 4 names" in _check(tmp_path)

        # A client that knows one shard only finds the tables of the other.
        for shard in shards:
            with StorageClient(shard["endpoint"]) as other:
                assert [_ids(other, table) for table in _TABLES] == [list(range(10))] * 4

        children = _children(service.pid)
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        _write(client, 10)
        assert [_ids(client, table) for table in _TABLES] == [list(range(20))] * 4

        children = _children(service.pid)
        assert service.terminate() == 0
        _wait_gone(children)

    assert "2 shards, 4 names" in _check(tmp_path)
    # What a machine has lost is in the journal.
    shutil.rmtree(tmp_path / "data" / "shards" / "1")
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        assert [_ids(client, table) for table in _TABLES] == [list(range(20))] * 4
        client.drop_table("a")
        client.create_table("a", EVENTS)


def test_each_shard_is_backed_up_whoever_is_asked(tmp_path: Path) -> None:
    root = tmp_path / "data"
    directories = {shard: root / "shards" / shard for shard in ("0", "1")}
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        for table in _TABLES:
            client.create_table(table, EVENTS)
        _write(client, 0)
        endpoints = {shard["shard"]: shard["endpoint"] for shard in client.shards()}
        shard_of = {table["table"]: table["shard"] for table in client.status()["tables"]}
        backed_up: list[str] = []
        for own, other in ("0", "1"), ("1", "0"):
            # The shared address may be anybody's, so the test asks the wrong one for sure.
            for name, asked in ("other", endpoints[other]), ("shared", service.endpoint):
                backup = tmp_path / "backups" / name / own
                streamhouse(
                    "backup", "--data-dir", directories[own], "--to", backup, "--endpoint", asked
                )
                streamhouse("restore", "--from", backup)
                tables = json.loads((backup / "manifest.json").read_text())["tables"]
                assert len(tables) == 2
                assert {shard_of[table] for table in tables} == {own}
                assert list(backup.glob("tables/*/*"))
            backed_up += tables
        assert sorted(backed_up) == [f"default.{table}" for table in _TABLES]
        for directory in directories.values():
            assert not (directory / "backup.staged").exists()

        whole = ("backup", "--data-dir", root, "--to", tmp_path / "whole")
        refused = streamhouse(*whole, "--endpoint", service.endpoint, expect=1).stderr
        for directory in directories.values():
            assert f"--data-dir {directory} " in refused

    again = tmp_path / "again"
    for shard in directories:
        backup = tmp_path / "backups" / "other" / shard
        streamhouse("restore", "--from", backup, "--data-dir", again / "data" / "shards" / shard)
    with _service(again) as service, StorageClient(service.endpoint) as client:
        assert [_ids(client, table) for table in _TABLES] == [list(range(10))] * 4
        assert {table["table"]: table["shard"] for table in client.status()["tables"]} == shard_of


def test_a_service_becomes_the_first_of_several_shards(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service, StorageClient(service.endpoint) as client:
        for table in _TABLES:
            client.create_table(table, EVENTS)
        _write(client, 0)
        ids = {client.describe_table(table).table_id for table in _TABLES}
        assert client.shards() == []
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        assert [s["table_count"] for s in client.shards()] == [4, 0]
        _write(client, 10)
        assert [_ids(client, table) for table in _TABLES] == [list(range(20))] * 4
        assert {client.describe_table(table).table_id for table in _TABLES} == ids
        # Its directory has the others' below it, and is not theirs.
        first = ("backup", "--data-dir", tmp_path / "data", "--to", tmp_path / "backups" / "first")
        done = streamhouse(*first, "--endpoint", service.endpoint)
        assert f"--data-dir {tmp_path / 'data' / 'shards' / '1'} " in done.stderr
        manifest = json.loads((tmp_path / "backups" / "first" / "manifest.json").read_text())
        assert len(manifest["tables"]) == 4
        client.create_table("e", EVENTS)
        assert client.describe_table("e").table_id not in ids
        assert [s["table_count"] for s in client.shards()] == [4, 1]


def test_a_service_with_a_journal_is_one_shard(tmp_path: Path) -> None:
    journal = f"file://{tmp_path / 'store'}"
    with ServiceProcess(tmp_path / "data", "--journal", journal, is_executed=True) as service:
        shown = CliRunner().invoke(cli, ["shards", "--endpoint", service.endpoint])
        assert shown.exit_code == 0, shown.output
        assert service.endpoint in shown.output
        with StorageClient(service.endpoint) as client:
            (shard,) = client.shards()
        assert shard["shard"] == "0"
        assert shard["journal"]["checkpoint_age_ms"] >= 0


def test_shards_whose_supervisor_is_gone_stop(tmp_path: Path) -> None:
    with _service(tmp_path) as service:
        children = _children(service.pid)
        assert len(children) == 2
        service.kill()
        _wait_gone(children)
    # Nobody holds the directories: they start again at once.
    with _service(tmp_path) as service, StorageClient(service.endpoint) as client:
        assert client.list_tables() == []


def test_shards_need_a_journal(tmp_path: Path) -> None:
    with pytest.raises(DiedAtStart, match="--shards needs --journal"):
        ServiceProcess(tmp_path, "--shards", "2").__enter__()
