"""Live tables of services that are killed, taken over and moved: loaded cuts stay, then go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import RESTError
from pyiceberg.table import StaticTable, Table
from requests import RequestException

from streamhouse.cli import cli
from streamhouse.client import StorageClient
from streamhouse.core.errors import StreamhouseError
from streamhouse.lake.files.live_folders import READABLE_S
from tests.support.in_process_service import EVENTS, event_rows
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def _rows(start: int, end: int) -> pa.Table:
    return pa.Table.from_batches([event_rows(start, end)], EVENTS)


def _loaded(endpoint: str, table: str) -> Table:
    with contextlib.closing(
        load_catalog("live", type="rest", uri=f"{endpoint}/iceberg", warehouse="live")
    ) as catalog:
        return catalog.load_table(f"default.{table}")


def _ids(table: Table) -> list[int]:
    return sorted(table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())


def _read_again(table: Table) -> list[int]:
    return _ids(StaticTable.from_metadata(table.metadata_location))


def _folders(lake: Path) -> set[Path]:
    return set(lake.glob("warehouse/*/*/*/live/*"))


def test_a_killed_service_leaves_nothing_and_takes_nothing(tmp_path: Path) -> None:
    clock, data = tmp_path / "clock", tmp_path / "data"
    command = ("-m", "tests.support.clocked_service", str(clock))
    ends = {"log": 0, "keys": 0}
    is_killed, stale = threading.Event(), list[str]()
    with (
        ServiceProcess(data, command=command) as service,
        StorageClient(service.endpoint) as client,
    ):
        client.create_table("log", EVENTS, bucket_count=2)
        client.create_table("keys", EVENTS, primary_key=["id"])
        client.append("log", _rows(0, 10))
        client.upsert("keys", _rows(0, 10))
        tier_once(client)
        ends = dict.fromkeys(ends, 10)
        loaded = {table: _loaded(service.endpoint, table) for table in ends}

        def write() -> None:
            with (
                contextlib.suppress(StreamhouseError),
                StorageClient(service.endpoint, timeout_s=1) as writer,
            ):
                while not is_killed.is_set():
                    for table, put in (("log", writer.append), ("keys", writer.upsert)):
                        put(table, _rows(ends[table], ends[table] + 1_000))
                        ends[table] += 1_000

        def load(table: str) -> None:
            while not is_killed.is_set():
                end = ends[table]
                with contextlib.suppress(RequestException, RESTError):
                    if len(_ids(_loaded(service.endpoint, table))) < end:
                        stale.append(table)

        loads = (threading.Thread(target=load, args=(table,)) for table in ends)
        threads = [threading.Thread(target=write), *loads]
        for thread in threads:
            thread.start()
        wait_until(lambda: min(ends.values()) > 4_000, "some writes to each table")
        service.kill()
        is_killed.set()
        for thread in threads:
            thread.join()
    assert not stale
    with ServiceProcess(data, command=command) as service:
        for table in ends:
            assert _read_again(loaded[table]) == list(range(10))
            ids = _ids(_loaded(service.endpoint, table))
            assert ids == list(range(len(ids)))
            assert len(ids) >= ends[table]
        assert len(_folders(data / "lake")) > 4
        service.kill()
    checked = CliRunner().invoke(cli, ["check", "--data-dir", str(data)])
    assert checked.exit_code == 0, checked.output
    clock.write_text(str(READABLE_S + 10))
    with ServiceProcess(data, command=command) as service:
        wait_until(lambda: not _folders(data / "lake"), "the deletion of all folders")
        for table in ends:
            assert len(_ids(_loaded(service.endpoint, table))) >= ends[table]
        assert service.terminate() == 0


def test_a_successor_shows_the_same_rows_and_deletes_the_folders(tmp_path: Path) -> None:
    clock, lake = tmp_path / "clock", tmp_path / "lake"
    lake.mkdir()
    command = ("-m", "tests.support.clocked_service", str(clock))
    arguments = (
        *("--journal", f"file://{tmp_path / 'journal'}", "--lease-ms", "1500"),
        *("--warehouse", f"file://{lake / 'warehouse'}", "--catalog-property", "type=sql"),
        *("--catalog-property", f"uri=sqlite:///{lake / 'catalog.db'}"),
    )
    with (
        ServiceProcess(tmp_path / "one", *arguments, command=command) as owner,
        ServiceProcess(tmp_path / "two", *arguments, "--standby", command=command) as standby,
    ):
        with StorageClient(owner.endpoint) as client:
            client.create_table("keys", EVENTS, primary_key=["id"])
            client.upsert("keys", _rows(0, 20))
            tier_once(client)
            client.upsert("keys", _rows(10, 30))
            loaded = _loaded(owner.endpoint, "keys")
        owner.kill()
        assert _read_again(loaded) == list(range(30))
        clock.write_text(str(READABLE_S + 10))

        standby.wait_ready()

        wait_until(lambda: not _folders(lake), "the deletion of all folders")
        assert _ids(_loaded(standby.endpoint, "keys")) == list(range(30))


@contextlib.contextmanager
def _shards(tmp_path: Path) -> Iterator[ServiceProcess]:
    journal = f"file://{tmp_path / 'store'}"
    arguments = ("--shards", "2", "--journal", journal, "--lease-ms", "2000")
    with ServiceProcess(tmp_path / "data", *arguments, is_executed=True) as service:
        yield service


def test_a_moved_table_is_live_at_its_new_shard_which_deletes_its_folders(tmp_path: Path) -> None:
    with _shards(tmp_path) as service, StorageClient(service.endpoint) as client:
        client.create_table("log", EVENTS)
        client.append("log", _rows(0, 10))
        loaded = _loaded(service.endpoint, "log")
        (home,) = (t["shard"] for t in client.status()["tables"] if t["table"] == "default.log")
        other = "1" if str(home) == "0" else "0"
        moved = CliRunner().invoke(
            cli, ["shards", "move", "log", "--to", other, "--endpoint", service.endpoint]
        )
        assert moved.exit_code == 0, moved.output
        client.append("log", _rows(10, 15))

        assert _ids(_loaded(service.endpoint, "log")) == list(range(15))
        assert _read_again(loaded) == list(range(10))
        (places,) = tmp_path.rglob("live_places.json")
        assert other in places.relative_to(tmp_path).parts
