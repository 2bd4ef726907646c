"""Tables whose service is lost, or that were dropped, go on from their lake tables."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from streamhouse.core.errors import (
    FencedError,
    OffsetOutOfRangeError,
    StreamhouseError,
    TableExistsError,
    UnavailableError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.directory.runtime import clock_us
from tests.support.adoption_world import (
    KEYED,
    LOG,
    SCHEMA,
    Lake,
    Rows,
    adopt,
    by_id,
    check,
    filled,
    go_on,
    rows,
)
from tests.support.python_process import run_python
from tests.support.tier_once import run_due, tier_once

pytestmark = pytest.mark.slow


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


def test_the_tables_of_a_lost_service_go_on_in_another(lake: Lake) -> None:
    with lake.service("a") as (service, client):
        log, keyed = filled(client)
        described = client.describe_table(LOG).descriptor
        service.kill()
    lake.lose("a")

    with lake.service("b") as (_, client):
        adopt(client)
        assert client.describe_table(LOG).descriptor == described
        for position in client.positions(LOG).values():
            assert position.log_start_offset == position.high_watermark == position.tiered_offset
        check(client, log, keyed)
        assert lake.judged(LOG) == log
        go_on(client, lake, log, keyed)
    # And what it is now is in its own data directory.
    with lake.service("b") as (_, client):
        check(client, log, keyed)
    _check_directory(lake, "b")


def _check_directory(lake: Lake, name: str) -> None:
    given = [f"--catalog-property={key}={value}" for key, value in lake.properties.items()]
    done = _command("check", "--data-dir", str(lake.folder / name), "--lake-rows", *given)
    assert done.returncode == 0, done.stdout + done.stderr


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", "from streamhouse.cli import main; main()", *arguments])


def test_a_table_is_as_it_was_altered_last(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        filled(client)
        client.alter_schema(
            LOG, [{"add": "price", "type": "decimal(9,2)"}, {"drop": "small", "confirm": "small"}]
        )
        client.alter_properties(LOG, updates={"table.log.ttl": "2h"})
        no_price = pa.array([None], pa.decimal128(9, 2))
        client.append(LOG, pa.table({"id": [5_000], "name": ["x"], "price": no_price}))
        tier_once(client)
        before = client.describe_table(LOG)
        found = by_id(client.read(LOG))
    lake.lose("a")

    with lake.service("b") as (_, client):
        adopt(client)
        after = client.describe_table(LOG)
        assert after.descriptor == before.descriptor
        assert dict(after.schema_versions) == dict(before.schema_versions)
        assert by_id(client.read(LOG)) == found
        # No column gets an id that one has had.
        client.alter_schema(LOG, [{"add": "small", "type": "string"}])
        assert client.read(LOG, columns=["small"])["small"].null_count == len(found)
        line = {"id": [5_001], "name": ["y"], "price": no_price, "small": ["z"]}
        client.append(LOG, pa.table(line))
        tier_once(client)
        assert sorted(client.read(LOG, columns=["small"])["small"].drop_null().to_pylist()) == ["z"]


_DOOMED = """
import importlib, os
from streamhouse.cli.tuned_malloc import restart_with_tuned_malloc
restart_with_tuned_malloc()
module, name, when = os.environ["DIE_AT"].split()
module = importlib.import_module("streamhouse." + module)
alive = getattr(module, name)
def dying(*arguments, **more):
    if when == "after":
        alive(*arguments, **more)
    os.kill(os.getpid(), 9)
setattr(module, name, dying)
from streamhouse.cli import main
main()
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Path, Rows, Rows]:
    """A lake whose service is lost, a copy of its files, and the rows of its tables."""
    folder = tmp_path_factory.mktemp("orphaned")
    lake = Lake(folder / "lake")
    with lake.service("a") as (_, client):
        log, keyed = filled(client)
    lake.lose("a")
    copy = shutil.copytree(lake.folder, folder / "copy")
    return lake, copy, log, keyed


@pytest.fixture
def orphaned(prepared: tuple[Lake, Path, Rows, Rows]) -> tuple[Lake, Rows, Rows]:
    """The lake as it was when its service was lost: where it was, because metadata has paths."""
    lake, copy, log, keyed = prepared
    shutil.rmtree(lake.folder)
    shutil.copytree(copy, lake.folder)
    return lake, dict(log), dict(keyed)


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "step",
    [
        "lake.guards.adoptable_lake hand_over before",
        "lake.guards.adoptable_lake hand_over after",
        "storage_service.engine._opener begin_log after",
        "storage_service.engine._opener save_lake_state after",
        "storage_service.engine._opener remake_rows before",
        "storage_service.engine.keys.key_recovery _move before",
        "storage_service.engine._opener remake_rows after",
    ],
)
def test_an_adoption_that_died_anywhere_is_repeated(
    orphaned: tuple[Lake, Rows, Rows], step: str
) -> None:
    lake, log, keyed = orphaned
    command = ("-c", _DOOMED, "serve")
    # Executed: what is replaced must not have been imported by name before.
    with lake.service("b", command=command, env={"DIE_AT": step}, is_executed=True) as (
        service,
        client,
    ):
        client.create_database("shop")
        with pytest.raises((UnknownOutcomeError, UnavailableError)):
            client.adopt_table(KEYED, force=True)
        service.wait()

    with lake.service("b") as (_, client):
        adopt(client)
        adopt(client)
        check(client, log, keyed)
        go_on(client, lake, log, keyed)


def test_a_service_that_lost_a_table_to_another_adds_nothing_to_it(lake: Lake) -> None:
    with lake.service("a") as (_, old), lake.service("b") as (_, new):
        log, keyed = filled(old)
        with pytest.raises(FencedError, match=r"from another streamhouse service \d+ s ago"):
            new.adopt_table(LOG)
        adopt(new)

        with pytest.raises(StreamhouseError, match="another streamhouse table"):
            tier_once(old, LOG)
        with pytest.raises(StreamhouseError, match="another streamhouse table"):
            tier_once(old, KEYED)

        check(new, log, keyed)
        go_on(new, lake, log, keyed)
        # What it can do is take the tables back.
        old.drop_table(LOG)
        old.drop_table(KEYED)
        adopt(old)
        check(old, log, keyed)
        new.append(LOG, rows(2_000, 2_001))
        with pytest.raises(StreamhouseError, match="another streamhouse table"):
            tier_once(new, LOG)


def test_a_table_that_was_dropped_by_mistake_comes_back(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        log, keyed = filled(client)
        with pytest.raises(TableExistsError, match="exists and was not adopted: drop it to go on"):
            client.adopt_table(LOG)
        client.drop_table(LOG)
        client.drop_table(KEYED)

        # Nobody else has them: no need for force.
        client.adopt_table(LOG)
        client.adopt_table(KEYED)

        check(client, log, keyed)
        go_on(client, lake, log, keyed)


def test_positions_go_on_in_an_adopted_table_as_far_as_its_rows_came_along(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        client.create_table(LOG, SCHEMA)
        client.append(LOG, rows(0, 10))
        tier_once(client)
        subscription = client.subscribe(LOG, start="committed", consumer="billing")
        first = next(subscription)
        client.drop_table(LOG)
        client.adopt_table(LOG)
        client.append(LOG, rows(20, 25))
        second = next(subscription)
        subscription.commit()
        committed = client.committed(LOG, "billing")
        # What follows is lost with the next drop.
        client.drop_table(LOG)
        client.adopt_table(LOG)
        with pytest.raises(OffsetOutOfRangeError, match=r"offset 15 .* only the rows below 10"):
            client.fetch(LOG, 0, second.end_offset)

    assert (second.base_offset, second.data.column("id")[0].as_py()) == (10, 20)
    assert first.table_id != second.table_id
    assert committed == {0: 15}


def test_the_command_adopts_by_name_and_says_what_it_cannot(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        log, _ = filled(client)
    lake.lose("a")
    with lake.service("b") as (service, client):
        endpoint = ("--endpoint", service.endpoint)
        fenced = _command("import", LOG, *endpoint)
        assert fenced.returncode != 0
        assert "force the adoption (--adopt)" in fenced.stderr
        for wrong, sentence in (
            (("--adopt", "--bucket-num", "3"), "leave out --bucket-num"),
            (("--adopt", "--as", "shop.other"), "leave out --as"),
            (("--copy",), "give it a name with --as"),
        ):
            refused = _command("import", LOG, *wrong, *endpoint)
            assert refused.returncode != 0
            assert sentence in refused.stderr

        for _ in range(2):
            done = _command("import", LOG, "--adopt", *endpoint)
            assert done.returncode == 0, done.stderr
            assert f"{LOG} goes on with its lake table, from these offsets on: 0: " in done.stdout
        assert by_id(client.read(LOG)) == log

        copied = _command("import", KEYED, "--copy", "--as", "shop.copy", *endpoint)
        assert copied.returncode == 0, copied.stderr
        assert client.read("shop.copy").num_rows == client.read(f"{KEYED}$iceberg").num_rows


def test_a_table_whose_catalog_is_lost_too_is_registered_first(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        log, _ = filled(client)
        with lake.table(LOG) as table:
            location = table.metadata_location
    lake.lose("a")
    (lake.folder / "catalog.db").unlink()

    with lake.service("b") as (service, client):
        uri = service.endpoint + "/iceberg"
        with contextlib.closing(load_catalog("lake", type="rest", uri=uri)) as catalog:
            catalog.create_namespace("shop")
            catalog.register_table(LOG, location)
        client.create_database("shop")
        client.adopt_table(LOG, force=True)
        assert by_id(client.read(LOG)) == log


FEW = {"table.datalake.snapshot.min-count": "1", "table.datalake.snapshot.max-age": "1ms"}


def test_what_the_former_owner_left_is_tidied_though_nobody_writes(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        log, keyed = filled(client, **FEW)
    lake.lose("a")
    with lake.service("b") as (_, client):
        adopt(client)
        with lake.table(KEYED) as table:
            assert len(table.metadata.snapshots) > 2
    # What is due is known after a restart, too.
    with lake.service("b") as (_, client):
        assert sorted(run_due(client)) == [f"{LOG} maintained", f"{KEYED} maintained"]
        with lake.table(KEYED) as table:
            assert len(table.metadata.snapshots) == 1
        check(client, log, keyed)
        # Once, and then when it is time for orphans.
        due_us = client.table_state(KEYED).lake.maintenance_due_us
        assert due_us is not None
        assert due_us > clock_us() + 2 * 86_400_000_000
        go_on(client, lake, log, keyed)


def test_properties_that_are_changed_make_a_worker_look_though_nobody_writes(lake: Lake) -> None:
    with lake.service("a") as (_, client):
        filled(client, **{"table.datalake.auto-maintenance": "false"})
        tier_once(client)
        assert client.table_state(KEYED).lake.maintenance_due_us is None
        client.alter_properties(KEYED, updates=FEW, removals=["table.datalake.auto-maintenance"])
    with lake.service("a") as (_, client):
        assert run_due(client) == [f"{KEYED} maintained"]
        with lake.table(KEYED) as table:
            assert len(table.metadata.snapshots) == 1
