"""A round on a lake that others touched: built upon where that is safe, else refused."""

from __future__ import annotations

import pytest
from pyiceberg.transforms import BucketTransform, IdentityTransform

from streamhouse.core.errors import (
    AlreadyExistsError,
    CorruptDataError,
    InvalidSchemaError,
    NotFoundError,
)
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.schema_change import change_schema
from streamhouse.lake.tables._evolution import evolve_lake_table
from tests.support.tiering_world import SCHEMA, TieringWorld, rows


def _filled(world: TieringWorld) -> None:
    world.create_table(bucket_count=2)
    for bucket in range(2):
        world.service.append("db.t", bucket, rows(bucket * 1_000, 10))


def _addresses(*ends: int) -> list[tuple[int, int]]:
    return [(bucket, offset) for bucket, end in enumerate(ends) for offset in range(end)]


def test_another_engines_rewrite_between_rounds_changes_nothing(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    lake_table = world.lake_table()
    lake_table.overwrite(lake_table.scan().to_arrow())
    world.service.append("db.t", 0, rows(70, 2))

    result = world.tier()

    assert (result.kind, result.row_count) == ("tiered", 2)
    assert world.addresses() == _addresses(12, 10)


def test_another_engines_rewrite_during_a_round_is_built_upon(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    world.service.append("db.t", 0, rows(70, 2))

    def rewrite(step: str) -> None:
        if step == "manifests-written" and len(world.lake_table().snapshots()) == 1:
            lake_table = world.lake_table()
            lake_table.overwrite(lake_table.scan().to_arrow())

    result = world.round(checkpoint=rewrite).run()

    assert result.tiered_offsets == {0: 12, 1: 10}
    assert world.addresses() == _addresses(12, 10)
    assert len(world.lake_table().snapshots()) == 4


def test_offsets_survive_another_engines_rewrite_and_expiry(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    lake_table = world.lake_table()
    lake_table.overwrite(lake_table.scan().to_arrow())
    head = lake_table.current_snapshot()
    assert head is not None
    gone = [s.snapshot_id for s in lake_table.snapshots() if s.snapshot_id != head.snapshot_id]
    lake_table.maintenance.expire_snapshots().by_ids(gone).commit()
    world.service.append("db.t", 1, rows(70, 3))

    result = world.tier()

    assert result.row_count == 3
    assert world.addresses() == _addresses(10, 13)


def test_a_lake_that_was_rolled_back_is_not_tiered_over(world: TieringWorld) -> None:
    _filled(world)
    first = world.tier()
    world.service.append("db.t", 1, rows(70, 3))
    world.tier()
    world.service.append("db.t", 1, rows(80, 3))
    world.lake_table().manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()

    with pytest.raises(CorruptDataError, match=r"bucket 1: it covers offsets up to 10, but 13"):
        world.tier()

    assert "rolled back" in world.service.failures("db.t")[0]


def test_a_lake_table_that_vanished_is_not_made_anew(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    world.service.append("db.t", 1, rows(70, 3))
    world.lake_table().catalog.drop_table("db.t")

    with pytest.raises(NotFoundError, match="is not in catalog 'lake', but rows were tiered to it"):
        world.tier()


def test_the_lake_table_of_a_dropped_table_is_put_aside_for_the_new_one(
    world: TieringWorld,
) -> None:
    _filled(world)
    world.tier()
    old = world.lake_table().metadata
    world.service.drop_table("db.t")
    world.create_table(bucket_count=1)
    world.service.append("db.t", 0, rows(0, 3))

    world.tier()

    assert world.addresses() == _addresses(3)
    assert world.addresses("db.t__dropped_1") == _addresses(10, 10)
    assert world.lake_table("db.t__dropped_1").metadata.table_uuid == old.table_uuid
    # The catalog proposes a free place, and workers name their table in it.
    assert world.lake_table().location().startswith(f"{old.location}-")
    assert world.lake_table().location().endswith("-2")


def test_a_lake_table_of_another_service_is_refused(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    world.service.drop_table("db.t")
    _filled(world)
    with world.lake_table().transaction() as transaction:
        transaction.set_properties({"streamhouse.service-id": "another"})

    with pytest.raises(AlreadyExistsError, match=r"another streamhouse table \(id 1, this one has"):
        world.tier()

    assert world.addresses() == _addresses(10, 10)


def test_a_lake_table_of_somebody_elses_is_left_alone(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    foreign = world.lake_table().catalog
    foreign.create_table("db.other", SCHEMA)
    world.create_table("db.other")
    world.service.append("db.other", 0, rows(0, 1))

    with pytest.raises(AlreadyExistsError, match="was not made by Streamhouse"):
        world.tier("db.other")


def test_a_service_that_knows_another_lake_table_is_told_so(world: TieringWorld) -> None:
    _filled(world)
    world.tier()
    world.service.append("db.t", 1, rows(70, 3))
    lake = world.service.table_state("db.t").lake
    world.service.set_lake(
        "db.t",
        LakeState(
            snapshot_id=lake.snapshot_id,
            table_uuid="00000000-0000-0000-0000-000000000000",
            tiering_epoch=lake.tiering_epoch,
            tiered_offsets=lake.tiered_offsets,
        ),
    )

    with pytest.raises(AlreadyExistsError, match="is not the one that was tiered to before"):
        world.tier()


def test_no_column_gets_the_name_of_another_engines_partition_field(world: TieringWorld) -> None:
    """Iceberg Java opens no table with both; the service does not know of such a field."""
    info = world.create_table()
    world.service.append("db.t", 0, rows(0, 10))
    world.tier()
    with world.lake_table().update_spec() as change:
        change.add_field("id", BucketTransform(7), "owner")
        change.add_field("name", IdentityTransform(), "label")
    found = world.lake_table()

    for added in ("owner", "Label"):
        changed = change_schema(info, [{"add": added, "type": "string"}])
        with pytest.raises(InvalidSchemaError, match=f"cannot get column '{added}', because"):
            evolve_lake_table(found, changed)
    assert world.lake_table().metadata_location == found.metadata_location
    # The identity of this very column.
    evolve_lake_table(found, change_schema(info, [{"rename": "name", "to": "label"}]))
    assert "label" in world.lake_table().schema().column_names
