"""Maintenance in step with rounds: when it is due, whom it never harms."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import FencedError, StorageFailedError
from tests.support.log_table_world import LogTableWorld

SHORT = {
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "2",
}


def test_nothing_is_done_to_a_table_without_rounds(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    lake.append(5)
    lake.tiering.claim()
    assert lake.tiering.maintain(policy=lake.tiering.on_demand()).rewritten is None


@pytest.mark.slow
def test_rounds_maintain_their_table_and_tell_the_service(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=SHORT)
    maintainer = lake.tiering.maintainer()
    for _ in range(30):
        lake.append(10)
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
        state = lake.tiering.service.table_state("db.t")
        # Readers are always pointed at the newest snapshot, rewritten or not.
        assert state.lake.snapshot_id == lake.tiering.lake_table().metadata.current_snapshot_id
        lake.check()

    table = lake.tiering.lake_table()
    assert len(table.inspect.files()) <= 12
    assert len(table.metadata.snapshots) <= 15
    # The claim was given back: the table can be claimed at once.
    lake.append(1)
    assert lake.tiering.claim().epoch == 31


def test_auto_maintenance_can_be_switched_off(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties={**SHORT, "table.datalake.auto-maintenance": "false"})
    maintainer = lake.tiering.maintainer()
    for _ in range(10):
        lake.append(10)
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
    assert len(lake.tiering.lake_table().inspect.files()) == 10
    assert len(lake.tiering.lake_table().metadata.snapshots) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [StorageFailedError("disk full"), FencedError("lost"), ValueError("a bug")]
)
def test_a_failure_of_maintenance_is_not_one_of_the_round(
    lake: LogTableWorld, error: Exception
) -> None:
    lake.tiering.create_table()
    steps: list[str] = []

    def fail(step: str) -> None:
        steps.append(step)
        if step == "rewrite-planned":
            raise error

    now_s = [0.0]
    maintainer = lake.tiering.maintainer(checkpoint=fail, monotonic_s=lambda: now_s[0])
    for _ in range(20):
        lake.append(10)
        result = lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
        assert result.kind == "tiered"
        if isinstance(error, FencedError):
            lake.tiering.service.release("db.t")
        lake.check()

    assert steps == ["rewrite-planned"]
    now_s[0] = 61.0
    lake.append(10)
    lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
    assert steps == ["rewrite-planned"] * 2
    assert lake.tiering.service.failures("db.t") == []


def test_the_service_is_told_what_maintenance_has_left(lake: LogTableWorld) -> None:
    lake.tiering.create_table()
    step_that_fails = ["rewrite-staged"]

    def fail(step: str) -> None:
        if step in step_that_fails:
            raise StorageFailedError("disk full")

    now_s = [0.0]
    maintainer = lake.tiering.maintainer(checkpoint=fail, monotonic_s=lambda: now_s[0])
    for number in range(1, 8):
        lake.append(10)
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
        debt = lake.tiering.service.debt("db.t")
        assert debt is not None
        assert (debt.data_files, debt.small_files, debt.maintained_at_us) == (number, number, None)
    lake.append(10)
    lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
    debt = lake.tiering.service.debt("db.t")
    assert debt is not None
    assert (debt.small_files, debt.maintenance_error) == (8, "StorageFailedError: disk full")
    assert debt.maintained_at_us is None

    step_that_fails.clear()
    now_s[0] += 61
    lake.delete(*((0, n) for n in range(20)))
    lake.append(10)
    lake.tiering.round(lake.tiering.claim(), maintainer=lake.tiering.maintainer()).run()
    lake.append(20)
    lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
    debt = lake.tiering.service.debt("db.t")
    assert debt is not None
    assert (debt.data_files, debt.small_files) == (2, 2)
    assert (debt.delete_files, debt.deleted_share) == (0, 0.0)
    assert debt.maintenance_error == "StorageFailedError: disk full"


def test_a_rewrite_that_failed_is_due_again_after_its_pause(lake: LogTableWorld) -> None:
    info = lake.tiering.create_table()
    lake.tier_small_files(8)
    now_s, failures = [0.0], [StorageFailedError("disk full")]

    def fail(step: str) -> None:
        if step == "files-rewritten" and failures:
            raise failures.pop()

    maintainer = lake.tiering.maintainer(monotonic_s=lambda: now_s[0], checkpoint=fail)
    with pytest.raises(StorageFailedError, match="disk full"):
        lake.tiering.maintain(maintainer)
    assert not maintainer.is_due(lake.tiering.open(), info)

    now_s[0] += 61
    assert maintainer.is_due(lake.tiering.open(), info)
    assert lake.tiering.maintain(maintainer).rewritten is not None
    assert not maintainer.is_due(lake.tiering.open(), info)


def test_a_table_that_lags_behind_is_tiered_first(lake: LogTableWorld) -> None:
    info = lake.tiering.create_table()
    lake.tier_small_files(9)
    maintainer = lake.tiering.maintainer()
    assert maintainer.is_due(lake.tiering.open(), info)
    assert not maintainer.is_due(lake.tiering.open(), info, is_behind=True)


def test_old_rows_leave_later_while_others_wait_in_the_log_but_they_do(
    lake: LogTableWorld,
) -> None:
    info = lake.tiering.create_table(properties={"table.datalake.ttl": "100s"})
    maintainer = lake.tiering.maintainer(clock_ms=lambda: lake.tiering.service.now_ms)
    lake.append(3)
    lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
    due: dict[bool, list[int]] = {False: [], True: []}

    for age_s in range(10, 201, 10):
        lake.tiering.service.sleep(10)
        for is_behind, ages_s in due.items():
            if maintainer.is_due(lake.tiering.open(), info, is_behind=is_behind):
                ages_s.append(age_s)

    # A slice late, and eight slices late.
    assert [min(ages_s) for ages_s in due.values()] == [120, 190]


def test_old_lake_tables_get_the_properties_that_keep_metadata_small(
    lake: LogTableWorld,
) -> None:
    lake.tiering.create_table()
    lake.tier_rows(10)
    with lake.tiering.lake_table().transaction() as change:
        change.remove_properties(
            "write.metadata.delete-after-commit.enabled", "write.metadata.previous-versions-max"
        )
        change.set_properties({"write.metadata.previous-versions-max": "7"})

    lake.tiering.maintain(policy=lake.tiering.on_demand())

    found = lake.tiering.lake_table().properties
    assert found["write.metadata.delete-after-commit.enabled"] == "true"
    assert found["write.metadata.previous-versions-max"] == "7"
