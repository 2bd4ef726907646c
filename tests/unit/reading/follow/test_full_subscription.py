"""A subscription from the beginning: where it starts, what it refuses, what it finds again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.client import LogBatch
from streamhouse.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    SnapshotNotFoundError,
    StreamhouseError,
    TableNotFoundError,
    UnknownColumnError,
)
from streamhouse.reading.follow.full_subscription import TableBatch
from tests.support.held_step import around
from tests.support.key_table_world import KeyTableWorld
from tests.support.reading_client import Follower, follow
from tests.support.tiering_world import SCHEMA, rows
from tests.support.union_world import UnionWorld

KEY_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("n", pa.int64())])
Change = tuple[str, int, int]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    """One bucket with 20 rows in the lake, which the log has no more, and 10 in the log."""
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA)
        opened.append(0, rows(0, 20))
        opened.tiering.tier()
        opened.expire_log(0, 20)
        opened.append(0, rows(20, 10))
        yield opened


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[KeyTableWorld]:
    """Keys 0 to 9, tiered."""
    with KeyTableWorld(tmp_path) as opened:
        opened.create_key_table(KEY_SCHEMA)
        opened.upsert(*({"id": i, "n": i} for i in range(10)))
        opened.tiering.tier()
        yield opened


def _offsets(batches: list[TableBatch]) -> list[int]:
    return [offset for batch in batches for offset in batch.offsets.to_pylist()]


def _follower(world: UnionWorld | KeyTableWorld, **options: str) -> Follower:
    def begin(token: Mapping[str, Any] | None) -> Iterator[TableBatch]:
        said = None if token is None else json.loads(json.dumps(token))
        return follow(world.tiering.service, world.PATH, token=said, **options)

    return Follower(begin)


def test_history_is_followed_by_live_rows_and_a_token_goes_on(world: UnionWorld) -> None:
    follower = _follower(world)
    assert _offsets(follower.read()) == list(range(30))
    world.append(0, rows(30, 5))
    follower.restart()

    assert _offsets(follower.read()) == list(range(30, 35))
    assert follower.token is not None
    assert (follower.token["table"], follower.token["offsets"]) == ("db.t", {"0": 35})
    assert "consumer" not in follower.token
    assert world.tiering.service.consumers_said == {}


def test_columns_a_predicate_and_a_name_may_be_given(world: UnionWorld) -> None:
    follower = _follower(
        world, columns="__offset,id", where="id >= 18 AND id < 22", consumer="billing"
    )
    batches = follower.read()

    assert [row for batch in batches for row in batch.data.to_pylist()] == [
        {"__offset": i, "id": i} for i in range(18, 22)
    ]
    assert _offsets(batches) == list(range(18, 22))
    # All that no row is of is read, too.
    assert world.tiering.service.consumers_said == {(world.PATH, "billing"): ({0: 30}, True)}


def test_rows_that_move_while_they_are_read_are_found_in_the_lake(world: UnionWorld) -> None:
    service = world.tiering.service

    def moving(_: int, batches: Iterator[LogBatch]) -> Iterator[LogBatch]:
        service.on_read = None
        world.tiering.tier()
        world.expire_log(0, 30)
        raise OffsetOutOfRangeError("the rows have left the log")
        yield from batches

    service.on_read = moving
    follower = _follower(world, columns="id")
    follower.token = {
        "version": 1,
        "table_id": world.state().table.table_id,
        "offsets": {"0": 20},
    }

    assert _offsets(follower.read()) == list(range(20, 30))
    assert service.on_read is None


@pytest.mark.parametrize(
    ("options", "token", "error", "message"),
    [
        ({"columns": "nothing"}, None, UnknownColumnError, "has no column 'nothing'"),
        ({"where": "id >"}, None, StreamhouseError, "not a SQL expression"),
        ({"table": "db.t$log"}, None, InvalidRequestError, "subscribe to 'db.t'"),
        ({}, {"offsets": {"0": 1}}, InvalidRequestError, "is not a Streamhouse position"),
        ({}, {"version": 9, "offsets": {}}, InvalidRequestError, "has version 9"),
        (
            {},
            {"version": 1, "table": "db.u", "table_id": 1, "offsets": {"0": 1}},
            InvalidRequestError,
            "is of table 'db.u'",
        ),
        ({}, {"version": 1, "table_id": 99, "offsets": {"0": 1}}, TableNotFoundError, "dropped"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    world: UnionWorld, options: dict[str, str], token: Any, error: type, message: str
) -> None:
    path = options.pop("table", world.PATH)
    with pytest.raises(error, match=message.replace("$", r"\$")):
        list(follow(world.tiering.service, path, token=token, **options))


def test_a_token_beyond_the_table_is_refused(world: UnionWorld) -> None:
    token = {"version": 1, "table_id": world.state().table.table_id, "offsets": {"0": 31}}
    with pytest.raises(OffsetOutOfRangeError, match="has read up to offset 31"):
        list(follow(world.tiering.service, world.PATH, token=token))


def _changes(batches: list[TableBatch]) -> list[Change]:
    return [
        (row["__change_type"], row["id"], row["n"])
        for batch in batches
        for row in batch.data.to_pylist()
    ]


def test_a_restart_in_the_middle_of_the_rows_goes_on_with_their_snapshot(
    keys: KeyTableWorld,
) -> None:
    follower = _follower(keys)
    first = _changes(follower.read(1))
    follower.restart()
    pinned = keys.tiering.service.pinned_snapshots(keys.PATH)
    keys.upsert({"id": 9, "n": 99})
    keys.tiering.tier()

    rest = _changes(follower.read())

    assert list(pinned.values()) == [int((follower.seen[0].token["bootstrap"])["snapshot_id"])]
    assert first + rest == [
        *(("+I", i, i) for i in range(10)),
        ("-U", 9, 9),
        ("+U", 9, 99),
    ]
    assert keys.tiering.service.pinned_snapshots(keys.PATH) == {}


def test_if_the_snapshot_was_expired_the_current_one_has_the_rest(keys: KeyTableWorld) -> None:
    follower = _follower(keys)
    first = _changes(follower.read(1))
    follower.restart()
    keys.upsert({"id": 9, "n": 99}, {"id": 0, "n": 100})
    keys.tiering.tier()
    keys.union.expire_old_snapshots()

    rest = _changes(follower.read())

    assert first + rest == [
        *(("+I", i, i) for i in range(9)),
        ("-U", 9, 9),
        ("+U", 9, 99),
        ("-U", 0, 0),
        ("+U", 0, 100),
    ]


def test_if_the_changes_since_are_gone_too_it_ends(keys: KeyTableWorld) -> None:
    follower = _follower(keys)
    follower.read(1)
    follower.restart()
    keys.upsert({"id": 9, "n": 99})
    keys.tiering.tier()
    keys.union.expire_old_snapshots()
    keys.union.expire_log(0, 12)

    with pytest.raises(SnapshotNotFoundError, match="was expired"):
        follower.read()


def test_live_rows_never_open_the_lake(world: UnionWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = _follower(world)
    follower.read()

    def no_lake(*_: Any, **__: Any) -> Any:
        raise AssertionError("the lake was opened")

    around(monkeypatch, "lake-planning", no_lake)
    world.append(0, rows(30, 5))
    assert _offsets(follower.read()) == list(range(30, 35))
