"""`streamhouse import`: an Iceberg table becomes the history of a new table, each row once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    DatabaseNotFoundError,
    InvalidRequestError,
    SchemaMismatchError,
    SnapshotNotFoundError,
    UnsupportedError,
)
from streamhouse.core.model.progress import NO_PROGRESS, Progress
from streamhouse.reading.imports.table_import import ImportedStep, TableImport
from tests.support.documented_fields import documented
from tests.support.held_step import around, lower
from tests.support.iceberg_world import numbered
from tests.support.python_process import run_python
from tests.support.seen_progress import SeenProgress
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

SOURCE = "legacy.clicks"


class World:
    """A service, and its lake catalog as other engines see it."""

    def __init__(self, service: ServiceProcess, client: StreamhouseClient, catalog: Catalog):
        self.service = service
        self.client = client
        self.catalog = catalog

    def source(self) -> Table:
        return self.catalog.create_table(SOURCE, numbered(0, 0).schema)

    def expire(self, *snapshot_ids: int) -> None:
        table = self.catalog.load_table(SOURCE)
        table.maintenance.expire_snapshots().by_ids(list(snapshot_ids)).commit()

    def job(self, target: str = "shop.clicks") -> TableImport:
        return TableImport(StorageClient.of(self.client), SOURCE, target, threads=2)

    def run(
        self, target: str = "shop.clicks", *, progress: Progress = NO_PROGRESS, **options: Any
    ) -> list[ImportedStep]:
        """One `streamhouse import`, from the start."""
        job = self.job(target)
        job.prepare(**options)
        return list(job.run(progress))

    def ids(self, target: str = "shop.clicks") -> list[int]:
        return sorted(self.client.read(target, columns=["id"])["id"].to_pylist())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with (
        ServiceProcess(tmp_path / "data") as service,
        StreamhouseClient(service.endpoint) as client,
        contextlib.closing(
            load_catalog("lake", type="rest", uri=service.endpoint + "/iceberg")
        ) as catalog,
    ):
        catalog.create_namespace("legacy")
        yield World(service, client, catalog)


def command(world: World, *arguments: str) -> list[str]:
    """The arguments of Python that import SOURCE."""
    start = "from streamhouse.cli import main; main()"
    endpoint = ("--endpoint", world.service.endpoint)
    return ["-c", start, "import", SOURCE, *arguments, *endpoint]


def test_rows_types_and_partitioning_are_taken_over_and_tiered(world: World) -> None:
    table = world.source()
    with table.update_spec() as change:
        change.add_field("id", "bucket[4]")
        change.add_identity("name")
    table.append(numbered(0, 20))

    done = run_python(command(world, "--as", "shop.clicks", "--bucket-num", "2"))

    assert done.returncode == 0, done.stderr
    assert "shop.clicks: partitioned by bucket(4, id), name" in done.stdout
    assert "20 rows imported, 0 to go (100%)" in done.stdout
    again = run_python(command(world, "--as", "shop.again", "--json"))
    first, step = map(json.loads, again.stdout.splitlines())
    by = ["bucket(4, id)", "name"]
    assert first == {"source": SOURCE, "table": "shop.again", "partitioned_by": by}
    assert list(step) == documented("import")
    assert (step["imported_rows"], step["remaining_rows"]) == (20, 0)
    made = world.client.describe_table("shop.clicks")
    assert made.schema.to_arrow() == numbered(0, 0).schema
    assert made.bucket_count == 2
    assert tier_once(world.client, "shop.clicks") == 20
    world.client.append("shop.clicks", numbered(20, 25))
    assert world.ids() == list(range(25))


def test_a_column_with_a_name_of_ours_is_refused_and_nothing_made(world: World) -> None:
    world.catalog.create_table(SOURCE, pa.schema([("id", pa.int64()), ("__bucket", pa.int32())]))

    with pytest.raises(UnsupportedError, match=r"'__bucket' cannot be read.*an import takes every"):
        world.run()
    with pytest.raises(DatabaseNotFoundError):
        world.client.describe_table("shop.clicks")


def test_a_renamed_column_of_files_without_ids_is_imported(world: World) -> None:
    table = world.source()
    path = Path(table.location().removeprefix("file://")) / "data" / "bare.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(numbered(0, 2), path)
    table.add_files([f"file://{path}"])
    with table.update_schema() as change:
        change.rename_column("name", "title")

    world.run()

    assert world.client.read("shop.clicks").sort_by("id")["title"].to_pylist() == ["n0", "n1"]


def test_importing_again_takes_only_what_was_appended_since(world: World) -> None:
    table = world.source()
    table.append(numbered(0, 10))
    table.append(numbered(10, 15))

    seen = SeenProgress()
    assert [step.row_count for step in world.run(progress=seen)] == [15]
    assert seen.expected == sum(seen.steps) == 15
    assert world.run() == []
    table.append(numbered(15, 18))
    table.append(numbered(18, 20))
    assert [step.row_count for step in world.run()] == [3, 2]
    assert world.ids() == list(range(20))


def test_a_table_that_was_empty_is_imported_from_its_first_append(world: World) -> None:
    table = world.source()

    assert world.run() == []
    table.append(numbered(0, 3))
    assert [step.row_count for step in world.run()] == [3]
    assert world.run() == []


def test_an_import_that_died_anywhere_goes_on_and_doubles_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower(monkeypatch, "import-step", 4)
    table = world.source()
    for start in range(0, 20, 2):
        table.append(numbered(start, start + 2))

    def dies_before(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def dies_after(commit: Any, *arguments: Any, **more: Any) -> None:
        commit(*arguments, **more)
        raise KeyboardInterrupt

    for attempt, dying in enumerate((dies_before, dies_after, dies_before, dies_after)):
        with monkeypatch.context() as patch:
            around(patch, "transaction-committing", dying)
            with pytest.raises(KeyboardInterrupt):
                world.run()
        table.append(numbered(20 + attempt, 21 + attempt))
    assert len(world.ids()) == 8

    # Of ten files in steps of two, two steps are in; then four snapshots of one row.
    assert [step.row_count for step in world.run()] == [4, 4, 4, 1, 1, 1, 1]
    assert world.ids() == list(range(24))


def test_two_imports_at_once_are_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch, "import-step", 2)
    table = world.source()
    for start in range(0, 10, 2):
        table.append(numbered(start, start + 2))
    one, other = world.job(), world.job()
    one.prepare()
    other.prepare()

    ahead, behind = one.run(), other.run()
    found = [next(behind), next(ahead), *ahead, *behind]

    assert [(step.row_count, step.is_skipped) for step in found] == [
        *[(2, False)] * 5,
        *[(0, True)] * 4,
    ]
    assert world.ids() == list(range(10))


def test_rows_with_a_key_are_upserted_the_newest_last(world: World) -> None:
    table = world.source()
    table.append(pa.table({"id": [1, 2], "name": ["old", "two"]}, schema=numbered(0, 0).schema))
    table.append(pa.table({"id": [1, 3], "name": ["new", "three"]}, schema=numbered(0, 0).schema))

    world.run(primary_key=["id"], bucket_count=2)
    table.append(pa.table({"id": [2], "name": ["TWO"]}, schema=numbered(0, 0).schema))
    world.run(primary_key=["id"])

    rows = world.client.read("shop.clicks").sort_by("id").to_pylist()
    assert [row["name"] for row in rows] == ["new", "TWO", "three"]
    assert not world.client.describe_table("shop.clicks").schema.columns[0].nullable


def test_imported_snapshots_may_expire_and_others_may_not(world: World) -> None:
    table = world.source()
    table.append(numbered(0, 5))
    world.run()
    imported = [entry.snapshot_id for entry in world.catalog.load_table(SOURCE).history()]
    table.append(numbered(5, 7))
    world.expire(*imported)

    assert [step.row_count for step in world.run()] == [2]
    table.append(numbered(7, 8))
    table.append(numbered(8, 9))
    gone = [entry.snapshot_id for entry in world.catalog.load_table(SOURCE).history()][:-1]
    world.expire(*gone)
    with pytest.raises(SnapshotNotFoundError, match="expired"):
        world.run()
    assert world.ids() == list(range(7))


def test_a_target_that_is_something_else_is_refused(world: World) -> None:
    table = world.source()
    table.append(numbered(0, 5))
    world.client.create_table("default.other", numbered(0, 0).schema)

    with pytest.raises(InvalidRequestError, match="was not made by an import"):
        world.run("default.other")
    with pytest.raises(InvalidRequestError, match=r"has an Iceberg table 'legacy\.clicks' already"):
        world.run(SOURCE)
    world.run()
    with table.update_schema() as change:
        change.add_column("page", table.schema().find_type("name"))
    with pytest.raises(SchemaMismatchError, match=r"streamhouse alter shop\.clicks --add"):
        world.run()
    world.catalog.drop_table(SOURCE)
    world.source()
    with pytest.raises(InvalidRequestError, match="was imported from another table"):
        world.run()


def test_following_imports_appends_until_it_is_stopped(world: World) -> None:
    table = world.source()
    table.append(numbered(0, 5))
    following = subprocess.Popen(
        [sys.executable, *command(world, "--as", "shop.clicks", "--follow", "--interval", "0.1")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert following.stdout is not None
    try:
        assert "partitioned by nothing" in following.stdout.readline()
        assert "5 rows imported" in following.stdout.readline()
        table.append(numbered(5, 9))
        assert "4 rows imported" in following.stdout.readline()
    finally:
        following.send_signal(signal.SIGINT)
        try:
            assert following.wait(60) == 130
        finally:
            following.kill()
            following.wait()
            following.stdout.close()

    assert world.ids() == list(range(9))
