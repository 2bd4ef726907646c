"""Tables about a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamhouse.core.errors import UnknownColumnError
from streamhouse.reading.plan.metadata_tables import METADATA_SCHEMAS
from tests.support.tiering_world import SCHEMA, rows
from tests.support.union_world import UnionWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[UnionWorld]:
    with UnionWorld(tmp_path) as opened:
        opened.tiering.create_table(UnionWorld.PATH, SCHEMA, bucket_count=2)
        yield opened


@pytest.mark.parametrize("part", sorted(METADATA_SCHEMAS))
def test_every_part_has_its_schema_before_the_first_row(world: UnionWorld, part: str) -> None:
    assert world.read(f"db.t${part}").schema.equals(METADATA_SCHEMAS[part])


def test_what_they_say(world: UnionWorld) -> None:
    world.append(0, rows(0, 10))
    world.append(1, rows(10, 5))
    world.tiering.tier()
    world.append(1, rows(15, 1))
    world.expire_log(0, 4)

    buckets = world.read("db.t$buckets", columns="bucket,log_start_offset,tiered_offset")
    files = world.read("db.t$files").sort_by("bucket").to_pylist()
    (snapshot,) = world.read("db.t$snapshots").to_pylist()

    assert [tuple(row.values()) for row in buckets.to_pylist()] == [(0, 4, 10), (1, 0, 5)]
    assert [(f["bucket"], f["start_offset"], f["end_offset"]) for f in files] == [
        (0, 0, 10),
        (1, 0, 5),
    ]
    assert [f["row_count"] for f in files] == [10, 5]
    assert snapshot["is_current"]
    assert snapshot["is_readable_tier"]
    assert snapshot["tiered_offsets"] == [(0, 10), (1, 5)]
    assert ("commit-user", "streamhouse-tiering") in snapshot["summary"]
    assert world.read(asOfSnapshot=snapshot["snapshot_id"]).num_rows == 15


def test_history_has_transactions_and_snapshots_in_their_order(world: UnionWorld) -> None:
    world.append(0, rows(0, 10))
    world.tiering.tier()
    known = {"operation": "append", "app_id": None, "version": None, "row_count": 3, "reason": ""}
    world.tiering.service.latest_transactions = [
        # Newest first, as the service lists them.
        known
        | {"transaction_id": "3-c", "status": "open", "begun_timestamp_us": 9 * 10**15}
        | {"timestamp_us": None, "app_id": "job", "version": 7},
        known
        | {"transaction_id": "2-b", "status": "refused", "begun_timestamp_us": 1}
        | {"timestamp_us": 20, "reason": "somebody was first"},
        known
        | {"transaction_id": "1-a", "status": "committed", "begun_timestamp_us": 2}
        | {"timestamp_us": 10},
    ]

    found = world.read("db.t$history").to_pylist()

    (snapshot,) = world.read("db.t$snapshots").to_pylist()
    assert [(row["kind"], row["status"]) for row in found] == [
        ("transaction", "committed"),
        ("transaction", "refused"),
        ("snapshot", "committed"),
        ("transaction", "open"),
    ]
    assert [row["transaction_id"] for row in found] == ["1-a", "2-b", None, "3-c"]
    assert [row["reason"] for row in found] == [None, "somebody was first", None, None]
    assert (found[3]["app_id"], found[3]["app_version"]) == ("job", 7)
    assert (found[2]["snapshot_id"], found[2]["at"]) == (
        snapshot["snapshot_id"],
        snapshot["committed_at"],
    )


def test_an_unknown_column_of_a_part(world: UnionWorld) -> None:
    with pytest.raises(UnknownColumnError, match=r"'\$files' has no column 'rows'"):
        world.read("db.t$files", columns="rows")
