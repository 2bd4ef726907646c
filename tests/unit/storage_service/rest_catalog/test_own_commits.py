"""What the own workers commit through the REST catalog passes: rounds, deletes, maintenance."""

from __future__ import annotations

from pathlib import Path

from tests.support.key_tiering_world import KeyTieringWorld
from tests.support.maintenance_world import MaintenanceWorld
from tests.support.rest_world import RestWorld


class _RestKeyWorld(RestWorld, KeyTieringWorld):
    pass


class _RestMaintenanceWorld(RestWorld, MaintenanceWorld):
    pass


def test_rounds_of_a_primary_key_table(tmp_path: Path) -> None:
    with _RestKeyWorld(tmp_path) as world:
        world.create_key_table(bucket_count=2)
        world.serve_tiering_through_rest()
        for number in range(4):
            ids = range(number * 5, number * 5 + 20)
            world.upsert(*({"id": i, "region": f"r{number}", "amount": i / 2} for i in ids))
            world.delete({"id": number * 5})
            world.catch_up()
            assert world.in_lake() == world.live

        found = world.client().load_table("db.t").scan().to_arrow()
        assert found.num_rows == len(world.rows)


def test_maintenance_in_step_with_rounds(tmp_path: Path) -> None:
    with _RestMaintenanceWorld(tmp_path) as world:
        world.create_table(bucket_count=2, properties={"table.datalake.snapshot.min-count": "1"})
        world.serve_tiering_through_rest()
        for number in range(12):
            world.tier_rows(10, bucket=number % 2)
        world.delete((0, 3), (1, 4))

        report = world.maintain(policy=world.on_demand())

        assert report.rewritten is not None
        world.check()
        world.tier_rows(10)
        world.check()
        assert len(list(world.lake_table().scan().plan_files())) < 12
