"""`table.datalake.changelog`: a second lake table has every change, once, whatever dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from streamhouse.core.errors import CorruptDataError, InvalidSchemaError, NotFoundError
from streamhouse.reading.tail.round_planner import PlanLimits
from streamhouse.tiering.round._round import HISTORY_STEPS, ROUND_STEPS
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed, TieringWorld, dying_at

PROPERTIES = {"table.datalake.changelog": "true"}


def row(key: int, region: str | None = "eu", amount: float | None = 1.0) -> dict[str, Any]:
    return {"id": key, "region": region, "amount": amount}


def _live(key_world: KeyTableWorld, number: int) -> None:
    key_world.upsert(*(row(key, amount=float(number)) for key in range(number, 12, 2)))
    key_world.delete(row(number))


def test_every_change_is_kept_in_order(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2, partitioned_by=["region"], properties=PROPERTIES)
    for number in range(4):
        _live(key_world, number)
        result = key_world.tiering.tier()
        assert key_world.history() == key_world.changes
        assert key_world.in_lake() == key_world.live
        changelog = key_world.tiering.service.table_state("db.t").lake.changelog
        assert changelog is not None
        table = key_world.tiering.lake_table("db.t$changelog")
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


@pytest.mark.one_of(3)
@pytest.mark.parametrize("limited", [False, True], ids=["whole", "small-steps"])
@pytest.mark.parametrize("step", [*ROUND_STEPS, *HISTORY_STEPS])
def test_a_worker_may_die_between_the_two_commits(
    key_world: KeyTableWorld, step: str, limited: bool
) -> None:
    key_world.create_key_table(bucket_count=2, properties=PROPERTIES)
    _live(key_world, 0)
    key_world.tiering.tier()
    _live(key_world, 1)

    with pytest.raises(Killed):
        key_world.tiering.round(checkpoint=dying_at(step)).run()
    key_world.tiering.service.release("db.t")
    _live(key_world, 2)
    # The next worker may take smaller steps than the one that died.
    limits = PlanLimits(key_bucket_rows_max=2) if limited else PlanLimits()
    while key_world.lag:
        key_world.tiering.round(limits=limits).run()

    assert key_world.history() == key_world.changes
    assert key_world.in_lake() == key_world.live
    state = key_world.tiering.service.table_state("db.t").lake
    assert state.changelog is not None
    assert state.changelog.tiered_offsets == state.tiered_offsets


def test_tables_without_it_have_no_second_lake_table(key_world: KeyTableWorld) -> None:
    key_world.create_key_table()
    _live(key_world, 0)
    key_world.tiering.tier()

    assert key_world.tiering.service.table_state("db.t").lake.changelog is None
    with pytest.raises(Exception, match=r"db\.t\$changelog"):
        key_world.history()


def test_a_log_table_cannot_have_one(tmp_path: Path) -> None:
    with (
        TieringWorld(tmp_path) as key_world,
        pytest.raises(InvalidSchemaError, match=r"changelog needs a primary key; the lake table"),
    ):
        key_world.create_table(properties=PROPERTIES)


def test_a_history_that_was_rolled_back_is_refused(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=PROPERTIES)
    _live(key_world, 0)
    key_world.tiering.tier()
    history = key_world.tiering.lake_table("db.t$changelog")
    before = history.current_snapshot()
    assert before is not None
    _live(key_world, 1)
    key_world.tiering.tier()
    _live(key_world, 2)
    history.refresh()
    history.manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()

    with pytest.raises(CorruptDataError, match=r"'db\.t\$changelog', bucket 0: it covers"):
        key_world.tiering.tier()


def test_a_history_that_is_gone_is_not_begun_anew(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=PROPERTIES)
    _live(key_world, 0)
    key_world.tiering.tier()
    key_world.tiering.lake_table()
    assert key_world.tiering._judge is not None
    key_world.tiering._judge.drop_table(("db", "t$changelog"))
    _live(key_world, 1)

    with pytest.raises(NotFoundError, match=r"'db\.t\$changelog' is not in catalog"):
        key_world.tiering.tier()


def test_the_state_crosses_the_wire(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=PROPERTIES)
    _live(key_world, 0)
    key_world.tiering.tier()
    state = key_world.tiering.service.table_state("db.t").lake

    assert type(state).from_json(state.to_json()) == state
    without = replace(state, changelog=None)
    assert type(state).from_json(without.to_json()) == without
