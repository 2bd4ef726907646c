"""The registries of several shards: one set of names, ids and databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    DatabaseExistsError,
    DatabaseNotEmptyError,
    DatabaseNotFoundError,
    InvalidNameError,
    InvalidRequestError,
    TableDamagedError,
    TableExistsError,
    UnavailableError,
)
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.table_registry import TableRegistry
from streamhouse.storage_service.ownership.shards.directory import BLOCK_IDS, ShardDirectory
from tests.support.directory_world import MemoryStore
from tests.support.in_process_service import table_descriptor

_X = TablePath("default", "x")


class _AwayStore(MemoryStore):
    is_away = False

    def create(self, key: str, data: bytes) -> bool:
        if self.is_away:
            raise UnavailableError("the store is away")
        return super().create(key, data)


@pytest.fixture
def store() -> _AwayStore:
    return _AwayStore()


@pytest.fixture
def opened(tmp_path: Path, store: _AwayStore) -> Iterator[Callable[..., TableRegistry]]:
    """Open a shard, again if it is open: the process before is gone."""
    directories: dict[str, DataDirectory] = {}

    def open_shard(shard: str, *, is_alone: bool = False) -> TableRegistry:
        if shard in directories:
            directories[shard].close()
        directories[shard] = DataDirectory.open(tmp_path / shard)
        names = None if is_alone else ShardDirectory(store, shard=shard, sleep=lambda _: None)
        return TableRegistry(
            directories[shard], databases_max=10, tables_max=10_000, buckets_max=100, names=names
        )

    yield open_shard
    for directory in directories.values():
        directory.close()


def _create(registry: TableRegistry, path: str = "x", **fields: Any) -> TableInfo:
    info = registry.prepare_table(table_descriptor(path, **fields), created_at_us=5)
    try:
        registry.add_table(info)
    except Exception:
        registry.withdraw_table(info)
        raise
    return info


Open = Callable[..., TableRegistry]


def test_shards_are_one_service_with_one_set_of_ids(opened: Open) -> None:
    a, b = opened("a"), opened("b")
    assert a.service_id == b.service_id
    ids = [_create(shard, f"t{number}").table_id for number, shard in enumerate([a, b, a, b])]
    assert len(set(ids)) == 4
    assert ids[0] // BLOCK_IDS != ids[1] // BLOCK_IDS


def test_a_name_is_of_one_shard_until_it_is_dropped(opened: Open) -> None:
    a, b = opened("a"), opened("b")
    _create(a)
    with pytest.raises(TableExistsError, match="in shard 'a'"):
        _create(b)
    a.drop_table([_X], ())
    info = _create(b)
    assert opened("b").table(_X).table_id == info.table_id
    assert opened("a").tables() == []


def test_a_service_without_shards_keeps_its_tables_and_ids(opened: Open) -> None:
    alone = opened("a", is_alone=True)
    alone.create_database("sales")
    before = _create(alone, "sales.orders")
    a = opened("a")
    assert a.table(before.path).table_id == before.table_id
    assert a.service_id == alone.service_id
    assert _create(a).table_id == before.table_id + 1
    b = opened("b")
    assert b.databases() == ["default", "sales"]
    with pytest.raises(TableExistsError):
        _create(b, "sales.orders")


def test_a_table_has_a_greater_id_than_those_before_it_that_other_shards_had(opened: Open) -> None:
    """By that its lake table is told from theirs."""

    a, b = opened("a"), opened("b")
    ids = []
    for shard in (a, b, a, a, b, opened("c"), a):
        ids.append(_create(shard).table_id)
        shard.drop_table([_X], ())
    assert ids == sorted(set(ids))
    assert _create(a, "another").table_id == ids[-1] + 1, "no name but x has a reason to skip ids"


def test_a_data_directory_of_another_service_is_refused(opened: Open) -> None:
    _create(opened("b", is_alone=True))
    opened("a")
    with pytest.raises(InvalidRequestError, match="give it a --journal of its own"):
        opened("b")


@pytest.mark.slow
def test_a_block_that_is_used_up_is_followed_by_another(opened: Open) -> None:
    a, b = opened("a"), opened("b")
    first = _create(a).table_id
    assert a.reserve_table_id(above=first + 5 * BLOCK_IDS) > first + 5 * BLOCK_IDS
    ids = {_create(b, f"b{number}").table_id for number in range(3)}
    again = opened("a")
    later = [again.reserve_table_id() for _ in range(2 * BLOCK_IDS)]
    assert len(set(later)) == len(later)
    assert not ids & set(later)


def test_what_a_crash_leaves_of_a_creation_is_cleared_at_the_start(
    opened: Open, store: _AwayStore
) -> None:
    a, b = opened("a"), opened("b")
    info = a.prepare_table(table_descriptor("x"), created_at_us=5)
    ShardDirectory(store, shard="a").hold(_X, info.table_id)
    with pytest.raises(TableExistsError):
        _create(b)
    opened("a")
    _create(b)


def test_a_name_that_cannot_be_released_is_released_later(opened: Open, store: _AwayStore) -> None:
    a, b = opened("a"), opened("b")
    _create(a)
    store.is_away = True
    a.drop_table([_X], ())
    store.is_away = False
    with pytest.raises(TableExistsError):
        _create(b)
    a.release_names()
    _create(b)


def test_a_table_is_not_created_while_the_directory_is_away(
    opened: Open, store: _AwayStore
) -> None:
    a = opened("a")
    store.is_away = True
    with pytest.raises(UnavailableError):
        _create(a)
    store.is_away = False
    _create(a)
    assert [info.path for info in opened("a").tables()] == [_X]


def test_a_table_whose_name_another_shard_has_is_out_of_use(
    opened: Open, store: _AwayStore
) -> None:
    a, b = opened("a"), opened("b")
    info = _create(a)
    # Not by anything that a shard does: as if somebody had changed the store by hand.
    names = ShardDirectory(store, shard="a")
    names.release(_X, info.table_id)
    _create(b)
    again = opened("a")
    with pytest.raises(TableDamagedError, match="in shard 'b'"):
        again.table(_X)


def test_databases_are_those_of_all_shards(opened: Open) -> None:
    a, b = opened("a"), opened("b")
    a.create_database("sales")
    with pytest.raises(DatabaseExistsError):
        b.create_database("sales")
    _create(b, "sales.orders")
    with pytest.raises(DatabaseNotEmptyError):
        a.drop_database("sales")
    b.drop_table([TablePath("sales", "orders")], ())
    a.drop_database("sales")
    with pytest.raises(DatabaseNotFoundError):
        _create(b, "sales.orders")
    assert opened("b").databases() == ["default"]


def test_a_name_of_another_shard_may_not_differ_in_case_alone(opened: Open) -> None:
    a, b = opened("a"), opened("b")
    created = _create(a, "x")
    a.create_database("sales")

    with pytest.raises(InvalidNameError, match=r"differ from table 'default.x' in case alone"):
        _create(b, "X")
    with pytest.raises(InvalidNameError, match="differ from database 'sales' in case alone"):
        b.create_database("SALES")
    a.drop_table([created.path], ())
    assert _create(b, "X").path.table == "X"
