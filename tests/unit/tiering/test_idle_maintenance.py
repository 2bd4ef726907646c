"""A table that nobody writes to any more is tidied once, when that is due, and then left alone."""

from __future__ import annotations

import time

import pytest

from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.tiering.maintain._maintenance import IDLE_PAUSE_MS, Maintainer
from tests.support.log_table_world import LogTableWorld

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
FEW = {
    "table.datalake.snapshot.min-count": "1",
    "table.datalake.snapshot.max-age": "1h",
    "table.datalake.orphan.min-age": "3d",
}


class _Clock:
    """Begins now, as the lake's snapshots have the time of day, and goes when a test says so."""

    def __init__(self) -> None:
        self.now_ms = time.time_ns() // 1_000_000 + 60_000

    def maintainer(self, lake: LogTableWorld) -> Maintainer:
        return lake.tiering.maintainer(clock_ms=lambda: self.now_ms)


def _due_ms(lake: LogTableWorld) -> int | None:
    due_us = lake.tiering.service.table_state("db.t").lake.maintenance_due_us
    return None if due_us is None else due_us // 1_000


def _claim(lake: LogTableWorld) -> TieringAssignment:
    answer = lake.tiering.service.claim_tiering("test", tables=["db.t"], include_idle=True)
    assert isinstance(answer, TieringAssignment)
    return answer


def _tidied(lake: LogTableWorld, **more: str) -> tuple[_Clock, Maintainer]:
    """Make a table that keeps few snapshots; return its worker's clock, and that worker."""
    lake.tiering.create_table(properties=FEW | more)
    clock = _Clock()
    return clock, clock.maintainer(lake)


def _rounds(lake: LogTableWorld, maintainer: Maintainer, count: int) -> None:
    """Move five rows into the lake in each of so many rounds."""
    for _ in range(count):
        lake.append(5)
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()


def _look_after(lake: LogTableWorld, maintainer: Maintainer) -> None:
    assert lake.tiering.round(_claim(lake), maintainer=maintainer).run().kind == "maintained"


@pytest.mark.parametrize("is_same_worker", [True, False], ids=["same-worker", "another"])
def test_its_snapshots_expire_and_its_orphans_go(lake: LogTableWorld, is_same_worker: bool) -> None:
    clock, worker = _tidied(lake)
    _rounds(lake, worker, 4)
    [*_, last] = lake.tiering.lake_table().metadata.snapshots
    orphan = lake.tiering.data_files()[0].with_name("left-by-a-dead-worker.parquet")
    orphan.write_bytes(b"")
    assert len(lake.tiering.lake_table().metadata.snapshots) == 4
    # All of them at once: when the youngest that goes was replaced so long ago.
    assert _due_ms(lake) == last.timestamp_ms + HOUR_MS + 1

    # Before that there is nothing to do, and that costs no commit.
    before = lake.tiering.lake_table().metadata_location
    _look_after(lake, worker)
    assert lake.tiering.lake_table().metadata_location == before

    clock.now_ms = last.timestamp_ms + HOUR_MS + 1
    worker = worker if is_same_worker else clock.maintainer(lake)
    _look_after(lake, worker)
    assert [s.snapshot_id for s in lake.tiering.lake_table().metadata.snapshots] == [
        last.snapshot_id
    ]
    due_ms = _due_ms(lake)
    assert due_ms is not None
    assert last.timestamp_ms + 3 * DAY_MS <= due_ms <= clock.now_ms + 3 * DAY_MS
    assert orphan.exists()

    # Files of rounds that died are old enough to be looked for then, and no new ones come.
    clock.now_ms = max(due_ms, time.time_ns() // 1_000_000 + 3 * DAY_MS + 60_000)
    worker = worker if is_same_worker else clock.maintainer(lake)
    _look_after(lake, worker)
    assert not orphan.exists()
    assert _due_ms(lake) is None
    lake.check()

    # Rows that come make it due anew.
    _rounds(lake, worker, 1)
    assert _due_ms(lake) is not None


def test_what_a_reader_pins_is_tried_again_later(lake: LogTableWorld) -> None:
    clock, worker = _tidied(lake)
    _rounds(lake, worker, 3)
    first, *_, last = lake.tiering.lake_table().metadata.snapshots
    lake.tiering.service.pin_snapshot("db.t", first.snapshot_id, holder="reader")
    clock.now_ms = last.timestamp_ms + HOUR_MS + 1

    _look_after(lake, worker)

    left = {s.snapshot_id for s in lake.tiering.lake_table().metadata.snapshots}
    assert left == {first.snapshot_id, last.snapshot_id}
    assert _due_ms(lake) == clock.now_ms + IDLE_PAUSE_MS


def test_all_its_lake_tables_are_tidied(lake: LogTableWorld) -> None:
    sort = {"table.datalake.batch-layout.sort": "id"}
    clock, worker = _tidied(lake, **sort, **{"table.datalake.batch-layout.freshness": "10h"})
    _rounds(lake, worker, 3)
    clock.now_ms += 2 * HOUR_MS

    _look_after(lake, worker)

    for name in ("db.t", "db.t$batch"):
        assert len(lake.tiering.lake_table(name).metadata.snapshots) == 1


def test_it_is_looked_after_when_rows_are_too_old_and_not_before(lake: LogTableWorld) -> None:
    ttl_ms = 10 * HOUR_MS
    sort = {"table.datalake.batch-layout.sort": "id"}
    lake.tiering.create_table(properties=sort | {"table.datalake.ttl": "10h"})
    worker = lake.tiering.maintainer(clock_ms=lambda: lake.tiering.service.now_ms)
    lake.append(5)
    written_ms = lake.tiering.service.now_ms
    lake.tiering.round(lake.tiering.claim(), maintainer=worker).run()
    due_ms = _due_ms(lake)
    assert due_ms == written_ms + ttl_ms * 11 // 10 + 1

    lake.tiering.service.sleep((due_ms - written_ms) / 1_000)
    _look_after(lake, worker)
    assert lake.tiering.addresses() == lake.tiering.addresses("db.t$batch") == []
    # Nothing is left to become old.
    assert _due_ms(lake) == lake.tiering.service.now_ms + ttl_ms


def test_without_auto_maintenance_nothing_is_due(lake: LogTableWorld) -> None:
    _, worker = _tidied(lake, **{"table.datalake.auto-maintenance": "false"})
    _rounds(lake, worker, 1)
    assert _due_ms(lake) is None


def test_a_plan_for_other_limits_is_made_anew(lake: LogTableWorld) -> None:
    _, worker = _tidied(lake, **{"table.datalake.target-file-bytes": "1kb"})
    _rounds(lake, worker, 9)
    # Each of them has the size that was wanted.
    assert len(lake.tiering.data_files()) == 9

    lake.tiering.service.change_layout("db.t", {"table.datalake.target-file-bytes": "128mb"})
    _look_after(lake, worker)

    assert len(list(lake.tiering.lake_table().scan().plan_files())) == 1
    lake.check()
