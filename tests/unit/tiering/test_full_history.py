"""`table.datalake.changelog`: a second lake table has every change, once, whatever dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from streamhouse.storage_service.errors import CorruptDataError, InvalidSchemaError, NotFoundError
from streamhouse.tiering.round.round import HISTORY_STEPS, ROUND_STEPS
from streamhouse.tiering.round.round_planner import PlanLimits
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed, TieringWorld, dying_at

PROPERTIES = {"table.datalake.changelog": "true"}


def row(key: int, region: str | None = "eu", amount: float | None = 1.0) -> dict[str, Any]:
    return {"id": key, "region": region, "amount": amount}


def _live(world: KeyTableWorld, number: int) -> None:
    world.upsert(*(row(key, amount=float(number)) for key in range(number, 12, 2)))
    world.delete(row(number))


def test_every_change_is_kept_in_order(world: KeyTableWorld) -> None:
    world.create_key_table(bucket_count=2, partitioned_by=["region"], properties=PROPERTIES)
    for number in range(4):
        _live(world, number)
        result = world.tiering.tier()
        assert world.history() == world.changes
        assert world.in_lake() == world.live
        changelog = world.tiering.service.table_state("db.t").lake.changelog
        assert changelog is not None
        table = world.tiering.lake_table("db.t$changelog")
        snapshot = table.current_snapshot()
        assert snapshot is not None
        assert snapshot.summary is not None
        assert changelog.snapshot_id == snapshot.snapshot_id
        assert changelog.table_uuid == str(table.metadata.table_uuid)
        assert changelog.tiered_offsets == result.tiered_offsets
        assert snapshot.summary.operation is Operation.APPEND

    assert table.schema().column_names == [
        *("id", "region", "amount"),
        *("__change_type", "__bucket", "__offset", "__timestamp"),
    ]
    assert [str(f.transform) for f in table.spec().fields] == ["identity"]
    assert table.schema().identifier_field_ids == []


@pytest.mark.parametrize("limited", [False, True], ids=["whole", "small-steps"])
@pytest.mark.parametrize("step", [*ROUND_STEPS, *HISTORY_STEPS])
def test_a_worker_may_die_between_the_two_commits(
    world: KeyTableWorld, step: str, limited: bool
) -> None:
    world.create_key_table(bucket_count=2, properties=PROPERTIES)
    _live(world, 0)
    world.tiering.tier()
    _live(world, 1)

    with pytest.raises(Killed):
        world.tiering.round(checkpoint=dying_at(step)).run()
    world.tiering.service.release("db.t")
    _live(world, 2)
    # The next worker may take smaller steps than the one that died.
    limits = PlanLimits(key_bucket_rows_max=2) if limited else PlanLimits()
    while world.lag:
        world.tiering.round(limits=limits).run()

    assert world.history() == world.changes
    assert world.in_lake() == world.live
    state = world.tiering.service.table_state("db.t").lake
    assert state.changelog is not None
    assert state.changelog.tiered_offsets == state.tiered_offsets


def test_tables_without_it_have_no_second_lake_table(world: KeyTableWorld) -> None:
    world.create_key_table()
    _live(world, 0)
    world.tiering.tier()

    assert world.tiering.service.table_state("db.t").lake.changelog is None
    with pytest.raises(Exception, match=r"db\.t\$changelog"):
        world.history()


def test_a_log_table_cannot_have_one(tmp_path: Path) -> None:
    with (
        TieringWorld(tmp_path) as world,
        pytest.raises(InvalidSchemaError, match=r"changelog needs a primary key; the lake table"),
    ):
        world.create_table(properties=PROPERTIES)


def test_a_history_that_was_rolled_back_is_refused(world: KeyTableWorld) -> None:
    world.create_key_table(properties=PROPERTIES)
    _live(world, 0)
    world.tiering.tier()
    history = world.tiering.lake_table("db.t$changelog")
    before = history.current_snapshot()
    assert before is not None
    _live(world, 1)
    world.tiering.tier()
    _live(world, 2)
    history.refresh()
    history.manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()

    with pytest.raises(CorruptDataError, match=r"'db\.t\$changelog', bucket 0: it covers"):
        world.tiering.tier()


def test_a_history_that_is_gone_is_not_begun_anew(world: KeyTableWorld) -> None:
    world.create_key_table(properties=PROPERTIES)
    _live(world, 0)
    world.tiering.tier()
    world.tiering.lake_table()
    assert world.tiering._judge is not None
    world.tiering._judge.drop_table(("db", "t$changelog"))
    _live(world, 1)

    with pytest.raises(NotFoundError, match=r"'db\.t\$changelog' is not in catalog"):
        world.tiering.tier()


def test_the_state_crosses_the_wire(world: KeyTableWorld) -> None:
    world.create_key_table(properties=PROPERTIES)
    _live(world, 0)
    world.tiering.tier()
    state = world.tiering.service.table_state("db.t").lake

    assert type(state).from_json(state.to_json()) == state
    without = replace(state, changelog=None)
    assert type(state).from_json(without.to_json()) == without
