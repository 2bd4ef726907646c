"""The full history of a table is kept as tidy as its rows, and has every change whatever dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from streamhouse.storage_service.errors import StorageFailedError
from streamhouse.tiering.maintain.maintenance import Maintainer
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed

HISTORY = "db.t$changelog"
PROPERTIES = {
    "table.datalake.changelog": "true",
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "2",
}


def _rounds(world: KeyTableWorld, numbers: range, maintainer: Maintainer, **more: Any) -> None:
    for number in numbers:
        rows = ({"id": key, "region": "eu", "amount": float(number)} for key in range(6))
        world.upsert(*rows)
        world.delete({"id": number % 6, "region": None, "amount": None})
        world.tiering.round(world.tiering.claim(), maintainer=maintainer, **more).run()


def _check(world: KeyTableWorld) -> None:
    assert world.history() == world.changes
    assert world.in_lake() == world.live
    lake = world.tiering.service.table_state("db.t").lake
    assert lake.changelog is not None
    assert lake.changelog.tiered_offsets == lake.tiered_offsets


def test_its_files_and_snapshots_stay_few(world: KeyTableWorld) -> None:
    world.create_key_table(bucket_count=2, properties=PROPERTIES)
    maintainer = world.tiering.maintainer()
    for number in range(30):
        _rounds(world, range(number, number + 1), maintainer)
        # Readers are always pointed at the newest snapshot, rewritten or not.
        known = world.tiering.service.table_state("db.t").lake.changelog
        assert known is not None
        assert known.snapshot_id == world.tiering.lake_table(HISTORY).metadata.current_snapshot_id
        _check(world)

    table = world.tiering.lake_table(HISTORY)
    assert len(table.inspect.files()) <= 2 * 12
    assert len(table.metadata.snapshots) <= 15
    operations = {s.summary.operation for s in table.metadata.snapshots if s.summary is not None}
    assert operations <= {Operation.APPEND, Operation.REPLACE}
    offsets = table.scan().to_arrow()["__offset"]
    assert offsets.null_count == 0


def test_a_pinned_snapshot_of_it_stays(world: KeyTableWorld) -> None:
    world.create_key_table(properties=PROPERTIES)
    maintainer = world.tiering.maintainer()
    _rounds(world, range(3), maintainer)
    pinned = world.tiering.lake_table(HISTORY).metadata.current_snapshot_id
    assert pinned is not None
    before = world.history()
    world.tiering.service.pin_snapshot("db.t", pinned, holder="reader")

    _rounds(world, range(3, 30), maintainer)

    table = world.tiering.lake_table(HISTORY)
    assert len(table.metadata.snapshots) <= 16
    assert table.scan(snapshot_id=pinned).to_arrow().num_rows == len(before)


def _raising(step: str, error: BaseException) -> Callable[[str], None]:
    def checkpoint(reached: str) -> None:
        if reached == step:
            raise error

    return checkpoint


@pytest.mark.parametrize(
    "step",
    ["rewrite-planned", "files-rewritten", "rewrite-staged", "rewrite-committed"],
)
def test_a_worker_may_die_in_its_maintenance(world: KeyTableWorld, step: str) -> None:
    world.create_key_table(properties=PROPERTIES)
    _rounds(world, range(7), world.tiering.maintainer())
    with pytest.raises(Killed):
        _rounds(world, range(7, 8), world.tiering.maintainer(checkpoint=_raising(step, Killed())))
    world.tiering.service.release("db.t")

    _rounds(world, range(8, 20), world.tiering.maintainer())
    _check(world)
    assert len(world.tiering.lake_table(HISTORY).inspect.files()) <= 12


def test_what_fails_for_one_lake_table_is_done_for_the_other(world: KeyTableWorld) -> None:
    world.create_key_table(properties=PROPERTIES)
    steps: list[str] = []

    def fail_first(step: str) -> None:
        steps.append(step)
        if len(steps) == 1:
            raise StorageFailedError("disk full")

    _rounds(world, range(8), world.tiering.maintainer(checkpoint=fail_first))

    assert steps[0] == "rewrite-planned"
    assert len(world.tiering.lake_table().inspect.data_files()) == 8
    assert len(world.tiering.lake_table(HISTORY).inspect.data_files()) == 1
    _check(world)
