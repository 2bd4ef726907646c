"""Databases and tables survive a restart, and nothing half-made does."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from streamhouse.core.errors import (
    CorruptDataError,
    DatabaseExistsError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSchemaError,
    RequestTooLargeError,
    StorageFailedError,
    StreamhouseError,
    TableDamagedError,
    TableExistsError,
    TableNotFoundError,
    UnknownOptionError,
    UnknownOutcomeError,
)
from streamhouse.core.model.partitioning import (
    BATCH_PARTITION_PROPERTY,
    PartitionField,
)
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.service_state import load_service_state
from streamhouse.storage_service.directory.table_folders import find_strangers
from streamhouse.storage_service.directory.table_registry import TableRegistry
from streamhouse.storage_service.operations.rebuild_service_file import rebuild_service_file
from tests.support.in_process_service import table_descriptor


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    opened = DataDirectory.open(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def registry(directory: DataDirectory) -> TableRegistry:
    return _open(directory)


def _open(directory: DataDirectory, **limits: int) -> TableRegistry:
    return TableRegistry(
        directory, **{"databases_max": 10, "tables_max": 10, "buckets_max": 100, **limits}
    )


def _create(registry: TableRegistry, path: str = "events", **fields: Any) -> TableInfo:
    info = registry.prepare_table(table_descriptor(path, **fields), created_at_us=5)
    registry.add_table(info)
    return info


def test_a_table_is_the_same_after_a_restart(directory: DataDirectory) -> None:
    registry = _open(directory)
    registry.create_database("sales")
    created = _create(registry, "sales.events", bucket_count=3, bucket_key=("id",))

    again = _open(directory)

    assert again.table(TablePath("sales", "events")) == created
    assert created.nodes == {0: "", 1: "", 2: ""}
    assert again.databases() == ["default", "sales"]
    assert again.service_id == registry.service_id


def test_tables_are_listed_by_database(registry: TableRegistry) -> None:
    registry.create_database("sales")
    for path in ("b", "a", "sales.c"):
        _create(registry, path)

    assert [str(info.path) for info in registry.tables()] == ["default.a", "default.b", "sales.c"]
    assert [str(info.path) for info in registry.tables("sales")] == ["sales.c"]


def test_a_table_id_is_never_used_twice(directory: DataDirectory) -> None:
    registry = _open(directory)
    first = _create(registry)
    registry.drop_table([first.path], ())

    second = _create(_open(directory))

    assert second.table_id > first.table_id


def test_an_id_may_have_to_be_above_another(directory: DataDirectory) -> None:
    registry = _open(directory)

    assert registry.reserve_table_id(above=40) == 41
    assert registry.reserve_table_id(above=3) == 42
    assert _create(_open(directory)).table_id == 43


def test_an_id_is_used_up_even_if_its_table_was_never_made(directory: DataDirectory) -> None:
    registry = _open(directory)
    (directory.tables / "1").mkdir()

    with pytest.raises(StorageFailedError, match=r"cannot create table 'default\.events'"):
        _create(registry)

    assert _create(_open(directory)).table_id == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: _create(r), TableExistsError, "table 'default.events' already exists"),
        (lambda r: _create(r, "sale.a"), DatabaseNotFoundError, "did you mean 'sales'?"),
        (
            lambda r: r.table(TablePath("default", "event")),
            TableNotFoundError,
            "table 'default.event' does not exist; did you mean 'default.events'?",
        ),
        (lambda r: r.tables("nope"), DatabaseNotFoundError, "database 'nope' does not exist"),
        (lambda r: r.create_database("sales"), DatabaseExistsError, "'sales' already exists"),
        (lambda r: r.create_database("a b"), InvalidNameError, "database name 'a b' is not valid"),
        (lambda r: r.create_database("../x"), InvalidNameError, "is not valid"),
        (lambda r: r.drop_database("default"), InvalidRequestError, "cannot be dropped"),
        (lambda r: r.drop_database("nope"), DatabaseNotFoundError, "'nope' does not exist"),
    ],
)
def test_a_refused_change_says_why_and_changes_nothing(
    directory: DataDirectory, call: Any, error: type[StreamhouseError], message: str
) -> None:
    registry = _open(directory)
    registry.create_database("sales")
    _create(registry)

    with pytest.raises(error, match=re.escape(message)):
        call(registry)

    for seen in (registry, _open(directory)):
        assert seen.databases() == ["default", "sales"]
        assert [str(info.path) for info in seen.tables()] == ["default.events"]


def test_a_database_is_dropped_only_when_empty(directory: DataDirectory) -> None:
    registry = _open(directory)
    registry.create_database("sales")
    _create(registry, "sales.events")

    with pytest.raises(DatabaseNotEmptyError, match=r"1 tables, such as 'sales\.events'"):
        registry.drop_database("sales")
    registry.drop_table([TablePath("sales", "events")], ())
    registry.drop_database("sales")

    assert _open(directory).databases() == ["default"]


def test_limits_are_named(directory: DataDirectory) -> None:
    registry = _open(directory, databases_max=1, tables_max=2, buckets_max=4)
    _create(registry, "a", bucket_count=3)

    with pytest.raises(RequestTooLargeError, match="limit of 1 databases"):
        registry.create_database("sales")
    with pytest.raises(RequestTooLargeError, match=r"2 buckets more than the 3 .* limit of 4"):
        _create(registry, "b", bucket_count=2)
    _create(registry, "b")
    with pytest.raises(RequestTooLargeError, match="limit of 2 tables"):
        _create(registry, "c")


def test_properties_are_set_and_removed_together(directory: DataDirectory) -> None:
    registry = _open(directory)
    path = _create(registry, properties={"table.log.ttl": "1d"}).path

    registry.alter_properties(
        path, updates={"table.datalake.freshness": "5s"}, removals=["table.log.ttl"]
    )

    properties = _open(directory).table(path).properties()
    assert properties.datalake_freshness_ms == 5_000
    assert properties.log_ttl_ms == 7 * 86_400_000


@pytest.mark.parametrize(
    ("updates", "removals"),
    [({"table.log.tll": "1d"}, []), ({}, ["table.log.tll"]), ({"table.log.ttl": "soon"}, [])],
)
def test_one_bad_property_leaves_all_as_they_were(
    registry: TableRegistry, updates: dict[str, str], removals: list[str]
) -> None:
    path = _create(registry, properties={"table.log.ttl": "1d"}).path

    with pytest.raises(
        (UnknownOptionError, InvalidRequestError),
        match=r"did you mean 'table\.log\.ttl'|must be a duration",
    ):
        registry.alter_properties(
            path, updates={"table.datalake.enabled": "false", **updates}, removals=removals
        )

    assert registry.table(path).descriptor.properties == {"table.log.ttl": "1d"}


def test_what_a_crash_left_of_dropping_is_deleted_at_the_next_start(
    directory: DataDirectory,
) -> None:
    registry = _open(directory)
    info = _create(registry)
    registry.drop_table([info.path], ())
    assert directory.table(info.table_id).exists(), "the files wait for purge"

    again = _open(directory)

    assert again.tables() == []
    assert list(directory.tables.iterdir()) == []


def test_what_a_crash_left_of_creating_is_deleted_at_the_next_start(
    directory: DataDirectory,
) -> None:
    registry = _open(directory)
    info = registry.prepare_table(table_descriptor(), created_at_us=5)
    (directory.table(info.table_id) / "bucket-0").mkdir()
    state, _ = load_service_state(directory)
    assert find_strangers(directory, state) == [], "`check` before that start finds no damage"

    again = _open(directory)

    assert again.tables() == []
    assert list(directory.tables.iterdir()) == []
    assert again.strangers == []


@pytest.mark.parametrize("is_sealed", [False, True])
def test_data_of_another_version_is_not_touched(directory: DataDirectory, is_sealed: bool) -> None:
    _open(directory)
    value = json.loads(directory.service_file.read_text())
    if is_sealed:
        del value["crc32c"]
        value["format"] = 9
        text = json.dumps(value, sort_keys=True, separators=(",\n", ": "))
        value["crc32c"] = f"{crc32c(text.encode()):08x}"
    else:
        value = {"format": 9, "service_id": "s", "next_table_id": 1, "databases": []}
    directory.service_file.write_text(json.dumps(value))

    with pytest.raises(CorruptDataError, match=r"format 9.* another version"):
        _open(directory)


def test_the_release_before_refuses_the_directory(directory: DataDirectory) -> None:
    """It asked for `format` 1 at the top of service.json, and so it meets another one."""
    _open(directory)

    assert json.loads(directory.service_file.read_text())["format"] == 2


def test_tables_without_a_service_file_are_not_taken_for_a_new_directory(
    directory: DataDirectory,
) -> None:
    _create(_open(directory))
    directory.service_file.unlink()

    with pytest.raises(CorruptDataError, match=r"has tables but no service\.json: put the newest"):
        _open(directory)


def _fail(monkeypatch: pytest.MonkeyPatch, *names: str, after: int = 0) -> None:
    """Make these functions of `os` fail, after `after` calls of them that work."""
    calls = itertools.count(1)
    for name in names:
        real = getattr(os, name)

        def fail(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            if next(calls) > after:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("synced", range(9))
def test_a_table_made_again_after_a_failed_sync_is_the_one_a_restart_finds(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, synced: int
) -> None:
    registry = _open(directory)
    for number in range(9):
        registry.drop_table([_create(registry, f"before_{number}").path], ())
    with monkeypatch.context() as failing:
        # The sync fails, and then the files cannot be deleted either.
        _fail(failing, "fdatasync", "fsync", after=synced)
        _fail(failing, "rename")
        try:
            _create(registry, "orders")
        except (StorageFailedError, UnknownOutcomeError):
            assert registry.tables() == []
            made = None
        else:
            made = registry.table(TablePath.parse("orders"))
    if made is None:
        # Ids of two digits: the later one is not the one whose name sorts last.
        made = _create(registry, "orders")

    assert _open(directory).tables() == [made]
    assert _open(directory).tables() == [made]


def test_a_change_whose_name_is_not_synced_has_an_unknown_outcome(
    registry: TableRegistry, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _create(registry, "orders")
    path = TablePath.parse("orders")
    for synced, expected in ((0, StorageFailedError), (1, UnknownOutcomeError)):
        with monkeypatch.context() as failing:
            _fail(failing, "fdatasync", "fsync", after=synced)
            with pytest.raises(expected):
                registry.alter_properties(path, updates={"table.log.ttl": "1h"}, removals=())
        found = _open(directory).table(path).descriptor.properties.get("table.log.ttl")
        assert found == (None if expected is StorageFailedError else "1h")


# -- nothing is removed because something is missing -----------------------------------------------


def _log_with_rows(directory: DataDirectory, table_id: int) -> Path:
    """Give a table a log with more in it than a header."""
    log = directory.bucket(table_id, 0) / f"{0:020d}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"x" * 200)
    return log


def _lose_table_file(directory: DataDirectory) -> None:
    directory.table_file(1).path.unlink()


def _damage_table_file(directory: DataDirectory) -> None:
    text = directory.table_file(1).path.read_text()
    directory.table_file(1).path.write_text(text.replace('"bigint"', '"double"'))


def _swap_table_files(directory: DataDirectory) -> None:
    first, second = directory.table_file(1).path, directory.table_file(2).path
    text = first.read_text()
    first.write_text(second.read_text())
    second.write_text(text)


def _lose_directory(directory: DataDirectory) -> None:
    shutil.rmtree(directory.table(1))


def _rename_directory(directory: DataDirectory) -> None:
    directory.table(1).rename(directory.table(5))


def _rename_as_dropped(directory: DataDirectory) -> None:
    directory.table(1).rename(directory.dropped(1))


@pytest.mark.parametrize(
    ("damage", "why", "left"),
    [
        (_lose_table_file, r"table\.json is missing", {"1", "2"}),
        (_damage_table_file, r"table\.json is damaged: its checksum is wrong", {"1", "2"}),
        (_swap_table_files, r"table\.json is of another table: 2, not 1", {"1", "2"}),
        (_lose_directory, r"its directory .*/tables/1 is missing", {"2"}),
        (_rename_directory, r"its directory .*/tables/1 is missing", {"5", "2"}),
        (_rename_as_dropped, r"its directory .*/tables/1 is missing", {"1.dropped", "2"}),
    ],
)
def test_a_table_that_lost_something_is_damaged_and_stays(
    directory: DataDirectory, damage: Callable[[DataDirectory], None], why: str, left: set[str]
) -> None:
    registry = _open(directory)
    lost, kept = _create(registry), _create(registry, "kept")
    _log_with_rows(directory, 1)
    damage(directory)

    for _ in range(2):
        again = _open(directory)
        with pytest.raises(TableDamagedError, match=why):
            again.table(lost.path)
        assert again.paths() == [lost.path, kept.path]
        if damage is not _swap_table_files:
            assert again.table(kept.path) == kept
        with pytest.raises(TableExistsError, match="is damaged"):
            _create(again)
        assert {path.name for path in directory.tables.iterdir()} == left


def test_what_is_no_table_stays_and_is_said(directory: DataDirectory) -> None:
    registry = _open(directory)
    _create(registry)
    dropped = _create(registry, "dropped")
    shutil.copytree(directory.table(dropped.table_id), directory.path / "copy")
    registry.drop_table([dropped.path], ())
    registry.purge(dropped.table_id)
    _create(registry, "later")
    _log_with_rows(directory, 4)
    shutil.copytree(directory.path / "copy", directory.table(dropped.table_id))
    (directory.tables / "lost").mkdir()

    for _ in range(2):
        again = _open(directory)
        assert [str(path) for path in again.paths()] == ["default.events", "default.later"]
        assert len(again.strangers) == 3
        assert all("nothing was changed" in sentence for sentence in again.strangers)
        assert "dropped, or service.json is older" in again.strangers[0]
        assert {path.name for path in directory.tables.iterdir()} == {"1", "2", "3", "4", "lost"}


def test_a_creation_that_was_cut_off_is_not_removed_once_it_has_rows(
    directory: DataDirectory,
) -> None:
    """The file that says so may be an old version of it."""
    registry = _open(directory)
    old = registry.prepare_table(table_descriptor(), created_at_us=5)
    text = directory.service_file.read_bytes()
    registry.add_table(old)
    _log_with_rows(directory, old.table_id)
    directory.service_file.write_bytes(text)

    for _ in range(2):
        again = _open(directory)
        assert again.paths() == []
        assert len(again.strangers) == 1
        assert directory.table_file(old.table_id).exists()


def test_an_old_service_file_is_refused_where_it_does_not_know_a_table(
    directory: DataDirectory,
) -> None:
    registry = _open(directory)
    old = directory.service_file.read_bytes()
    _create(registry)
    directory.service_file.write_bytes(old)

    with pytest.raises(CorruptDataError, match=r"is older than table 1, .*--rebuild-service-file"):
        _open(directory)


def test_an_old_version_of_a_table_is_noticed(directory: DataDirectory) -> None:
    registry = _open(directory)
    path = _create(registry).path
    old = directory.table_file(1).path.read_bytes()
    registry.alter_properties(path, updates={"table.log.ttl": "1h"}, removals=())
    directory.table_file(1).path.write_bytes(old)

    with pytest.raises(TableDamagedError, match=r"is an old version: it is the 1\., .* the 2\."):
        _open(directory).table(path)


def test_a_crash_between_a_table_and_its_generation_is_no_damage(directory: DataDirectory) -> None:
    registry = _open(directory)
    path = _create(registry).path
    before = directory.service_file.read_bytes()
    registry.alter_properties(path, updates={"table.log.ttl": "1h"}, removals=())
    directory.service_file.write_bytes(before)

    again = _open(directory)
    again.alter_properties(path, updates={"table.log.ttl": "2h"}, removals=())

    assert _open(directory).table(path).descriptor.properties == {"table.log.ttl": "2h"}


@pytest.mark.parametrize("damage", ["flip", "lose", "old"])
def test_a_lost_service_file_is_made_anew_from_the_tables(
    directory: DataDirectory, damage: str
) -> None:
    registry = _open(directory)
    registry.create_database("sales")
    old = directory.service_file.read_bytes()
    made = [_create(registry), _create(registry, "sales.orders")]
    with pytest.raises(InvalidRequestError, match="is sound"):
        rebuild_service_file(directory)
    if damage == "lose":
        directory.service_file.unlink()
    else:
        data = bytearray(directory.service_file.read_bytes())
        data[40] ^= 1
        directory.service_file.write_bytes(old if damage == "old" else data)
    with pytest.raises(CorruptDataError, match="--rebuild-service-file"):
        _open(directory)

    assert rebuild_service_file(directory) == ["default.events", "sales.orders"]

    again = _open(directory)
    assert again.tables() == made
    assert again.service_id == registry.service_id
    assert again.reserve_table_id() > 1_000


def test_tables_that_do_not_agree_make_no_service_file(
    directory: DataDirectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _create(_open(directory))
    other = DataDirectory.open(tmp_path_factory.mktemp("other"))
    registry = _open(other)
    _create(registry, "a")
    _create(registry, "b")
    other.close()
    shutil.copytree(other.table(2), directory.table(2))
    directory.service_file.unlink()

    with pytest.raises(CorruptDataError, match="not all of one service"):
        rebuild_service_file(directory)
    shutil.rmtree(directory.table(2))
    _damage_table_file(directory)
    with pytest.raises(CorruptDataError, match=r"put the file back, or move .*/1 away"):
        rebuild_service_file(directory)
    assert not directory.service_file.exists()


def test_names_of_partition_fields_are_taken_for_ever(directory: DataDirectory) -> None:
    registry = _open(directory)
    columns = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us")), ("place", pa.string())])
    info = _create(
        registry,
        schema=columns,
        bucket_key=("id",),
        partitioned_by=(PartitionField.parse("day(at)"),),
    )
    path = info.path

    def change(**change: Any) -> TableInfo:
        return registry.alter_schema(path, [change])

    registry.alter_partitioning(path, ["place"])
    change(rename="place", to="town")
    registry.alter_properties(
        path, updates={BATCH_PARTITION_PROPERTY: "truncate(2, town)"}, removals=()
    )
    registry.alter_properties(path, updates={}, removals=[BATCH_PARTITION_PROPERTY])
    registry.alter_partitioning(path, [])

    registry = _open(directory)
    for name in ("at_day", "AT_DAY", "place", "id_bucket", "town_trunc"):
        with pytest.raises(InvalidSchemaError, match=f"no column can be called '{name}' any more"):
            change(add=name, type="bigint")
    with pytest.raises(InvalidSchemaError, match="no column can be called 'at_day' any more"):
        change(rename="id", to="at_day")
    with pytest.raises(InvalidSchemaError, match="no column can be called 'place' any more"):
        registry.alter_schema(
            path, [{"drop": "town", "confirm": "town"}, {"add": "place", "type": "int"}]
        )
    # The identity of this very column.
    assert change(rename="town", to="place").schema.names == ["id", "at", "place"]
    assert change(add="at_hour", type="bigint").schema.names[-1] == "at_hour"


def test_a_name_that_differs_in_case_alone_is_refused(registry: TableRegistry) -> None:
    registry.create_database("sales")
    _create(registry, "sales.events")

    with pytest.raises(InvalidNameError, match=r"'sales.Events' would differ from table"):
        _create(registry, "sales.Events")
    with pytest.raises(InvalidNameError, match="'Sales' would differ from database 'sales'"):
        registry.create_database("Sales")
    registry.drop_table([TablePath("sales", "events")], ())
    assert _create(registry, "sales.Events").path.table == "Events"


def test_tables_of_earlier_builds_may_differ_in_case_alone(directory: DataDirectory) -> None:
    registry = _open(directory)
    _create(registry, "events")
    # An earlier build did not compare the name.
    other = registry.prepare_table(table_descriptor("other"), created_at_us=5)
    registry.add_table(dataclasses.replace(other, descriptor=table_descriptor("Events")))

    again = _open(directory)

    assert [str(info.path) for info in again.tables()] == ["default.Events", "default.events"]
    assert again.table(TablePath("default", "Events")).table_id == other.table_id
