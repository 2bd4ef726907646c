"""`table.datalake.ttl`: old rows leave the lake file by file, young ones never do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyiceberg.table.snapshots import Operation

from streamhouse.core.errors import UnavailableError
from streamhouse.core.model.lake.facts import (
    EXPIRED_AT_PROPERTY,
    EXPIRED_OFFSETS_PROPERTY,
    TIERED_OFFSETS_PROPERTY,
)
from streamhouse.core.model.table_state import TieringAssignment
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.maintain.maintenance_report import plan_text, report_text
from tests.support.key_table_world import Address
from tests.support.log_table_world import LogTableWorld
from tests.support.tiering_world import Killed, dying_at

TTL_S = 100
TTL = {"table.datalake.ttl": f"{TTL_S}s"}


def _maintainer(lake: LogTableWorld, **more: Any) -> Maintainer:
    return lake.tiering.maintainer(clock_ms=lambda: lake.tiering.service.now_ms, **more)


def _ages_s(lake: LogTableWorld) -> dict[Address, float]:
    """(bucket, offset) -> age of every row in the lake."""
    found = lake.tiering.lake_table().scan().to_arrow()
    written = found["__timestamp"].cast("int64").to_pylist()
    places = zip(found["__bucket"].to_pylist(), found["__offset"].to_pylist(), strict=True)
    return {
        place: (lake.tiering.service.now_ms * 1_000 - at) / 1e6
        for place, at in zip(places, written, strict=True)
    }


@pytest.mark.slow
def test_rows_leave_in_time_and_never_early(lake: LogTableWorld) -> None:
    lake.tiering.create_table(bucket_count=2, properties=TTL)
    maintainer = _maintainer(lake)
    counts = []
    written: dict[Address, int] = {}
    for number in range(60):
        lake.tiering.service.sleep(5)
        for bucket in (0, 1):
            lake.append(3, bucket=bucket)
            written |= {(bucket, number * 3 + n): lake.tiering.service.now_ms for n in range(3)}
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
        ages = _ages_s(lake)
        young = {a for a, ms in written.items() if lake.tiering.service.now_ms - ms < TTL_S * 1_000}
        assert set(ages) >= young
        # A slice late, in a file of a slice, after the round that came next.
        assert max(ages.values()) <= TTL_S * 1.2 + 6
        counts.append(len(lake.tiering.lake_table().inspect.files()))

    assert len(ages) < 60 * 3
    assert max(counts) <= 60
    state = lake.tiering.service.table_state("db.t").lake
    snapshots = lake.tiering.lake_table().metadata.snapshots
    assert state.snapshot_id == snapshots[-1].snapshot_id
    assert state.tiered_offsets == {0: 180, 1: 180}
    removals = [
        snapshot.summary
        for snapshot in snapshots
        if snapshot.summary is not None and snapshot.summary.operation is Operation.DELETE
    ]
    assert 5 <= len(removals) <= 30
    assert all(TIERED_OFFSETS_PROPERTY in s.additional_properties for s in removals)


def test_a_file_with_one_young_row_stays(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.append(5)
    lake.tiering.service.sleep(TTL_S)
    lake.tier_rows(1)

    assert lake.tiering.maintain(_maintainer(lake), policy=lake.tiering.on_demand()).removed is None
    lake.check()


def test_a_partition_whose_rows_are_old_is_gone(lake: LogTableWorld) -> None:
    lake.tiering.create_table(partitioned_by=["truncate(1000, id)"], properties=TTL)
    lake.tier_rows(1_000)
    lake.tiering.service.sleep(TTL_S / 2)
    lake.tier_rows(1_000)
    lake.tiering.service.sleep(TTL_S / 2)

    report = lake.tiering.maintain(_maintainer(lake), policy=lake.tiering.on_demand())

    assert report.removed is not None
    assert (report.removed.files, report.removed.rows) == (1, 1_000)
    assert [
        row["partition"] for row in lake.tiering.lake_table().inspect.partitions().to_pylist()
    ] == [{"id_trunc": 1_000, "__bucket": 0}]


def test_deletes_of_rows_that_are_gone_go_with_them(lake: LogTableWorld) -> None:
    lake.tiering.create_table(bucket_count=2, properties=TTL)
    lake.tier_rows(10, bucket=0)
    lake.tiering.service.sleep(TTL_S)
    lake.tier_rows(10, bucket=1)
    lake.delete((0, 3), (1, 4))

    policy = lake.tiering.policy()
    maintainer = _maintainer(lake)
    plan = maintainer.plan(lake.tiering.open(), lake.tiering.on_demand(), path="db.t")
    assert "remove 1 files of 9 rows that are too old" in plan_text("db.t", plan)
    report = lake.tiering.maintain(maintainer, policy=policy)

    assert report.removed is not None
    assert report.removed.rows == 9
    assert "9 rows that were too old removed (1 files" in report_text("db.t", report)
    assert lake.tiering.addresses() == [(1, n) for n in range(10) if n != 4]
    assert len(lake.tiering.lake_table().inspect.delete_files()) == 1


def test_a_table_may_lose_all_its_rows_and_go_on(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tier_rows(10)
    lake.tiering.service.sleep(TTL_S + 1)
    maintainer = _maintainer(lake)
    assert lake.tiering.maintain(maintainer, policy=lake.tiering.on_demand()).removed is not None
    assert lake.tiering.addresses() == []

    result = lake.tier_rows(5)

    assert (result.kind, result.tiered_offsets) == ("tiered", {0: 15})
    assert lake.tiering.addresses() == [(0, n) for n in range(10, 15)]
    assert lake.tiering.maintain(maintainer, policy=lake.tiering.on_demand()).removed is None


def test_an_overwritten_table_loses_old_rows_and_none_of_the_new_ones(
    lake: LogTableWorld,
) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tier_rows(10)
    lake.tiering.service.overwrite("db.t")
    lake.tiering.service.sleep(TTL_S + 1)
    maintainer = _maintainer(lake)
    # Some of what was overwritten leaves before the round that takes all of it.
    assert lake.tiering.maintain(maintainer, policy=lake.tiering.on_demand()).removed is not None
    assert lake.tiering.service.table_state("db.t").has_overwritten_rows

    lake.tier_rows(5)
    assert lake.tiering.addresses() == [(0, n) for n in range(10, 15)]
    lake.tiering.service.sleep(TTL_S + 1)
    lake.tier_rows(5)
    report = lake.tiering.maintain(maintainer, policy=lake.tiering.on_demand())

    assert report.removed is not None
    assert report.removed.rows == 5
    assert lake.tiering.addresses() == [(0, n) for n in range(15, 20)]
    assert lake.tiering.open().truncated_offsets == {0: 10}
    assert not lake.tiering.service.table_state("db.t").has_overwritten_rows


def test_a_table_that_nobody_writes_to_is_tidied_all_the_same(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tier_rows(10)
    lake.tiering.service.sleep(TTL_S * 1.2)

    result = lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run()

    assert (result.kind, result.row_count) == ("maintained", 0)
    assert lake.tiering.addresses() == []
    state = lake.tiering.service.table_state("db.t").lake
    assert state.snapshot_id == lake.tiering.lake_table().metadata.current_snapshot_id
    # The claim was given back, and nothing was left to do for the next.
    before = lake.tiering.lake_table().metadata.current_snapshot_id
    assert (
        lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run().kind
        == "maintained"
    )
    assert lake.tiering.lake_table().metadata.current_snapshot_id == before


def _idle_claim(lake: LogTableWorld) -> TieringAssignment:
    answer = lake.tiering.service.claim_tiering("test", tables=["db.t"], include_idle=True)
    assert isinstance(answer, TieringAssignment)
    return answer


SORT = {"table.datalake.batch-layout.sort": "id"}
BATCH = "db.t$batch"
REMOVAL_STEPS = ("staged", "committed")


def _aged(lake: LogTableWorld) -> dict[int, int]:
    state = lake.tiering.service.table_state("db.t")
    return {b: at.expired_offset for b, at in state.positions.items() if at.expired_offset}


@pytest.mark.slow
def test_rows_leave_both_layouts(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties={**TTL, **SORT})
    maintainer = _maintainer(lake)
    for _ in range(60):
        lake.tiering.service.sleep(5)
        lake.append(3)
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
        first = _aged(lake).get(0, 0)
        end = _positions(lake)[0].high_watermark
        # What is below has left both, file by file; what is above is in both.
        assert (
            lake.tiering.addresses()
            == lake.tiering.addresses(BATCH)
            == [(0, n) for n in range(first, end)]
        )

    assert 110 <= first <= 180 - 3 * TTL_S // 5
    assert len(lake.tiering.lake_table(BATCH).inspect.files()) < 40
    state = lake.tiering.service.table_state("db.t").lake
    assert state.batch is not None
    assert state.batch.snapshot_id == lake.tiering.lake_table(BATCH).metadata.current_snapshot_id
    assert state.batch.tiered_offsets == {0: 180}


def test_rows_that_expired_are_masked_where_files_still_have_them(lake: LogTableWorld) -> None:
    lake.tiering.create_table(partitioned_by=["truncate(10, id)"], properties={**TTL, **SORT})
    # In the rows' own lake table the first ten have a file, in the layout all share one.
    lake.append(10)
    lake.tiering.service.sleep(TTL_S)
    lake.tier_rows(10)
    lake.tiering.service.sleep(1)

    report = lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run()

    assert report.kind == "maintained"
    assert _aged(lake) == {0: 10}
    assert lake.tiering.addresses() == [(0, n) for n in range(10, 20)]
    assert lake.tiering.addresses(BATCH) == [(0, n) for n in range(20)]
    in_batch = lake.tiering.service.table_state("db.t").in_batch_layout()
    assert in_batch is not None
    assert in_batch.positions[0].first_offset == 10


def test_a_layout_that_lags_gets_no_rows_that_have_expired(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    for _ in range(3):
        lake.tiering.service.sleep(TTL_S / 2)
        lake.tier_rows(10)
    lake.tiering.service.sleep(TTL_S / 2 + 1)
    # Two files have left before the table gets its layout, and the log still has all rows.
    lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run()
    assert _aged(lake) == {0: 20}
    lake.tiering.service.change_layout("db.t", SORT)

    lake.tier_rows(5)

    assert lake.tiering.addresses(BATCH) == [(0, n) for n in range(20, 35)]
    state = lake.tiering.service.table_state("db.t").lake
    assert state.batch is not None
    assert state.batch.tiered_offsets == {0: 35}


def test_a_layout_without_young_rows_is_filled_without_one(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tier_rows(10)
    lake.tiering.service.sleep(TTL_S * 1.2)
    lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run()
    lake.tiering.service.change_layout("db.t", SORT)
    lake.tiering.service.expire_log("db.t", 0, 10)

    for _ in range(2):
        lake.tiering.round(_idle_claim(lake)).run()
        state = lake.tiering.service.table_state("db.t").lake
        assert state.batch is not None
        assert state.batch.tiered_offsets == {0: 10}
    lake.tier_rows(5)

    assert lake.tiering.addresses(BATCH) == [(0, n) for n in range(10, 15)]


def test_what_has_expired_is_said_by_every_snapshot_from_then_on(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tier_rows(10)
    newest_us = lake.tiering.service.now_ms * 1_000
    lake.tiering.service.sleep(TTL_S * 1.2)
    lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run()
    lake.tier_rows(5)

    summary = lake.tiering.lake_table().metadata.snapshots[-1].summary
    assert summary is not None
    assert summary.additional_properties[EXPIRED_OFFSETS_PROPERTY] == '{"0": 10}'
    assert lake.tiering.lake_table().properties[EXPIRED_OFFSETS_PROPERTY] == '{"0": 10}'
    assert lake.tiering.lake_table().properties[EXPIRED_AT_PROPERTY] == str(newest_us)
    # A service whose state was restored from before learns it with the next round.
    known = lake.tiering.service.table_state("db.t").lake
    lake.tiering.service.set_lake("db.t", replace(known, expired_offsets={}, expired_at_us=0))
    lake.tier_rows(5)
    assert _aged(lake) == {0: 10}
    assert lake.tiering.service.table_state("db.t").lake.expired_at_us == newest_us


def test_rows_of_a_clock_that_was_ahead_are_not_taken_for_old(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tiering.service.sleep(TTL_S)
    lake.tier_rows(10)
    # As after an adoption: the next rows are older by the clock that wrote them.
    lake.tiering.service.sleep(-TTL_S / 2)
    lake.tier_rows(10)
    lake.tiering.service.sleep(TTL_S + 1)

    lake.tiering.maintain(_maintainer(lake), policy=lake.tiering.on_demand())

    assert lake.tiering.addresses() == [(0, n) for n in range(20)]


@pytest.mark.parametrize(
    ("step", "nth"),
    [("expiry-registered", 1), *((f"removal-{s}", n) for n in (1, 2) for s in REMOVAL_STEPS)],
)
def test_a_worker_may_die_between_the_layouts(lake: LogTableWorld, step: str, nth: int) -> None:
    lake.tiering.create_table(properties={**TTL, **SORT})
    lake.tier_rows(10)
    newest_us = lake.tiering.service.now_ms * 1_000
    lake.tiering.service.sleep(TTL_S * 1.2)
    lake.tier_rows(10)
    reached = []

    def checkpoint(at: str) -> None:
        reached.append(at)
        if (at, reached.count(at)) == (step, nth):
            raise Killed

    with pytest.raises(Killed):
        lake.tiering.round(
            _idle_claim(lake), maintainer=_maintainer(lake, checkpoint=checkpoint)
        ).run()
    lake.tiering.service.release("db.t")

    # Readers of either layout begin at the same offset from the first of these steps on, and no
    # layout lacks a row from there on.
    first = _aged(lake)[0]
    assert first == 10
    # Readers of changes hear of lost inserts before the lake may lack them.
    assert lake.tiering.service.table_state("db.t").lake.expired_at_us == newest_us
    for table in ("db.t", BATCH):
        assert {(0, n) for n in range(first, 20)} <= set(lake.tiering.addresses(table))
    for _ in range(2):
        lake.tiering.round(_idle_claim(lake), maintainer=_maintainer(lake)).run()
    for table in ("db.t", BATCH):
        assert lake.tiering.addresses(table) == [(0, n) for n in range(10, 20)]


def test_without_it_rows_stay_for_ever(lake: LogTableWorld) -> None:
    lake.tiering.create_table(properties={"table.datalake.ttl": "forever"})
    lake.tier_rows(10)
    lake.tiering.service.sleep(1e9)
    assert lake.tiering.maintain(_maintainer(lake), policy=lake.tiering.on_demand()).removed is None
    lake.check()


def test_rows_by_key_do_not_leave_with_their_files(lake: LogTableWorld) -> None:
    """The service deletes those that have reached their time."""
    lake.tiering.create_table(primary_key=["id"], properties=TTL)
    assert lake.tiering.policy().ttl_us is None
    assert lake.tiering.policy().rewrite.slice_us is None


def test_rows_are_not_removed_from_files_that_another_engine_rewrote(
    lake: LogTableWorld,
) -> None:
    lake.tiering.create_table(properties=TTL)
    lake.tier_small_files(3)
    lake.tiering.service.sleep(TTL_S + 1)
    lake.tier_rows(10)

    def rewrite_meanwhile(step: str) -> None:
        if step == "removal-staged":
            lake.tiering.lake_table().overwrite(lake.tiering.lake_table().scan().to_arrow())

    with pytest.raises(UnavailableError, match="no longer part of it"):
        lake.tiering.maintain(
            _maintainer(lake, checkpoint=rewrite_meanwhile), policy=lake.tiering.on_demand()
        )
    lake.check()


@pytest.mark.parametrize("step", ["removal-staged", "removal-committed"])
def test_a_worker_may_die_at_it(lake: LogTableWorld, step: str) -> None:
    lake.tiering.create_table(properties={**TTL, "table.datalake.snapshot.max-age": "1ms"})
    for _ in range(12):
        lake.tier_rows(5)
    lake.tiering.service.sleep(TTL_S + 11)
    maintainer = _maintainer(lake, checkpoint=dying_at(step))
    lake.append(5)
    with pytest.raises(Killed):
        lake.tiering.round(lake.tiering.claim(), maintainer=maintainer).run()
    lake.tiering.service.release("db.t")

    lake.append(5)
    lake.tiering.round(lake.tiering.claim(), maintainer=_maintainer(lake)).run()
    if step == "removal-committed":
        # The next worker found a lake ahead of the service, and only registered it.
        lake.append(5)
    while any(p.tiered_offset < p.high_watermark for p in _positions(lake)):
        lake.tiering.round(lake.tiering.claim(), maintainer=_maintainer(lake)).run()

    kept = [offset for _, offset in lake.tiering.addresses()]
    assert kept == list(range(60, _positions(lake)[0].high_watermark))


def _positions(lake: LogTableWorld) -> list[Any]:
    return list(lake.tiering.service.table_state("db.t").positions.values())
