"""Whose turn it is, who has what after a restart, and what people are shown of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from streamhouse.core.errors import FencedError
from streamhouse.core.model.lake.facts import LakeDebt
from streamhouse.core.model.table_state import EMBEDDED_WORKER_ID
from streamhouse.storage_service.engine.tiering_desk.tiering_round import RoundProgress, SeenWorkers
from tests.support.in_process_service import claim_world, table_descriptor

SHORT = {"table.datalake.freshness": "4s"}


async def test_a_backlog_does_not_starve_the_others(tmp_path: Path) -> None:
    """One slot, rounds of a second, one table with more rows than it ever gets rid of."""

    async with claim_world(tmp_path) as world:
        backlog = await world.table("backlog", properties=SHORT)
        world.seconds += 3_600
        small = [await world.table(f"small{i}", properties=SHORT) for i in range(3)]
        world.seconds += 5
        turns = []
        for tiered in range(1, 5):
            for _ in range(4):
                granted = await world.granted(force=False)
                table = world.manager.table(granted.state.table.path)
                turns.append(table.path.table)
                world.seconds += 1
                ends = {0: tiered, 1: 0}
                await world.complete(table, granted.epoch, snapshot_id=tiered, tiered_offsets=ends)

        # Nobody gets a second round before everybody has had one.
        for start in range(0, len(turns), 4):
            assert Counter(turns[start : start + 4]) == Counter(
                table.path.table for table in (backlog, *small)
            )


async def test_a_table_whose_rows_leave_the_lake_is_looked_after_when_nobody_writes(
    tmp_path: Path,
) -> None:
    async with claim_world(tmp_path) as world:
        aging = await world.table("aging", properties={"table.datalake.ttl": "1h"})
        granted = await world.granted(tables=[aging])
        await world.complete(aging, granted.epoch)
        for _ in range(3):
            world.seconds += 359
            assert (await world.claim(force=False)).reason == "nothing_to_tier"
            world.seconds += 1
            granted = await world.granted(force=False)
            assert granted.state.table.path == aging.path
            await world.complete(aging, granted.epoch)

        world.seconds += 360
        off = {"table.datalake.auto-maintenance": "false"}
        await world.manager.alter_properties(aging.path, updates=off, removals=())
        assert (await world.claim(force=False)).reason == "nothing_to_tier"


async def test_a_table_that_went_idle_is_handed_out_once_when_something_is_due(
    tmp_path: Path,
) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("quiet")
        granted = await world.granted(tables=[table])
        due_us = world._clock_us() + 3_600_000_000
        await world.complete(table, granted.epoch, maintenance_due_us=due_us, keep_lease=True)
        # What counts is what the round says when it ends.
        assert table.lake.maintenance_due_us is None
        await world.complete(table, granted.epoch, maintenance_due_us=due_us)
        world.seconds += 3_599
        assert (await world.claim(force=False)).reason == "nothing_to_tier"

        world.seconds += 1
        granted = await world.granted(force=False)
        assert granted.is_batch_due
        assert (await world.claim("two", force=False)).reason == "leased"
        # It says that nothing will be due again, and costs nothing from then on.
        await world.complete(table, granted.epoch)
        world.seconds += 1e6
        assert (await world.claim(force=False)).reason == "nothing_to_tier"


async def test_what_is_due_survives_a_restart_and_never_makes_a_table_busy(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("quiet")
        granted = await world.granted(tables=[table])
        await world.complete(table, granted.epoch, maintenance_due_us=0)
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        for _ in range(3):
            granted = await world.granted(force=False)
            # A worker that can never tidy it.
            await world.complete(table, granted.epoch, maintenance_due_us=0)
            world.seconds += 59
            assert (await world.claim(force=False)).reason == "nothing_to_tier"
            world.seconds += 1
        off = {"table.datalake.auto-maintenance": "false"}
        await world.manager.alter_properties(table.path, updates=off, removals=())
        assert (await world.claim(force=False)).reason == "nothing_to_tier"


async def test_changed_properties_make_a_worker_look_again(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("quiet", properties={"table.datalake.ttl": "400d"})
        granted = await world.granted(tables=[table])
        await world.complete(table, granted.epoch, maintenance_due_us=1 << 60)
        world.seconds += 1e6
        assert (await world.claim(force=False)).reason == "nothing_to_tier"

        shorter = {"table.datalake.ttl": "1h"}
        await world.manager.alter_properties(table.path, updates=shorter, removals=())

        assert (await world.granted(force=False)).state.table.path == table.path


async def test_a_failing_table_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        bad = await world.table("bad", properties=SHORT)
        good = await world.table("good", properties=SHORT)
        world.seconds += 60
        for _ in range(3):
            granted = await world.granted(tables=[bad])
            await world.fail(bad, epoch=granted.epoch, error="the bucket is away")

        granted = await world.granted(force=False)

        assert granted.state.table.path == good.path
        assert (await world.claim(force=False)).reason == "paused_after_failure"
        assert world.tiering.status(bad)["last_error"] == "the bucket is away"
        assert world.tiering.rounds_ended["failed"] == 3


async def test_after_a_restart_a_table_stays_with_the_worker_that_has_it(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        await world.table()
        await world.granted("one")
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        answer = await world.claim("two")
        assert (answer.assignment, answer.reason) == (None, "leased")
        assert world.tiering.status(table)["worker_id"] == "one"
        world.seconds += 9
        await world.heartbeat(table, epoch=1)
        world.seconds += 9
        assert (await world.claim("two")).reason == "leased"

        await world.complete(table, 1, tiered_offsets={0: 1, 1: 1})

        assert (await world.granted("two")).epoch == 2
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        await world.fail(table, epoch=2, error="stopped")
    async with claim_world(tmp_path) as world:
        # Worker two ended its round before the service stopped: nothing to wait for.
        assert (await world.granted("three")).epoch == 3


async def test_a_worker_that_died_with_the_service_keeps_its_table_for_one_lease(
    tmp_path: Path,
) -> None:
    async with claim_world(tmp_path) as world:
        await world.table()
        await world.granted("one")
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        world.seconds += 10
        assert (await world.granted("two")).epoch == 2
        with pytest.raises(FencedError, match="epoch 1 is not the current one"):
            await world.complete(table, 1)


async def test_the_worker_inside_the_service_has_no_table_after_a_restart(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        await world.table()
        await world.granted(EMBEDDED_WORKER_ID)
    async with claim_world(tmp_path) as world:
        assert (await world.granted(EMBEDDED_WORKER_ID)).epoch == 2


async def test_a_lease_kept_for_maintenance_outlives_a_restart(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        await world.granted("one")
        await world.complete(table, 1, keep_lease=True)
        await world.append(table)
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        assert (await world.claim("two")).reason == "leased"
        await world.complete(table, 1, snapshot_id=12)
        assert (await world.granted("two")).epoch == 2


async def test_rounds_are_counted_once_as_in_time_or_late(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table(properties=SHORT)
        for ends, seconds in ((1, 4.0), (2, 0.1)):
            epoch = (await world.granted()).epoch
            world.seconds += seconds
            done = {"snapshot_id": ends, "tiered_offsets": {0: ends, 1: ends}}
            await world.complete(table, epoch, **done, keep_lease=True)
            world.seconds += 60
            await world.complete(table, epoch, **done)

        assert world.tiering.rounds_ended == {"in_time": 1, "late": 1}


async def test_progress_and_debt_are_shown(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        await world.granted()
        progress = RoundProgress(step="writing", rows_done=3, rows_planned=10)
        await world.heartbeat(table, epoch=1, progress=progress)
        await world.heartbeat(table, epoch=1)
        assert world.tiering.status(table)["progress"] == progress.to_json()

        debt = LakeDebt(
            data_files=7,
            delete_files=2,
            snapshots=5,
            small_files=6,
            deleted_share=0.25,
            maintained_at_us=3,
            maintenance_error="disk full",
        )
        await world.complete(table, 1, debt=debt)

        assert world.tiering.status(table)["progress"] is None
        told = world.tiering.status(table)["maintenance_debt"]
        assert told == {**debt.to_json(), "is_scattered": False}


async def test_an_empty_table_is_never_claimed(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.manager.create_table(table_descriptor("empty", properties=SHORT))

        answer = await world.claim("idler", force=False)

        assert answer.reason == "nothing_to_tier"
        # A row that comes now must not be late because the worker slept.
        assert answer.retry_after_ms == 3_200
        assert table.lake.tiering_epoch == 0
        assert world.tiering.idle_workers() == {"idler": "nothing_to_tier"}
        world.seconds += 61
        assert world.tiering.idle_workers() == {}


def test_workers_that_are_not_heard_of_are_forgotten() -> None:
    workers = SeenWorkers()
    for number in range(1_500):
        workers.asked(f"w{number}", "not_due", now_s=number / 1_000)

    assert len(workers.reasons(1.5)) == 1_000
    assert workers.reasons(100.0) == {}
