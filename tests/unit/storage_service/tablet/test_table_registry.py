"""Databases and tables survive a restart, and nothing half-made does."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.errors import (
    CorruptDataError,
    DatabaseExistsError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    InvalidNameError,
    InvalidRequestError,
    RequestTooLargeError,
    StorageFailedError,
    StreamhouseError,
    TableExistsError,
    TableNotFoundError,
    UnknownOptionError,
    UnknownOutcomeError,
)
from streamhouse.storage_service.model.table import TableInfo, TablePath
from streamhouse.storage_service.tablet.data_directory import DataDirectory
from streamhouse.storage_service.tablet.table_registry import TableRegistry
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
    return registry.create_table(table_descriptor(path, **fields), created_at_us=5)


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
    registry.drop_table(first.path)

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
    registry.drop_table(TablePath("sales", "events"))
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
        match=r"did you mean 'table\.log\.ttl'|not a duration",
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
    registry.drop_table(info.path)
    assert directory.dropped(info.table_id).exists(), "the files wait for purge"

    again = _open(directory)

    assert again.tables() == []
    assert list(directory.tables.iterdir()) == []


def test_what_a_crash_left_of_creating_is_deleted_at_the_next_start(
    directory: DataDirectory,
) -> None:
    _open(directory)
    (directory.table(7) / "bucket-0").mkdir(parents=True)

    again = _open(directory)

    assert again.tables() == []
    assert list(directory.tables.iterdir()) == []


def test_data_of_another_version_is_not_touched(directory: DataDirectory) -> None:
    _open(directory)
    value = json.loads(directory.service_file.read_text())
    directory.service_file.write_text(json.dumps({**value, "format": 9}))

    with pytest.raises(CorruptDataError, match=r"format 9 is not 1; .* another version"):
        _open(directory)


def test_tables_without_a_service_file_are_not_taken_for_a_new_directory(
    directory: DataDirectory,
) -> None:
    _create(_open(directory))
    directory.service_file.unlink()

    with pytest.raises(CorruptDataError, match=r"has tables but no service\.json"):
        _open(directory)


def test_a_table_file_in_the_wrong_place_is_refused(directory: DataDirectory) -> None:
    info = _create(_open(directory))
    directory.table(info.table_id).rename(directory.table(50))

    with pytest.raises(CorruptDataError, match=r"/50: its table\.json is of table 1"):
        _open(directory)


def _fail(monkeypatch: pytest.MonkeyPatch, *names: str, after: int = 0) -> None:
    """Make these functions of `os` fail, each after `after` calls that work."""
    for name in names:
        real, calls = getattr(os, name), [0]

        def fail(*args: Any, real: Any = real, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > after:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("synced", range(6))
def test_a_table_made_again_after_a_failed_sync_is_the_one_a_restart_finds(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, synced: int
) -> None:
    registry = _open(directory)
    for number in range(9):
        registry.create_table(table_descriptor(f"before_{number}"), created_at_us=1)
        registry.drop_table(TablePath.parse(f"before_{number}"))
    with monkeypatch.context() as failing:
        # The sync fails, and then the files cannot be deleted either.
        _fail(failing, "fsync", after=synced)
        _fail(failing, "rename")
        try:
            registry.create_table(table_descriptor("orders"), created_at_us=1)
        except (StorageFailedError, UnknownOutcomeError):
            assert registry.tables() == []
            made = None
        else:
            made = registry.table(TablePath.parse("orders"))
    if made is None:
        # Ids of two digits: the later one is not the one whose name sorts last.
        made = registry.create_table(table_descriptor("orders"), created_at_us=1)

    assert _open(directory).tables() == [made]
    assert _open(directory).tables() == [made]


def test_a_change_whose_name_is_not_synced_has_an_unknown_outcome(
    registry: TableRegistry, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.create_table(table_descriptor("orders"), created_at_us=1)
    path = TablePath.parse("orders")
    for synced, expected in ((0, StorageFailedError), (1, UnknownOutcomeError)):
        with monkeypatch.context() as failing:
            _fail(failing, "fsync", after=synced)
            with pytest.raises(expected):
                registry.alter_properties(path, updates={"table.log.ttl": "1h"}, removals=())
        found = _open(directory).table(path).descriptor.properties.get("table.log.ttl")
        assert found == (None if expected is StorageFailedError else "1h")
