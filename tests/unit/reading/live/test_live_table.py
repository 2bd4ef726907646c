"""Live cuts of the lake tables of a service in memory: what they have, and when they are made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table import StaticTable

from streamhouse.client import LogBatch
from streamhouse.core.errors import (
    CorruptDataError,
    HistoryDivergedError,
    OffsetOutOfRangeError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.lake.facts import LakeRole, LakeState
from streamhouse.lake.catalogs._sql_catalog import open_catalog
from streamhouse.lake.commits.orphans import find_orphans
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.staged_lake import StagedLake
from streamhouse.reading.live.live_table import (
    LOOK_S,
    STEPS_MAX,
    LiveCut,
    LiveLakeTable,
    kept_steps,
)
from streamhouse.reading.tail.round_planner import PlanLimits
from tests.support.foreign_deletes import commit_compaction
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed, TieringWorld, dying_at, rows

NOW_S = 1_800_000_000.0


class LiveWorld:
    """The live cuts of the table `db.t` of a tiering world."""

    def __init__(self, tiering: TieringWorld) -> None:
        self.tiering = tiering
        self.service = tiering.service
        self.catalog = open_catalog(self.tiering.catalog)
        self.lake = StagedLake(self.catalog, tiering.catalog)
        self.live = LiveLakeTable(self.lake)

    def __enter__(self) -> LiveWorld:
        return self

    def __exit__(self, *error: object) -> None:
        self.catalog.close()

    def served(self) -> ServedTable:
        state = self.service.table_state("db.t")
        return ServedTable(info=state.table, lake=state.lake, positions=state.positions)

    def cut(self, *, now_s: float = NOW_S) -> LiveCut:
        return self.live.cut(self.served(), self.service, now_s=now_s)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LiveWorld]:
    with TieringWorld(tmp_path) as tiering, LiveWorld(tiering) as opened:
        tiering.create_table(bucket_count=2)
        yield opened


def read(cut: LiveCut) -> pa.Table:
    """The rows that stock pyiceberg reads."""
    assert cut.metadata_location is not None
    return StaticTable.from_metadata(cut.metadata_location).scan().to_arrow()


def ids(cut: LiveCut) -> list[int]:
    return sorted(read(cut)["id"].to_pylist())


def live_files(world: LiveWorld) -> list[Path]:
    """All files of cuts below the table."""
    return sorted(p for p in world.tiering.folder.rglob("live/*/*") if p.is_file())


def broken_read(bucket: int, pages: Iterator[LogBatch]) -> Iterator[LogBatch]:
    """The second bucket's log cannot be read."""
    if bucket == 1:
        raise CorruptDataError("broken")
    return pages


def test_a_table_that_was_never_tiered_has_its_rows(world: LiveWorld) -> None:
    empty = world.cut()
    world.service.append("db.t", 0, rows(0, 3))

    assert (ids(empty), empty.base_snapshot_id) == ([], None)
    assert ids(world.cut()) == [0, 1, 2]
    assert not world.catalog.table_exists("db.t")


def test_a_cut_has_the_rows_of_lake_and_log(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    snapshot_id = world.tiering.tier().snapshot_id
    world.service.append("db.t", 0, rows(3, 2))
    world.service.append("db.t", 1, rows(5, 2))

    cut = world.cut()

    assert ids(cut) == list(range(7))
    assert (cut.base_snapshot_id, cut.end_offsets) == (snapshot_id, {0: 5, 1: 2})
    assert len(world.tiering.lake_table().snapshots()) == 1
    assert cut.metadata.current_snapshot_id not in (None, snapshot_id)


def test_cuts_of_a_table_of_version_3(tmp_path: Path) -> None:
    with TieringWorld(tmp_path) as tiering, LiveWorld(tiering) as world:
        tiering.create_table(properties={"table.datalake.format-version": "3"})
        world.service.append("db.t", 0, rows(0, 3))

        assert ids(world.cut()) == [0, 1, 2]
        tiering.tier()
        world.service.append("db.t", 0, rows(3, 2))
        cut = world.cut()

        assert ids(cut) == list(range(5))
        assert (cut.metadata.format_version, cut.metadata.next_row_id) == (3, 5)


def test_the_snapshot_of_a_cut_is_alone_and_older_than_every_transaction_that_reads(
    world: LiveWorld,
) -> None:
    """DuckDB reads the table as of its transaction's begin: the base would be read in its place."""
    world.service.append("db.t", 0, rows(0, 3))
    hot = world.cut()
    snapshot_id = world.tiering.tier().snapshot_id
    tiered = world.cut()
    world.service.append("db.t", 0, rows(3, 2))
    shown_ms = world.service.describe_table("db.t").created_at_us // 1_000 - 86_400_000

    assert tiered.metadata.current_snapshot_id == snapshot_id
    for cut in (hot, tiered, world.cut()):
        metadata = cut.metadata
        assert [s.snapshot_id for s in metadata.snapshots] == [metadata.current_snapshot_id]
        assert [e.timestamp_ms for e in metadata.snapshot_log] == [shown_ms]
        assert metadata.snapshots[0].timestamp_ms == metadata.last_updated_ms == shown_ms


def test_a_table_without_a_change_gets_the_same_cut(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))

    assert world.cut() is world.cut(now_s=NOW_S + 60)


def test_a_next_cut_writes_only_the_rows_that_came_since(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.cut()
    world.service.append("db.t", 1, rows(3, 2))

    cut = world.cut()

    assert (ids(cut), cut.rows_written) == ([0, 1, 2, 3, 4], 2)


def test_many_rows_are_written_bucket_beside_bucket(world: LiveWorld) -> None:
    count = 40_000
    for bucket in (0, 1):
        world.service.append("db.t", bucket, rows(bucket * count, count))

    cut = world.cut()

    assert cut.rows_written == 2 * count
    assert ids(cut) == list(range(2 * count))
    assert not [t for t in threading.enumerate() if t.name.startswith("live_write")]


def test_a_failed_cut_of_many_rows_leaves_no_file(world: LiveWorld) -> None:
    for bucket in (0, 1):
        world.service.append("db.t", bucket, rows(bucket * 40_000, 40_000))
    world.service.on_read = broken_read

    with pytest.raises(CorruptDataError, match="broken"):
        world.cut()
    assert live_files(world) == []


def test_a_cut_is_made_anew_after_a_round(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.cut()
    world.tiering.tier()
    world.service.append("db.t", 0, rows(3, 1))

    cut = world.cut()

    assert (ids(cut), cut.rows_written) == ([0, 1, 2, 3], 1)
    assert cut.base_snapshot_id == world.tiering.lake_table().metadata.current_snapshot_id


def test_a_cut_is_made_anew_after_a_quarter_of_an_hour(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    old = world.cut()

    new = world.cut(now_s=NOW_S + 900)

    assert (new.rows_written, old.made_s, new.made_s) == (3, NOW_S, NOW_S + 900)


def test_updates_and_deletes_of_cold_and_hot_rows_are_right(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as keys, LiveWorld(keys.tiering) as world:
        keys.create_key_table(bucket_count=2)

        def shown() -> dict[int, float]:
            return {row["id"]: row["amount"] for row in read(world.cut()).to_pylist()}

        keys.upsert(*({"id": n, "region": "a", "amount": 1.0} for n in range(10)))
        assert shown() == dict.fromkeys(range(10), 1.0)
        keys.tiering.tier()
        keys.upsert(*({"id": n, "region": "b", "amount": 2.0} for n in range(5, 12)))
        keys.delete({"id": 0}, {"id": 11})
        expected = {n: 1.0 if n < 5 else 2.0 for n in range(1, 11)}
        assert shown() == expected
        keys.upsert({"id": 10, "region": "c", "amount": 3.0})
        keys.delete({"id": 1}, {"id": 5})
        expected = {n: v for n, v in expected.items() if n not in (1, 5)} | {10: 3.0}
        assert shown() == expected
        keys.tiering.tier()
        assert shown() == expected


def test_small_steps_become_one_and_a_row_is_written_again_a_few_times(world: LiveWorld) -> None:
    rows_written = []
    for n in range(70):
        world.service.append("db.t", 0, rows(n, 1))
        cut = world.cut()
        assert ids(cut) == [*range(n + 1)]
        rows_written.append(cut.rows_written)
        files = StaticTable.from_metadata(cut.metadata_location or "").inspect.files()
        assert files.num_rows <= STEPS_MAX
    assert rows_written[:8] == [1, 1, 1, 4, 1, 1, 1, 4]
    assert sum(rows_written) < 4 * 70


@given(st.lists(st.integers(1, 1_000), max_size=200))
def test_steps_stay_few_and_large_ones_stay(changes: list[int]) -> None:
    steps: list[int] = []
    for new in changes:
        kept = kept_steps(steps, new)
        assert kept == len(steps) or len(steps) - kept >= 3
        steps = [*steps[:kept], sum(steps[kept:]) + new]
        assert len(steps) <= STEPS_MAX
    assert sum(steps) == sum(changes)


def test_more_rows_than_a_round_takes_are_refused(world: LiveWorld) -> None:
    live = LiveLakeTable(world.lake, limits=PlanLimits(rows_max=2))
    world.service.append("db.t", 0, rows(0, 3))

    with pytest.raises(UnavailableError, match=r"'db\.t': 3 rows wait for a round.*: run a round"):
        live.cut(world.served(), world.service, now_s=NOW_S)
    world.service.change_layout("db.t", {"table.datalake.enabled": "false"})
    with pytest.raises(UnavailableError, match=r"set table\.datalake\.enabled to true, run"):
        live.cut(world.served(), world.service, now_s=NOW_S)


def test_rows_that_left_the_log_before_the_first_round_are_no_rows(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.service.append("db.t", 0, rows(3, 2))
    world.service.expire_log("db.t", 0, 3)

    assert ids(world.cut()) == [3, 4]
    world.service.append("db.t", 0, rows(5, 4))
    assert ids(world.cut()) == [3, 4, 5, 6, 7, 8]
    world.service.expire_log("db.t", 0, 5)
    assert ids(world.cut()) == [5, 6, 7, 8]
    world.service.append("db.t", 1, rows(9, 1))
    world.service.expire_log("db.t", 0, 9)
    # What has left the log does not wait for a round.
    world.live.limits = PlanLimits(rows_max=2)
    assert ids(world.cut()) == [9]


def test_rows_that_left_the_log_after_the_last_round_are_missed_as_by_a_read(
    world: LiveWorld,
) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.tiering.tier()
    world.service.append("db.t", 0, rows(3, 2))
    assert ids(world.cut()) == [0, 1, 2, 3, 4]
    world.service.expire_log("db.t", 0, 5)

    with pytest.raises(OffsetOutOfRangeError, match="offsets 3 to 4 are neither in the lake nor"):
        world.cut()


def test_a_round_that_is_not_registered_changes_nothing(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    snapshot_id = world.tiering.tier().snapshot_id
    world.service.append("db.t", 0, rows(3, 2))
    before = world.served()
    with pytest.raises(Killed):
        world.tiering.round(checkpoint=dying_at("committed")).run()
    world.service.append("db.t", 0, rows(5, 1))

    cut = world.live.cut(before, world.service, now_s=NOW_S)

    assert (ids(cut), cut.base_snapshot_id) == ([0, 1, 2, 3, 4], snapshot_id)
    assert ids(world.cut()) == [0, 1, 2, 3, 4, 5]


def test_a_first_round_that_is_not_registered_changes_nothing(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    with pytest.raises(Killed):
        world.tiering.round(checkpoint=dying_at("committed")).run()
    world.service.append("db.t", 1, rows(3, 2))

    cut = world.cut()

    assert (ids(cut), cut.base_snapshot_id) == ([0, 1, 2, 3, 4], None)


def test_a_registered_snapshot_that_is_gone_is_refused_in_a_sentence(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.tiering.tier()
    world.service.append("db.t", 0, rows(3, 2))
    before = world.served()
    world.tiering.tier()
    table = world.tiering.lake_table()
    table.maintenance.expire_snapshots().by_id(before.lake.snapshot_id or 0).commit()

    with pytest.raises(UnavailableError, match=r"'db\.t' no longer has snapshot.*load the table"):
        world.live.cut(before, world.service, now_s=NOW_S)


def test_a_lake_table_of_other_rows_is_refused(world: LiveWorld) -> None:
    served = replace(world.served(), lake=LakeState(tiered_offsets={0: 0, 1: 0}, diverged="other"))

    with pytest.raises(HistoryDivergedError, match=r"other\. 'db\.t\$lake' and"):
        world.live.cut(served, world.service, now_s=NOW_S)


def test_a_table_made_again_has_its_own_rows_only(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.tiering.tier()
    world.cut()
    world.service.drop_table("db.t")
    world.tiering.create_table(bucket_count=2)
    world.service.append("db.t", 0, rows(7, 1))

    cut = world.cut()

    assert ids(cut) == [7]
    world.tiering.tier()
    assert ids(world.cut()) == [7]


def test_a_failed_cut_leaves_no_file_and_the_next_is_whole(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.cut()
    before = live_files(world)
    world.service.append("db.t", 0, rows(3, 1))
    world.service.append("db.t", 1, rows(4, 1))
    world.service.on_read = broken_read

    with pytest.raises(CorruptDataError, match="broken"):
        world.cut()

    assert live_files(world) == before
    world.service.on_read = None
    assert ids(world.cut()) == [0, 1, 2, 3, 4]


def test_an_overwrite_takes_all_rows_away(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.tiering.tier()
    world.service.append("db.t", 1, rows(3, 3))
    assert ids(world.cut()) == [0, 1, 2, 3, 4, 5]
    world.service.overwrite("db.t")
    assert ids(world.cut()) == []
    world.service.append("db.t", 0, rows(9, 1))
    assert ids(world.cut()) == [9]


def test_rows_that_reached_their_time_to_live_are_left_out(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 5))
    world.service.append("db.t", 1, rows(5, 5))
    world.tiering.tier()
    world.service.append("db.t", 0, rows(10, 1))
    state = world.service.table_state("db.t").lake
    world.service.set_lake("db.t", replace(state, expired_offsets={0: 3, 1: 5}))

    assert ids(world.cut()) == [3, 4, 10]


def test_a_batch_layout_has_the_rows_of_now(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as keys, LiveWorld(keys.tiering) as world:
        properties = {"table.datalake.batch-layout.sort": "amount"}
        keys.create_key_table(bucket_count=2, properties=properties)
        live = LiveLakeTable(world.lake, role=LakeRole.BATCH)

        def shown() -> dict[int, float]:
            cut = live.cut(world.served(), world.service, now_s=NOW_S)
            return {row["id"]: row["amount"] for row in read(cut).to_pylist()}

        keys.upsert(*({"id": n, "region": "a", "amount": 1.0} for n in range(4)))
        assert shown() == dict.fromkeys(range(4), 1.0)
        keys.tiering.tier()
        keys.upsert({"id": 0, "region": "a", "amount": 2.0})
        keys.delete({"id": 1})
        assert shown() == {0: 2.0, 2: 1.0, 3: 1.0}


def test_a_batch_layout_that_lacks_rows_of_the_lake_waits_for_a_round(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.tiering.tier()
    world.service.expire_log("db.t", 0, 3)
    world.service.change_layout("db.t", {"table.datalake.batch-layout.sort": "name"})
    live = LiveLakeTable(world.lake, role=LakeRole.BATCH)

    with pytest.raises(UnavailableError, match=r"batch layout of table 'db\.t' lacks rows.*--once"):
        live.cut(world.served(), world.service, now_s=NOW_S)


@pytest.mark.parametrize("role", [LakeRole.CHANGES, LakeRole.BATCH])
def test_a_table_without_side_tables_has_no_cuts_of_them(world: LiveWorld, role: LakeRole) -> None:
    live = LiveLakeTable(world.lake, role=role)

    with pytest.raises(TableNotFoundError, match=r"no lake table 'db\.t\$"):
        live.cut(world.served(), world.service, now_s=NOW_S)


def test_a_search_for_orphans_leaves_files_of_cuts_alone(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    world.tiering.tier()
    world.service.append("db.t", 0, rows(3, 1))
    cut = world.cut()
    files = LakeFilesystem(world.tiering.catalog.properties)

    orphans = find_orphans(world.tiering.lake_table(), files, modified_before_ms=1 << 60)

    assert orphans == []
    assert ids(cut) == [0, 1, 2, 3]


def test_rows_deleted_by_another_engine_are_gone_seconds_later(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 4))
    world.tiering.tier()
    world.service.append("db.t", 0, rows(4, 2))
    assert ids(world.cut()) == [0, 1, 2, 3, 4, 5]
    world.tiering.lake_table().delete("id = 1")

    cut = world.cut(now_s=NOW_S + LOOK_S)

    assert ids(cut) == [0, 2, 3, 4, 5]
    assert world.cut(now_s=NOW_S + 2 * LOOK_S) is cut


def test_forbidden_changes_by_another_engine_are_not_shown(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as keys, LiveWorld(keys.tiering) as world:
        keys.create_key_table()
        keys.upsert(*({"id": n, "region": "a", "amount": 1.0} for n in range(4)))
        keys.tiering.tier()
        keys.tiering.lake_table().delete("id = 1")
        keys.upsert({"id": 2, "region": "b", "amount": 2.0})

        assert ids(world.cut()) == [0, 1, 2, 3]


def test_a_compaction_by_another_engine_is_read_in_place_of_the_registered_snapshot(
    world: LiveWorld,
) -> None:
    world.service.append("db.t", 0, rows(0, 4))
    world.tiering.tier()
    table = world.tiering.lake_table()
    commit_compaction(table)
    table.refresh()
    table.maintenance.expire_snapshots().by_id(world.served().lake.snapshot_id or 0).commit()
    world.service.append("db.t", 0, rows(4, 1))

    cut = world.cut()

    assert ids(cut) == [0, 1, 2, 3, 4]
    assert cut.base_snapshot_id == table.refresh().metadata.current_snapshot_id


def test_the_identity_of_a_table_stays_over_rounds_and_new_beginnings(world: LiveWorld) -> None:
    world.service.append("db.t", 0, rows(0, 3))
    cuts = [world.cut(), world.cut(now_s=NOW_S + 900)]
    world.tiering.tier()
    cuts.append(world.cut(now_s=NOW_S + 900))
    world.service.drop_table("db.t")
    world.tiering.create_table(bucket_count=2)
    made_again = world.cut(now_s=NOW_S + 900)

    assert len({cut.metadata.table_uuid for cut in cuts}) == 1
    assert made_again.metadata.table_uuid != cuts[0].metadata.table_uuid
