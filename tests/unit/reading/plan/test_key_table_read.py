"""Reads of a primary key table from its log alone, and what cannot be read says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidRequestError, OffsetOutOfRangeError
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.row_form import table_columns
from tests.support.key_table_world import KeyTableWorld
from tests.support.union_world import UnionWorld

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KeyTableWorld]:
    """Two buckets; in bucket 0 key 2 was updated and key 4 deleted."""
    with KeyTableWorld(tmp_path) as opened:
        opened.create_key_table(SCHEMA, bucket_count=2)
        opened.upsert(*({"id": i, "name": f"n{i}"} for i in (0, 2, 4)), bucket=0)
        opened.upsert({"id": 1, "name": "n1"}, bucket=1)
        opened.upsert({"id": 2, "name": "new"}, bucket=0)
        opened.delete({"id": 4}, bucket=0)
        yield opened


def ids(table: pa.Table) -> list[int]:
    return sorted(table["id"].to_pylist())


def test_rows_are_the_live_versions(world: KeyTableWorld) -> None:
    found = world.union.read()

    assert sorted(found.to_pylist(), key=lambda r: r["id"]) == [
        {"id": 0, "name": "n0"},
        {"id": 1, "name": "n1"},
        {"id": 2, "name": "new"},
    ]


def test_a_table_without_rows_has_none(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as opened:
        opened.create_key_table(SCHEMA, bucket_count=2)

        assert opened.union.read() == SCHEMA.empty_table()


def test_a_filter_never_brings_an_old_version_back(world: KeyTableWorld) -> None:
    assert ids(world.union.read(where="name = 'n2'")) == []
    assert ids(world.union.read(where="id = 4")) == []
    assert world.union.read(where="id = 2", columns="name")["name"].to_pylist() == ["new"]


def test_the_changelog_has_every_change_with_its_address(world: KeyTableWorld) -> None:
    found = world.union.read("db.t$changelog")

    assert found.schema.names == [
        "id", "name", "__change_type", "__bucket", "__offset", "__timestamp",
    ]  # fmt: skip
    ours = [
        (r["__bucket"], r["__offset"], r["__change_type"], r["name"]) for r in found.to_pylist()
    ]
    assert sorted(ours) == [
        (0, 0, "+I", "n0"),
        (0, 1, "+I", "n2"),
        (0, 2, "+I", "n4"),
        (0, 3, "-U", "n2"),
        (0, 4, "+U", "new"),
        (0, 5, "-D", "n4"),
        (1, 0, "+I", "n1"),
    ]


def test_the_changelog_is_bounded_and_filtered(world: KeyTableWorld) -> None:
    some = world.union.read(
        "db.t$changelog", startingOffsets='{"0": 3}', endingOffsets='{"0": 5, "1": 0}'
    )
    deletes = world.union.read("db.t$changelog", where="__change_type = '-D'", columns="id")
    since = world.union.read(
        "db.t$changelog", startingTimestamp=world.moments[-1].timestamp_us // 1_000, columns="id"
    )

    assert some["__change_type"].to_pylist() == ["-U", "+U"]
    assert deletes.to_pydict() == {"id": [4]}
    assert ids(since) == [4]


def test_the_log_has_change_types_and_metadata_if_wanted(world: KeyTableWorld) -> None:
    assert world.union.read("db.t$log").schema.names == ["id", "name", "__change_type"]
    assert world.union.read("db.t$log", columns="__change_type,id").schema.names == [
        "__change_type",
        "id",
    ]


def test_a_log_table_has_a_changelog_of_appends(tmp_path: Path) -> None:
    with UnionWorld(tmp_path) as world:
        world.tiering.create_table(UnionWorld.PATH, SCHEMA)
        world.append(0, pa.record_batch([pa.array([1, 2]), pa.array(["a", "b"])], schema=SCHEMA))
        world.tiering.tier()
        world.append(0, pa.record_batch([pa.array([3]), pa.array(["c"])], schema=SCHEMA))

        found = world.read("db.t$changelog", columns="id,__change_type")

        assert sorted(found["id"].to_pylist()) == [1, 2, 3]
        assert set(found["__change_type"].to_pylist()) == {"+A"}


def test_a_time_in_the_past(world: KeyTableWorld) -> None:
    for moment in world.moments:
        found = world.union.read(asOfTimestamp=moment.timestamp_us // 1_000)

        assert ids(found) == sorted(row["id"] for row in world.rows_at(moment.ends).values())


def test_a_time_before_the_table_is_refused(world: KeyTableWorld) -> None:
    created_ms = world.union.state().table.created_at_us // 1_000

    assert world.union.read(asOfTimestamp=created_ms).num_rows == 0
    with pytest.raises(InvalidRequestError, match=r"there was no table 'db\.t' at 1970-01-01T"):
        world.union.read(asOfTimestamp=0)


def test_a_log_that_lost_changes_is_not_read_as_rows(world: KeyTableWorld) -> None:
    world.union.expire_log(0, 2)

    with pytest.raises(OffsetOutOfRangeError, match=r"bucket 0: changes \[0, 2\) have left") as why:
        world.union.read()
    with pytest.raises(OffsetOutOfRangeError):
        world.union.read(failOnDataLoss=False)

    assert "table 'db.t'" in str(why.value)
    assert len(world.union.read("db.t$changelog", columns="id")) == 5


def test_changes_that_left_the_log_since_the_load(world: KeyTableWorld) -> None:
    state = world.union.state()
    options = read_options({"table": "db.t", "endpoint": "http://memory"}, use=BATCH)
    output = table_columns(state.table, columns=None, include_metadata=False, has_change_type=False)
    world.union.expire_log(0, 2)

    with pytest.raises(OffsetOutOfRangeError, match="left the log after the table was loaded"):
        plan_batch_read(world.union.client, state, options, output)


def test_a_time_that_nobody_can_tell_of_is_refused(world: KeyTableWorld) -> None:
    world.union.expire_log(0, 4)

    with pytest.raises(OffsetOutOfRangeError, match="not known any more"):
        world.union.read(asOfTimestamp=world.moments[0].timestamp_us // 1_000)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("db.t", {"startingOffsets": "earliest"}, "'startingOffsets' has no meaning for the rows"),
        ("db.t", {"endingOffsets": '{"0": 1}'}, "'endingOffsets' has no meaning for the rows"),
        ("db.t", {"startingTimestamp": 0}, "'startingTimestamp' has no meaning for the rows"),
        ("db.t", {"endingTimestamp": 0}, "'endingTimestamp' has no meaning for the rows"),
        ("db.t", {"where": "__change_type = '+I'"}, "which have no __change_type"),
        ("db.t", {"columns": "id,__change_type"}, "which have no __change_type"),
        ("db.t$lake", {"asOfTimestamp": 0}, "cannot be used with 'db.t[$]lake'"),
        ("db.t$changelog", {"asOfTimestamp": 0}, "use endingTimestamp"),
        ("db.t$changelog", {"asOfSnapshot": 1}, "cannot be used with 'db.t[$]changelog'"),
        ("db.t", {"readChangeFeed": True}, "no meaning for a batch read"),
    ],
)
def test_bounds_that_make_no_sense_for_rows(
    world: KeyTableWorld, name: str, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        world.union.read(name, **options)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[KeyTableWorld]:
    """Two rounds of full history, of which the log has nothing any more, and one change since."""
    with KeyTableWorld(tmp_path) as world:
        world.create_key_table(SCHEMA, properties={"table.datalake.changelog": "true"})
        world.upsert(*({"id": i, "name": f"n{i}"} for i in range(3)))
        world.tiering.tier()
        world.upsert({"id": 1, "name": "new"})
        world.delete({"id": 2})
        world.tiering.tier()
        world.union.expire_log(0, 6)
        world.upsert({"id": 9, "name": "n9"})
        yield world


def test_full_history_reaches_back_before_the_log(history: KeyTableWorld) -> None:
    found = history.union.read("db.t$changelog")
    kinds = ["+I", "+I", "+I", "-U", "+U", "-D", "+I"]

    # One bucket: one task, in order.
    assert found["__change_type"].to_pylist() == kinds
    assert found["__offset"].to_pylist() == list(range(7))
    deletes = history.union.read("db.t$changelog", where="__change_type = '-D'", columns="id,name")
    assert deletes.to_pylist() == [{"id": 2, "name": "n2"}]
    since = history.union.read(
        "db.t$changelog",
        startingTimestamp=history.moments[1].timestamp_us // 1_000,
        columns="__offset",
    )
    assert since["__offset"].to_pylist() == [3, 4, 5, 6]
    some = history.union.read(
        "db.t$changelog", startingOffsets='{"0": 2}', endingOffsets='{"0": 4}'
    )
    assert some["__change_type"].to_pylist() == ["+I", "-U"]
    assert history.union.read("db.t$log", columns="id").num_rows == 1
    assert ids(history.union.read()) == [0, 1, 9]
