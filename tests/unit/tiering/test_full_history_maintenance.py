"""The full history of a table is kept as tidy as its rows, and has every change whatever dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from streamhouse.core.errors import StorageFailedError
from streamhouse.tiering.maintain._maintenance import Maintainer
from tests.support.key_table_world import KeyTableWorld
from tests.support.tiering_world import Killed

pytestmark = pytest.mark.slow

HISTORY = "db.t$changelog"
PROPERTIES = {
    "table.datalake.changelog": "true",
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "2",
}


def _rounds(key_world: KeyTableWorld, numbers: range, maintainer: Maintainer, **more: Any) -> None:
    for number in numbers:
        rows = ({"id": key, "region": "eu", "amount": float(number)} for key in range(6))
        key_world.upsert(*rows)
        key_world.delete({"id": number % 6, "region": None, "amount": None})
        key_world.tiering.round(key_world.tiering.claim(), maintainer=maintainer, **more).run()


def _check(key_world: KeyTableWorld) -> None:
    assert key_world.history() == key_world.changes
    assert key_world.in_lake() == key_world.live
    lake = key_world.tiering.service.table_state("db.t").lake
    assert lake.changelog is not None
    assert lake.changelog.tiered_offsets == lake.tiered_offsets


def test_its_files_and_snapshots_stay_few(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(bucket_count=2, properties=PROPERTIES)
    maintainer = key_world.tiering.maintainer()
    for number in range(30):
        _rounds(key_world, range(number, number + 1), maintainer)
        # Readers are always pointed at the newest snapshot, rewritten or not.
        known = key_world.tiering.service.table_state("db.t").lake.changelog
        assert known is not None
        assert (
            known.snapshot_id == key_world.tiering.lake_table(HISTORY).metadata.current_snapshot_id
        )
        _check(key_world)

    table = key_world.tiering.lake_table(HISTORY)
    assert len(table.inspect.files()) <= 2 * 12
    assert len(table.metadata.snapshots) <= 15
    operations = {s.summary.operation for s in table.metadata.snapshots if s.summary is not None}
    assert operations <= {Operation.APPEND, Operation.REPLACE}
    offsets = table.scan().to_arrow()["__offset"]
    assert offsets.null_count == 0


def test_a_pinned_snapshot_of_it_stays(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=PROPERTIES)
    maintainer = key_world.tiering.maintainer()
    _rounds(key_world, range(3), maintainer)
    pinned = key_world.tiering.lake_table(HISTORY).metadata.current_snapshot_id
    assert pinned is not None
    before = key_world.history()
    key_world.tiering.service.pin_snapshot("db.t", pinned, holder="reader")

    _rounds(key_world, range(3, 30), maintainer)

    table = key_world.tiering.lake_table(HISTORY)
    assert len(table.metadata.snapshots) <= 16
    assert table.scan(snapshot_id=pinned).to_arrow().num_rows == len(before)


def _raising(step: str, error: BaseException) -> Callable[[str], None]:
    def checkpoint(reached: str) -> None:
        if reached == step:
            raise error

    return checkpoint


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "step",
    ["rewrite-planned", "files-rewritten", "rewrite-staged", "rewrite-committed"],
)
def test_a_worker_may_die_in_its_maintenance(key_world: KeyTableWorld, step: str) -> None:
    key_world.create_key_table(properties=PROPERTIES)
    _rounds(key_world, range(7), key_world.tiering.maintainer())
    with pytest.raises(Killed):
        _rounds(
            key_world,
            range(7, 8),
            key_world.tiering.maintainer(checkpoint=_raising(step, Killed())),
        )
    key_world.tiering.service.release("db.t")

    _rounds(key_world, range(8, 20), key_world.tiering.maintainer())
    _check(key_world)
    assert len(key_world.tiering.lake_table(HISTORY).inspect.files()) <= 12


def test_what_fails_for_one_lake_table_is_done_for_the_other(key_world: KeyTableWorld) -> None:
    key_world.create_key_table(properties=PROPERTIES)
    steps: list[str] = []

    def fail_first(step: str) -> None:
        steps.append(step)
        if len(steps) == 1:
            raise StorageFailedError("disk full")

    _rounds(key_world, range(8), key_world.tiering.maintainer(checkpoint=fail_first))

    assert steps[0] == "rewrite-planned"
    assert len(key_world.tiering.lake_table().inspect.data_files()) == 8
    assert len(key_world.tiering.lake_table(HISTORY).inspect.data_files()) == 1
    _check(key_world)
