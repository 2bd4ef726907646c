"""The versions of a table's commits increase, whatever the table goes on from.

Each time the new service's clock is hours behind the former one's.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.core.errors import OffsetOutOfRangeError
from tests.support.adoption_world import Lake
from tests.support.command_line import streamhouse
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import run_due, tier_once

pytestmark = pytest.mark.slow

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
_FULL_HISTORY = {"table.datalake.changelog": "true"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AHEAD, _BEHIND = 5 * 3_600, -5 * 3_600


def _clocked(folder: Path, name: str, ahead_s: int) -> Sequence[str]:
    """Return the command of a service whose clock is so much ahead."""
    clock = folder / f"clock-{name}"
    clock.write_text(str(ahead_s))
    return ("-m", "tests.support.clocked_service", str(clock))


def _write(client: StreamhouseClient, value: int) -> None:
    """Commit to each table twice: in all buckets, and deletes of some rows."""
    rows = pa.table({"id": range(20), "v": [value] * 20}, schema=_SCHEMA)
    client.append("d.log", rows)
    client.upsert("d.keys", rows)
    with client.begin_transaction("d.log") as transaction:
        transaction.commit([transaction.stage(rows)])
    client.delete("d.keys", rows.select(["id"]).slice(0, 10))


def _versions(client: StreamhouseClient, table: str, **options: Any) -> list[int]:
    rows = client.read(f"{table}$changes", columns=["_commit_version"], **options)
    return sorted(set(rows.column("_commit_version").to_pylist()))


def _check_later(client: StreamhouseClient, before: dict[str, list[int]]) -> None:
    """Commit on; every version is later than those before, and a bound keeps them apart."""
    _write(client, 99)
    for table, versions in before.items():
        after = _versions(client, table, startingVersion=versions[-1] + 1)
        assert len(after) == 2
        assert _versions(client, table) == versions + after


def _filled(client: StreamhouseClient) -> dict[str, list[int]]:
    client.create_table("d.log", _SCHEMA, bucket_count=3)
    client.create_table(
        "d.keys", _SCHEMA, primary_key=["id"], bucket_count=3, properties=_FULL_HISTORY
    )
    for value in range(3):
        _write(client, value)
    return {table: _versions(client, table) for table in ("d.log", "d.keys")}


def test_a_restored_backup_and_a_restart(tmp_path: Path) -> None:
    ahead = _clocked(tmp_path, "ahead", _AHEAD)
    behind = _clocked(tmp_path, "behind", _BEHIND)
    with (
        ServiceProcess(tmp_path / "a", command=ahead) as service,
        StreamhouseClient(service.endpoint) as client,
    ):
        before = _filled(client)
        assert service.terminate() == 0
    streamhouse("backup", "--data-dir", tmp_path / "a", "--to", tmp_path / "backup")
    streamhouse("restore", "--from", tmp_path / "backup", "--data-dir", tmp_path / "b")
    for name in ("a", "b"):
        with (
            ServiceProcess(tmp_path / name, command=behind) as service,
            StreamhouseClient(service.endpoint) as client,
        ):
            _check_later(client, before)


@pytest.mark.parametrize("is_standby", [True, False])
def test_a_takeover_by_the_journal(tmp_path: Path, is_standby: bool) -> None:
    journal = ["--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", "1500"]
    ahead = _clocked(tmp_path, "ahead", _AHEAD)
    behind = _clocked(tmp_path, "behind", _BEHIND)
    more = ["--standby"] if is_standby else []
    successor = ServiceProcess(tmp_path / "b", *journal, *more, command=behind)
    with ServiceProcess(tmp_path / "a", *journal, command=ahead) as owner:
        with StreamhouseClient(owner.endpoint) as client:
            before = _filled(client)
        if is_standby:
            successor.__enter__()
        owner.kill()
        shutil.rmtree(tmp_path / "a")
    try:
        if is_standby:
            successor.wait_ready()
        else:
            successor.__enter__()
        with StreamhouseClient(successor.endpoint) as client:
            _check_later(client, before)
    finally:
        successor.__exit__(None, None, None)


def test_an_adopted_lake(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    with lake.service("a", command=_clocked(tmp_path, "ahead", _AHEAD)) as (_, client):
        before = _filled(client)
        tier_once(client)
    lake.lose("a")
    with lake.service("b", command=_clocked(tmp_path, "behind", _BEHIND)) as (_, client):
        client.create_database("d")
        for table, versions in before.items():
            client.adopt_table(table, force=True)
            assert _versions(client, table) == versions
        _check_later(client, before)
        # By time, too: no row of the new log is before the adopted ones.
        later = _EPOCH + timedelta(microseconds=before["d.log"][-1] + 1)
        assert client.count("d.log", startingTimestamp=later.isoformat()) == 40


def _check_refused(client: StreamhouseClient, versions: Sequence[int]) -> None:
    """The first two of three versions are past their time to live."""
    refused = rf"up to version {versions[1]} by table.datalake.ttl"
    bounds: list[dict[str, Any]] = [
        {},
        {"startingVersion": versions[0]},
        {"startingVersion": versions[1]},
    ]
    for options in bounds:
        for read in (client.read, client.count):
            with pytest.raises(OffsetOutOfRangeError, match=refused):
                read("d.aged$changes", **options)
    assert _versions(client, "d.aged", startingVersion=versions[1] + 1) == [versions[2]]
    assert _versions(client, "d.aged", startingOffsets="earliest") == [versions[2]]


def test_versions_whose_rows_left_the_lake_are_refused(tmp_path: Path) -> None:
    """Wherever the table goes on: after a restart, a takeover, a restored backup, an adoption."""
    lake = Lake(tmp_path / "lake")
    journal = ("--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", "1500")
    behind = _clocked(tmp_path, "behind", _BEHIND)
    with lake.service("a", options=journal, command=behind) as (service, client):
        client.create_table("d.aged", _SCHEMA, bucket_count=3)
        rows = pa.table({"id": range(20), "v": [1] * 20}, schema=_SCHEMA)
        for _ in range(2):
            client.append("d.aged", rows)
        tier_once(client)
        assert service.terminate() == 0
    with lake.service("a", options=journal) as (service, client):
        client.append("d.aged", rows)
        versions = _versions(client, "d.aged")
        # The rows of before are five hours old for the worker, too.
        client.alter_properties("d.aged", updates={"table.datalake.ttl": "4h"})
        tier_once(client)
        run_due(client)
        _check_refused(client, versions)
        service.kill()
    with lake.service("a", options=journal) as (_, client):
        _check_refused(client, versions)
    lake.lose("a")
    with lake.service("b", options=journal) as (service, client):
        _check_refused(client, versions)
        assert service.terminate() == 0
    streamhouse("backup", "--data-dir", tmp_path / "lake" / "b", "--to", tmp_path / "backup")
    streamhouse("restore", "--from", tmp_path / "backup", "--data-dir", tmp_path / "lake" / "c")
    with lake.service("c") as (_, client):
        _check_refused(client, versions)
    lake.lose("c")
    with lake.service("d") as (_, client):
        client.create_database("d")
        client.adopt_table("d.aged", force=True)
        _check_refused(client, versions)
