"""Lake tables that another service takes over: what it learns, who is fenced, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from streamhouse.core.backoff import Backoff
from streamhouse.core.errors import (
    CommitConflictError,
    FencedError,
    StreamhouseError,
    TableExistsError,
    TableNotFoundError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.lake.guards.adoptable_lake import (
    QUIET_MS,
    AdoptableLake,
    find_adoptable,
)
from streamhouse.lake.guards.served_tables import ServedTable
from streamhouse.lake.snapshots.live_files import live_data_files, newest_row_us
from streamhouse.lake.tables._description import TABLE_PROPERTY
from tests.support.faulty_catalog import missing_files
from tests.support.held_step import lower
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import SCHEMA, TieringWorld, rows

PATH = TablePath("db", "t")


class OtherService:
    """Another service, which has no tables."""

    service_id = "another"

    def with_id(self, _table_id: int) -> ServedTable | None:
        return None

    def named(self, _path: str) -> ServedTable | None:
        return None


def _find(
    world: TieringWorld, *, now_ms: int | None = None, catalog: Catalog | None = None, **more: Any
) -> AdoptableLake:
    table = world.lake_table()
    last = table.current_snapshot()
    known_ms = 0 if last is None else last.timestamp_ms
    return find_adoptable(
        catalog or table.catalog,
        PATH,
        more.pop("tables", OtherService()),
        is_forced=more.pop("is_forced", False),
        now_ms=known_ms + QUIET_MS if now_ms is None else now_ms,
    )


def _tiered(world: TieringWorld, **options: Any) -> TableInfo:
    info = world.create_table(bucket_count=2, **options)
    world.service.append("db.t", 0, rows(0, 5))
    world.service.append("db.t", 1, rows(50, 7))
    world.tier()
    return info


def test_a_lake_table_says_what_its_table_is(world: TieringWorld) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("tiny", pa.int8(), metadata={"comment": "of the lake, an int"}),
            pa.field("place", pa.struct([("city", pa.string())])),
        ]
    )
    batch = pa.record_batch(
        [pa.array([1]), pa.array([2], pa.int8()), pa.array([{"city": "x"}])], schema=schema
    )
    info = world.create_table(
        schema=schema,
        bucket_count=3,
        bucket_key=("id", "tiny"),
        partitioned_by=("truncate(4, id)",),
        properties={"table.log.ttl": "1h"},
    )
    world.service.append("db.t", 2, batch)
    world.tier()

    table, lake = _find(world).take_over(9, now_us=77)

    assert table.descriptor == info.descriptor
    assert (table.table_id, table.created_at_us) == (9, 77)
    assert table.adopted_from == {info.table_id: {0: 0, 1: 0, 2: 1}}
    assert table.nodes == {0: "", 1: "", 2: ""}
    current = world.lake_table().metadata
    assert lake == LakeState(
        snapshot_id=current.current_snapshot_id,
        table_uuid=str(current.table_uuid),
        tiering_epoch=2,
        tiered_offsets={0: 0, 1: 0, 2: 1},
        tiered_at_us=77,
        batch_since_epoch=2,
        maintenance_due_us=0,
    )


def test_no_commit_is_later_than_the_lake_says(world: TieringWorld) -> None:
    _tiered(world)
    # A file without bounds of its rows' times, as another engine may write it.
    with world.lake_table().transaction() as change:
        change.set_properties({"write.metadata.metrics.column.__timestamp": "none"})
    world.service.append("db.t", 1, rows(60, 3))
    world.tier()
    table = world.lake_table()
    times = table.scan(selected_fields=("__timestamp",)).to_arrow().column(0)
    field_id = table.schema().find_field("__timestamp").field_id
    bounds = [field_id in (file.upper_bounds or {}) for file in live_data_files(table)]

    assert set(bounds) == {True, False}
    newest_us = pc.max(times.cast(pa.int64())).as_py()
    assert newest_row_us(table) == newest_us
    # Rows are deleted, too; the last change of the lake is later.
    last_us = _find(world).last_commit_us()
    assert last_us >= max(newest_us, 1_000 * table.metadata.last_updated_ms)


def test_taking_over_changes_no_rows_and_keeps_the_totals(world: TieringWorld) -> None:
    _tiered(world)
    before = world.lake_table()

    _find(world).take_over(9, now_us=77)

    after = world.lake_table()
    assert after.scan().to_arrow().num_rows == 12
    snapshot, parent = after.current_snapshot(), before.current_snapshot()
    assert snapshot is not None
    assert parent is not None
    assert snapshot.parent_snapshot_id == parent.snapshot_id
    assert snapshot.summary is not None
    assert snapshot.summary["total-records"] == "12"
    assert "added-records" not in snapshot.summary.additional_properties
    assert [m.manifest_path for m in snapshot.manifests(after.io)] == [
        m.manifest_path for m in parent.manifests(before.io)
    ]


def test_an_adoption_that_was_broken_off_is_done_again(world: TieringWorld) -> None:
    _tiered(world)
    _find(world).take_over(8, now_us=1)

    again, lake = _find(world).take_over(9, now_us=2)

    assert again.adopted_from == {1: {0: 5, 1: 7}, 8: {0: 5, 1: 7}}
    assert lake.tiering_epoch == 3
    described = json.loads(world.lake_table().properties[TABLE_PROPERTY])
    assert set(described["adopted_from"]) == {"1", "8"}


@pytest.mark.parametrize("step", ["lake-opened", "files-written", "manifests-written"])
def test_a_worker_in_the_middle_of_a_round_is_fenced(world: TieringWorld, step: str) -> None:
    _tiered(world)
    world.service.append("db.t", 0, rows(20, 3))

    def adopt(done: str) -> None:
        if done == step:
            _find(world).take_over(9, now_us=77)

    with pytest.raises(StreamhouseError) as refused:
        world.round(checkpoint=adopt).run()

    assert isinstance(refused.value, FencedError), refused.value
    assert "adopted as another table" in refused.value.message
    assert world.lake_table().scan().to_arrow().num_rows == 12


def test_the_old_services_next_round_is_refused(world: TieringWorld) -> None:
    _tiered(world)
    world.service.append("db.t", 0, rows(20, 3))
    _find(world).take_over(9, now_us=77)

    with pytest.raises(StreamhouseError, match=r"another streamhouse table \(id 9, this one has"):
        world.tier()


def test_a_round_that_lands_first_makes_the_adoption_fail(world: TieringWorld) -> None:
    _tiered(world)
    found = _find(world)
    world.service.append("db.t", 0, rows(20, 3))
    world.tier()

    with pytest.raises(CommitConflictError, match="was changed while it was adopted"):
        found.take_over(9, now_us=77)

    assert world.lake_table().properties["streamhouse.table-id"] == "1"
    assert _find(world).covered.tiered_offsets == {0: 8, 1: 7}


class _Deaf(SqlCatalog):
    """A catalog that answers every commit with `error`; `is_done` says whether they land."""

    is_done = True
    error: Exception = ConnectionError("no answer")

    def commit_table(self, *arguments: Any) -> Any:
        if self.is_done:
            super().commit_table(*arguments)
        raise self.error


@pytest.fixture
def deaf(world: TieringWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Deaf]:
    lower(monkeypatch, "landing-backoff", Backoff(first_s=0.0, most_s=0.0))
    _tiered(world)
    opened = _Deaf("lake", **{k: v for k, v in world.catalog.properties.items() if k != "type"})
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "error",
    [ConnectionError("no answer"), CommitFailedException("sent twice, the second was refused")],
)
def test_a_commit_that_landed_is_found_whatever_was_answered(
    world: TieringWorld, deaf: _Deaf, error: Exception
) -> None:
    deaf.error = error

    _, lake = _find(world, catalog=deaf).take_over(9, now_us=77)

    assert lake.snapshot_id == world.lake_table().metadata.current_snapshot_id
    assert missing_files(world.lake_table()) == []


def test_a_commit_without_an_answer_may_still_land(world: TieringWorld, deaf: _Deaf) -> None:
    deaf.is_done = False
    lists = {path.name for path in world.folder.rglob("snap-*.avro")}

    with pytest.raises(UnknownOutcomeError, match=r"may have been adopted; try again.*no answer"):
        _find(world, catalog=deaf).take_over(9, now_us=77)

    assert len({path.name for path in world.folder.rglob("snap-*.avro")} - lists) == 3


def test_what_another_service_wrote_just_now_is_not_taken_from_it(
    world: TieringWorld, rest: RestWorld
) -> None:
    _tiered(world)
    last = world.lake_table().current_snapshot()
    assert last is not None
    soon = last.timestamp_ms + 12_000

    with pytest.raises(FencedError, match=r"another streamhouse service 12 s ago.*\(--adopt"):
        _find(world, now_ms=soon)
    assert _find(world, now_ms=soon, is_forced=True).owner_id == 1

    with pytest.raises(TableExistsError, match=r"this service's table 'db\.t': drop that first"):
        _find(world, now_ms=soon, tables=rest.tables)
    world.service.drop_table("db.t")
    assert _find(world, now_ms=soon, tables=rest.tables).owner_id == 1


def _no_round(world: TieringWorld) -> None:
    world.create_table(bucket_count=2)
    info = world.service.describe_table("db.t")
    world.lake().open_or_create(info, LakeState())


def _foreign(world: TieringWorld) -> None:
    catalog = load_catalog("lake", **world.catalog.properties)
    catalog.create_namespace("db")
    catalog.create_table("db.t", SCHEMA)
    catalog.close()


def _without_description(world: TieringWorld) -> None:
    _tiered(world)
    with world.lake_table().transaction() as transaction:
        transaction.remove_properties(TABLE_PROPERTY)


def _nonsense(world: TieringWorld) -> None:
    _tiered(world)
    with world.lake_table().transaction() as transaction:
        transaction.set_properties({TABLE_PROPERTY: '{"path": "db.t"}'})


def _without_column(world: TieringWorld) -> None:
    _tiered(world)
    with world.lake_table().update_schema() as update:
        update.delete_column("name")


def _without_addresses(world: TieringWorld) -> None:
    _tiered(world)
    with world.lake_table().update_schema(allow_incompatible_changes=True) as update:
        update.make_column_optional("__offset")


def _rolled_back(world: TieringWorld) -> None:
    _tiered(world)
    table = world.lake_table()
    with table.transaction() as transaction:
        transaction.set_properties({"streamhouse.tiered-offsets": "nonsense"})
    expire = table.maintenance.expire_snapshots()
    first = table.current_snapshot()
    table.delete("id >= 0")
    assert first is not None
    expire.by_ids([first.snapshot_id]).commit()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_no_round, "does not say up to which offset it has the rows of each of 2 buckets"),
        (_foreign, r"was not written by Streamhouse: its rows have no addresses \(a required"),
        (_without_description, r"does not say what its table is \(property streamhouse\.table\)"),
        (_nonsense, "its property streamhouse.table describes no table"),
        (_without_column, "has no column 'name' with field id 2 any more"),
        (_without_addresses, r"no addresses \(a required column __offset\)"),
        (_rolled_back, "does not say up to which offset"),
    ],
)
def test_what_a_table_cannot_go_on_from_is_refused(
    world: TieringWorld, spoil: Callable[[TieringWorld], None], sentence: str
) -> None:
    spoil(world)

    with pytest.raises(UnsupportedError, match=sentence):
        _find(world)


def test_no_table_is_nothing_to_adopt(world: TieringWorld) -> None:
    _tiered(world)
    catalog = world.lake_table().catalog

    for path in (TablePath("db", "u"), TablePath("nowhere", "t")):
        with pytest.raises(TableNotFoundError, match="the lake catalog has no Iceberg table"):
            find_adoptable(catalog, path, OtherService(), is_forced=True, now_ms=0)
