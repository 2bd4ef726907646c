"""`streamhouse check` and `dump`: silent about what is right, loud about every kind of damage."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.catalog import load_catalog

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.server_commands.check import command
from streamhouse.client import StorageClient
from streamhouse.core.errors import UnsupportedError
from streamhouse.lake import opened_table
from streamhouse.lake.lake_tables import IcebergLake
from streamhouse.storage_service.config_settings import DEFAULT_CATALOG_NAME
from streamhouse.storage_service.directory.state_file import StateIdentity, seal
from streamhouse.storage_service.engine.keys.key_bucket import mark_damaged
from streamhouse.storage_service.kv.rocksdb_store import RocksdbStore
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.operations.check_directory import check_directory
from streamhouse.storage_service.ownership.journal.restore.journal_file import JournalFile, Phase
from streamhouse.tiering.worker._service import TieringService
from streamhouse.tiering.worker.thread_runner import ThreadRunner
from tests.support.command_line import streamhouse
from tests.support.documented_fields import documented
from tests.support.seen_progress import SeenProgress
from tests.support.service_process import ServiceProcess
from tests.support.state_files import reseal
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

EVENTS = pa.schema([("n", pa.int64()), ("padding", pa.string())])
USERS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def _events(start: int, end: int) -> pa.Table:
    rows = [{"n": n, "padding": "x" * 1_000} for n in range(start, end)]
    return pa.Table.from_pylist(rows, schema=EVENTS)


def _users(start: int, end: int, name: str) -> pa.Table:
    ids = range(start, end)
    return pa.table({"id": ids, "name": [name] * len(ids)}, schema=USERS)


def _orders(client: StreamhouseClient) -> None:
    """A primary key table with every lake table there is, tiered but for the end.

    It changed its schema, and its batch layout lacks the last round.
    """
    history = {"table.datalake.changelog": "true", "table.datalake.batch-layout.sort": "name"}
    client.create_table("orders", USERS, primary_key=["id"], bucket_count=2, properties=history)
    client.upsert("orders", _users(0, 100, "a"))
    tier_once(client, "orders")
    client.add_column("orders", "weight", pa.float32())
    client.upsert("orders", _users(50, 60, "b"))
    client.rename_column("orders", "name", "title")
    _tier_all_but_the_batch_layout(client, "orders")
    rows = {"id": range(55, 120), "title": ["c"] * 65, "weight": pa.array([0.1] * 65, pa.float32())}
    client.upsert("orders", pa.table(rows))
    client.delete("orders", pa.table({"id": range(10)}))


def _tier_all_but_the_batch_layout(client: StreamhouseClient, path: str) -> None:
    def fail(step: str) -> None:
        if step == "batch-files-written":
            raise UnsupportedError("not now")

    lake = IcebergLake(client.lake_catalog())
    worker = TieringService(
        client=StorageClient.of(client),
        lake=lake,
        runner=ThreadRunner(1),
        tables=[path],
        checkpoint=fail,
    )
    (summary,) = worker.run_once()
    lake.close()
    assert isinstance(summary.error, UnsupportedError)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiered log table of several segments, and a primary key table."""
    data = tmp_path_factory.mktemp("check") / "data"
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        small = {"table.log.segment-bytes": "64kb", "table.datalake.batch-layout.sort": "n"}
        client.create_table("events", EVENTS, bucket_count=2, properties=small)
        client.create_table("users", USERS, primary_key=["id"], bucket_count=2)
        for start in range(0, 400, 50):
            client.append("events", _events(start, start + 50))
        tier_once(client, "events")
        client.append("events", _events(400, 410))
        client.add_column("events", "unit", pa.string())
        client.append("events", _events(410, 420))
        ended = client.begin_transaction("users", operation="upsert", app_id="job", version=1)
        ended.commit([ended.stage(_users(0, 1, "a"))])
        client.begin_transaction("users", operation="upsert").stage(_users(900, 901, "open"))
        client.upsert("users", _users(0, 300, "a"))
        client.upsert("users", _users(100, 200, "b"))
        client.delete(
            "users",
            pa.table({"id": range(150, 250)}).cast(USERS.empty_table().select(["id"]).schema),
        )
        client.upsert("users", _users(240, 260, "c"))
        _orders(client)
    return data


@pytest.fixture
def data(original: Path) -> Path:
    """The original, put back as it was after each test: the lake knows its files by their path."""
    kept = original.parent / "kept"
    if not kept.exists():
        shutil.copytree(original, kept)
    shutil.rmtree(original)
    shutil.copytree(kept, original)
    # This process may have the catalog open that was there before.
    opened_table._catalogs.clear()
    return original


def _report(data: Path, *options: str, expect: int = 0) -> dict[str, Any]:
    # In this process: importing everything anew takes longer than checking.
    done = CliRunner().invoke(command, ["--data-dir", str(data), "--json", *options])
    assert done.exit_code == expect, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _contents(data: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(data.rglob("*")) if p.is_file()}


def test_a_sound_directory_is_found_sound_and_is_not_changed(data: Path) -> None:
    before = _contents(data)

    report = _report(data, "--lake-rows")

    assert report["findings"] == []
    tables = {table["path"]: table["buckets"] for table in report["tables"]}
    assert sum(bucket["rows"] for bucket in tables["default.events"]) == 420
    assert sum(bucket["tiered_offset"] for bucket in tables["default.events"]) == 400
    assert all(bucket["segments"] > 1 for bucket in tables["default.events"])
    assert sum(bucket["key_count"] for bucket in tables["default.users"]) == 210
    assert sum(bucket["key_count"] for bucket in tables["default.orders"]) == 110
    # Ten before and after images are changes too.
    assert sum(bucket["tiered_offset"] for bucket in tables["default.orders"]) == 120
    assert _contents(data) == before
    text = streamhouse("check", "--data-dir", data).stdout
    assert "is sound: 0 findings" in text


def test_progress_comes_to_the_bytes_of_the_logs(data: Path) -> None:
    seen = SeenProgress()

    report = check_directory(data, lake_check=None, progress=seen)

    logs = sum(facts.log_bytes for table in report.tables for facts in table.buckets)
    assert seen.expected == sum(seen.steps) == logs
    assert len(seen.steps) == sum(f.segments for table in report.tables for f in table.buckets)


def test_a_directory_in_use_is_not_checked(data: Path, tmp_path: Path) -> None:
    with ServiceProcess(data):
        done = streamhouse("check", "--data-dir", data, expect=2)
        assert "is in use by a running service" in done.stderr
    done = streamhouse("check", "--data-dir", tmp_path, expect=2)
    assert "is no data directory" in done.stderr


def test_a_directory_that_follows_a_journal_is_not_called_damaged(data: Path) -> None:
    """A standby's is behind in any file: what it lacks, the journal has."""
    following = JournalFile(
        service_id="s", shard="0", epoch=1, nonces=(), places=(), phase=Phase.RESTORING
    )
    following.save(data, LocalFilesystem())
    newest = max((data / "tables").rglob("*.log"))
    newest.write_bytes(newest.read_bytes()[:-1])

    done = streamhouse("check", "--data-dir", data, expect=2)

    assert "or a standby used it" in done.stderr
    assert "DAMAGED" not in done.stdout


def _bucket(data: Path, table: int, bucket: int = 0) -> Path:
    return data / "tables" / str(table) / f"bucket-{bucket}"


def _segments(data: Path, table: int = 1) -> list[Path]:
    return sorted(_bucket(data, table).glob("*.log"))


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def _damage_sealed(data: Path) -> None:
    _flip(_segments(data)[0], 5_000)


def _damage_active(data: Path) -> None:
    _flip(_segments(data)[-1], 100)


def _cut_active(data: Path) -> None:
    path = _segments(data)[-1]
    path.write_bytes(path.read_bytes()[:-8])


def _lose_segment(data: Path) -> None:
    _segments(data)[1].unlink()


def _lose_log(data: Path) -> None:
    for path in _segments(data):
        path.unlink()


def _swap_headers(data: Path) -> None:
    shutil.copy(_segments(data, 2)[0], _segments(data, 1)[0])


def _lose_row_by_key(data: Path) -> None:
    _rewrite_first_row(data, lambda _: None)


def _change_row_by_key(data: Path) -> None:
    _rewrite_first_row(data, lambda value: value[:-1] + bytes([value[-1] ^ 1]))


def _rewrite_first_row(data: Path, change: Callable[[bytes], bytes | None]) -> None:
    store = RocksdbStore(_bucket(data, 2) / "kv", table_id=2, bucket=0)
    keys, values = next(store.scan())
    changed = pa.array([change(values[0].as_py())], pa.binary())
    store.write(keys.slice(0, 1), changed, marker=store.written_marker)
    store.flush()
    store.close()


def _flip_row_by_key(data: Path) -> None:
    table = next((_bucket(data, 2) / "kv").glob("*.sst"))
    content = bytearray(table.read_bytes())
    content[100] ^= 1
    table.write_bytes(content)


def _lose_rows_file(data: Path) -> None:
    next((_bucket(data, 2) / "kv").glob("*.sst")).unlink()


def _lose_current(data: Path) -> None:
    (_bucket(data, 2) / "kv" / "CURRENT").unlink()


def _mark_rows(data: Path) -> None:
    mark_damaged(_bucket(data, 2) / "kv", "a block", applied_offset=3)


def _damage_decision(data: Path) -> None:
    next((data / "tables" / "2" / "transactions").glob("*.decision")).write_text("{}")


def _damage_ages(data: Path) -> None:
    _reseal_as(data / "tables" / "2" / "row_ages.json", {"0": [[1]]})


def _reseal_as(path: Path, content: Any) -> None:
    """Give table 2 a state file of another content."""
    service_id = json.loads((path.parents[2] / "service.json").read_text())["service_id"]
    identity = StateIdentity(kind=path.stem, service_id=service_id, table_id=2)
    path.write_bytes(seal(identity, content))


def _ages_of_another_log(data: Path) -> None:
    _reseal_as(data / "tables" / "2" / "row_ages.json", {"0": [[1, 5], [2, 9000]]})


def _damage_table(data: Path) -> None:
    (data / "tables" / "1" / "table.json").write_text("{")


def _lose_lake_file(data: Path) -> None:
    next((data / "lake").rglob("*.parquet")).unlink()


def _lose_lake_table(data: Path) -> None:
    with sqlite3.connect(data / "lake" / "catalog.db") as catalog:
        catalog.execute("DELETE FROM iceberg_tables")
    catalog.close()


def _zero_a_page_of_the_catalog(data: Path) -> None:
    """The page is of the namespaces: no table's lake is read from it."""
    path = data / "lake" / "catalog.db"
    with sqlite3.connect(path) as catalog:
        ((page,),) = catalog.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'iceberg_namespace_properties'"
        ).fetchall()
        ((size,),) = catalog.execute("PRAGMA page_size").fetchall()
    catalog.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))


def _go_back(data: Path) -> None:
    """The registered offsets are ahead of the lake."""

    def ahead(lake: Any) -> None:
        lake["tiered_offsets"] = {b: end + 1 for b, end in lake["tiered_offsets"].items()}

    reseal(data / "tables" / "1" / "lake.json", ahead)


def _batch_goes_back(data: Path) -> None:
    def ahead(lake: Any) -> None:
        ends = lake["batch"]["tiered_offsets"]
        lake["batch"]["tiered_offsets"] = {b: end + 1 for b, end in ends.items()}

    reseal(data / "tables" / "3" / "lake.json", ahead)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_damage_sealed, "is damaged at byte"),
        (_damage_active, "rows from there on were acknowledged"),
        (_cut_active, "were durable"),
        (_lose_segment, "the one before ends at"),
        (_lose_log, "has no segment files"),
        (_swap_headers, "belongs to bucket 0 of table 2"),
        (_lose_row_by_key, "the changelog has, and the rows by key have not"),
        (_change_row_by_key, "differ from the changelog"),
        (_flip_row_by_key, "its rows by key are unreadable: "),
        (_lose_rows_file, "its rows by key are unreadable: "),
        (_lose_current, "there are files of rows, but no file CURRENT"),
        (_mark_rows, "the rows by key are damaged (a block); the next start makes them again"),
        (_damage_decision, ".decision is damaged"),
        (_damage_ages, "row_ages.json holds no ages of rows"),
        (_ages_of_another_log, "has ages of changes up to offset 9000, but the log ends at"),
        (_damage_table, "unreadable"),
        (_lose_lake_file, "cannot read lake file"),
        (_lose_lake_table, "has no lake table"),
        (_zero_a_page_of_the_catalog, "catalog.db is damaged: "),
        (_batch_goes_back, "batch layout: bucket 0: offset 44 is registered as tiered, but"),
        (_go_back, "is registered as tiered, but the lake ends at"),
    ],
)
def test_damage_is_found(data: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(data)

    report = _report(data, expect=1)

    assert not report["is_sound"]
    errors = [f["problem"] for f in report["findings"] if f["severity"] == "error"]
    assert any(problem in error for error in errors), errors


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        ("events$batch", "n == 20", "batch layout: bucket"),
        ("orders$batch", "id == 20", "batch layout: bucket"),
        ("orders", "id == 20", "1 rows that it must have are missing"),
        ("orders$changelog", "id == 55 and __change_type == '-U'", "full history: bucket"),
    ],
)
def test_rows_that_are_gone_from_the_lake_are_found(
    data: Path, name: str, rows: str, problem: str
) -> None:
    uri = f"sqlite:///{data / 'lake' / 'catalog.db'}"
    table = load_catalog(DEFAULT_CATALOG_NAME, type="sql", uri=uri).load_table(("default", name))
    table.delete(rows)
    path = data / "tables" / ("1" if "events" in name else "3") / "lake.json"

    def follow(lake: Any) -> None:
        known = lake[name.partition("$")[2]] if "$" in name else lake
        known["snapshot_id"] = str(table.metadata.current_snapshot_id)

    reseal(path, follow)
    opened_table._catalogs.clear()

    report = _report(data, "--lake-rows", expect=1)

    assert any(problem in finding["problem"] for finding in report["findings"]), report["findings"]


def test_what_the_next_start_mends_is_a_warning(data: Path) -> None:
    for path in _bucket(data, 1).glob("*.index"):
        path.unlink()
    shutil.rmtree(_bucket(data, 2) / "kv")
    part = next((data / "tables" / "2" / "transactions").glob("*.part"))
    part.write_bytes(part.read_bytes()[:-10])
    with _segments(data, 2)[-1].open("ab") as file:
        file.write(b"half a frame")

    report = _report(data)

    assert report["is_sound"]
    assert {f["severity"] for f in report["findings"]} == {"warning"}
    text = " ".join(f["problem"] for f in report["findings"])
    assert "the next start makes it again" in text
    assert "has no rows by key" in text
    assert "never acknowledged; the next start cuts them off" in text
    assert "if it was cut off it was never acknowledged" in text
    with ServiceProcess(data) as service, StreamhouseClient(service.endpoint) as client:
        assert client.count("users") == 210
    assert _report(data)["findings"] == []


def test_a_segment_can_be_looked_into(data: Path) -> None:
    segment = _segments(data, 2)[0]

    lines = streamhouse("dump", segment).stdout.splitlines()
    rows = streamhouse("dump", segment, "--rows", "--offset", 3).stdout.splitlines()

    assert lines[0].startswith("bucket 0 of table 2, base offset 0, created 20")
    assert lines[1].startswith("offsets 0 to ")
    assert lines[1].endswith("checksum right")
    assert rows[2].startswith('  3 {"id": ')
    assert '"__change_type": "+I"' in rows[2]
    assert any('"__change_type": "-D"' in row for row in rows)
    documents = [
        json.loads(line)
        for line in streamhouse("dump", segment, "--rows", "--json").stdout.splitlines()
    ]
    assert list(documents[0]) == [
        "table_id",
        "bucket",
        "base_offset",
        "created_us",
        "segment_bytes",
    ]
    assert list(documents[1]) == documented("dump")
    assert documents[1]["is_checksum_right"]
    assert documents[2]["offset"] == 0
    assert documents[2]["row"]["__change_type"] == "+I"
    _flip(segment, 200)
    with segment.open("ab") as file:
        file.write(bytes(80))
    last = streamhouse("dump", segment, "--json").stdout.splitlines()[-1]
    assert json.loads(last) == {"trailing_bytes": 80}
    damaged = streamhouse("dump", segment, "--rows").stdout
    assert "CHECKSUM WRONG" in damaged
    assert "80 bytes at the end are no batch" in damaged
