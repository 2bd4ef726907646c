"""What the own workers commit through the REST catalog passes: rounds, deletes, maintenance."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import ForbiddenError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from tests.support.key_table_world import KeyTableWorld
from tests.support.log_table_world import LogTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld, rows


def test_rounds_of_a_primary_key_table(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        world.create_key_table(bucket_count=2)
        rest.serve_tiering_through_rest()
        for number in range(4):
            ids = range(number * 5, number * 5 + 20)
            world.upsert(*({"id": i, "region": f"r{number}", "amount": i / 2} for i in ids))
            world.delete({"id": number * 5})
            world.catch_up()
            assert world.in_lake() == world.live

        found = rest.client().load_table("db.t").scan().to_arrow()
        assert found.num_rows == len(world.rows)


def test_a_commit_is_not_read_again_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieringWorld(tmp_path) as world, RestWorld(world) as rest:
        world.create_table()
        world.service.append("db.t", 0, rows(0, 5))
        world.tier()
        table = rest.client().load_table("db.t")
        read: list[str] = []
        parse = SqlCatalog._convert_orm_to_iceberg
        monkeypatch.setattr(
            SqlCatalog,
            "_convert_orm_to_iceberg",
            lambda catalog, row: read.append(row.metadata_location) or parse(catalog, row),
        )

        for number in range(3):
            table.transaction().set_properties({"number": str(number)}).commit_transaction()
            table.delete(f"id = {number}")

        assert read == []
        assert world.lake_table().properties["number"] == "2"
        assert len(world.addresses()) == 2


def test_maintenance_in_step_with_rounds(tmp_path: Path) -> None:
    with LogTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        world.tiering.create_table(
            bucket_count=2, properties={"table.datalake.snapshot.min-count": "1"}
        )
        rest.serve_tiering_through_rest()
        for number in range(12):
            world.tier_rows(10, bucket=number % 2)
        world.delete((0, 3), (1, 4))

        report = world.tiering.maintain(policy=world.tiering.on_demand())

        assert report.rewritten is not None
        world.check()
        world.tier_rows(10)
        world.check()
        assert len(list(world.tiering.lake_table().scan().plan_files())) < 12


def test_a_table_of_version_3_is_tiered_and_maintained(tmp_path: Path) -> None:
    with LogTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        version = {"table.datalake.format-version": "3"}
        world.tiering.create_table(bucket_count=2, properties=version)
        rest.serve_tiering_through_rest()
        for number in range(12):
            world.tier_rows(10, bucket=number % 2)

        report = world.tiering.maintain(policy=world.tiering.on_demand())

        assert report.rewritten is not None
        world.tier_rows(10)
        world.check()
        metadata = rest.client().load_table("db.t").metadata
        assert metadata.format_version == 3
        assert metadata.next_row_id == 120 + 120 + 10


def test_another_engine_makes_a_table_of_version_3(tmp_path: Path) -> None:
    with TieringWorld(tmp_path) as world, RestWorld(world) as rest:
        client = rest.client()
        client.create_namespace("theirs")
        schema = Schema(NestedField(1, "id", LongType(), required=True))

        client.create_table("theirs.t", schema, properties={"format-version": "3"})

        made = world.lake_table("theirs.t").metadata
        assert (made.format_version, made.next_row_id) == (3, 0)


def test_rows_leave_both_layouts(tmp_path: Path) -> None:
    with LogTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        sort = {"table.datalake.batch-layout.sort": "id"}
        world.tiering.create_table(properties=sort | {"table.datalake.ttl": "100s"})
        rest.serve_tiering_through_rest()
        world.tier_rows(10)
        world.tiering.service.sleep(120)
        world.append(10)
        maintainer = world.tiering.maintainer(clock_ms=lambda: world.tiering.service.now_ms)
        world.tiering.round(world.tiering.claim(), maintainer=maintainer).run()

        for name in ("db.t", "db.t$batch"):
            assert world.tiering.addresses(name) == [(0, n) for n in range(10, 20)]
        # What has left is the rounds' to say.
        table = rest.client().load_table("db.t")
        said = {"streamhouse.expired-offsets": '{"0": 15}'}
        with pytest.raises(ForbiddenError, match="expired-offsets"):
            table.transaction().set_properties(said).commit_transaction()


def test_the_full_history_of_a_table_is_protected_too(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        world.create_key_table(properties={"table.datalake.changelog": "true"})
        rest.serve_tiering_through_rest()
        for number in range(3):
            world.upsert(*({"id": i, "region": f"r{number}", "amount": 1.0} for i in range(5)))
            world.catch_up()

        history = rest.client().load_table(("db", "t$changelog"))
        found = history.scan().to_arrow()
        assert found.num_rows == world.tiering.service.table_state("db.t").lake.tiered_offsets[0]
        for change in (lambda: history.append(found.slice(0, 1)), lambda: history.delete("id = 1")):
            with pytest.raises(
                ForbiddenError, match="the full history keeps every change for good"
            ):
                change()
        with pytest.raises(ForbiddenError, match="column '__change_type' must keep its name"):
            history.update_schema().rename_column("__change_type", "kind").commit()
        with pytest.raises(ForbiddenError, match="must not be dropped"):
            rest.client().drop_table(("db", "t$changelog"))
        assert world.in_lake() == world.live


@pytest.mark.parametrize("is_purged", [False, True], ids=["dropped", "purged"])
def test_a_batch_layout_may_be_dropped_once_the_table_has_none(
    tmp_path: Path, is_purged: bool
) -> None:
    sort = {"table.datalake.batch-layout.sort": "region"}
    with KeyTableWorld(tmp_path) as world, RestWorld(world.tiering) as rest:
        world.create_key_table(properties=sort)
        rest.serve_tiering_through_rest()
        world.upsert(*({"id": i, "region": f"r{i}", "amount": 1.0} for i in range(5)))
        world.catch_up()
        client = rest.client()
        drop = client.purge_table if is_purged else client.drop_table
        with pytest.raises(ForbiddenError, match="must not be dropped"):
            drop(("db", "t$batch"))
        world.tiering.service.change_layout("db.t", {})
        snapshot = client.load_table(("db", "t$batch")).current_snapshot()
        assert snapshot is not None
        rest.tables.pinned.add(snapshot.snapshot_id)
        with pytest.raises(ForbiddenError, match="a reader has pinned its snapshot"):
            drop(("db", "t$batch"))
        rest.tables.pinned.clear()
        with pytest.raises(ForbiddenError, match="must not be dropped"):
            drop(("db", "t"))

        drop(("db", "t$batch"))

        assert not client.table_exists(("db", "t$batch"))
        world.catch_up()
        assert world.in_lake() == world.live
        # Should the table get one again, it is made and filled anew.
        world.tiering.service.change_layout("db.t", sort)
        world.upsert({"id": 9, "region": "new", "amount": 2.0})
        world.catch_up()
        found = client.load_table(("db", "t$batch")).scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == [0, 1, 2, 3, 4, 9]
