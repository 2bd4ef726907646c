"""Claims, leases, fencing and reports of tiering rounds."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    FencedError,
    HistoryDivergedError,
    InvalidRequestError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import SideLakeState
from tests.support.in_process_service import ClaimWorld, claim_world, table_descriptor


async def test_a_claim_hands_out_a_new_durable_epoch_and_the_cut_to_tier(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()

        assignment = await world.granted()

        assert assignment.epoch == assignment.state.lake.tiering_epoch == 1
        assert assignment.lease_ms == 10_000
        assert assignment.state.positions == table.positions()
    async with claim_world(tmp_path) as world:
        world.seconds += 10
        assert (await world.granted()).epoch == 2


async def test_a_claimed_table_is_not_given_to_another_worker_until_its_lease_ends(
    tmp_path: Path,
) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        first = await world.granted("one")

        answer = await world.claim("two")
        assert (answer.assignment, answer.reason) == (None, "leased")
        assert answer.retry_after_ms == 5_000
        world.seconds += 9
        await world.heartbeat(table, epoch=first.epoch)
        world.seconds += 9
        assert (await world.claim("two")).reason == "leased"
        world.seconds += 2
        assert (await world.granted("two")).epoch == 2

        for call in (
            world.heartbeat(table, epoch=first.epoch),
            world.complete(table, first.epoch),
            world.fail(table, epoch=first.epoch, error="late"),
        ):
            with pytest.raises(FencedError, match="epoch 1 is not the current one, 2 of worker"):
                await call


async def test_a_worker_of_a_dropped_table_moves_no_lease_of_the_next_of_its_name(
    tmp_path: Path,
) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        dropped_id = table.info.table_id
        dropped_epoch = (await world.granted("one")).epoch
        await world.manager.drop_table(table.path)
        table = await world.table()
        assert (await world.granted("two")).epoch == dropped_epoch
        world.seconds += 6

        for call in (
            world.tiering.heartbeat(table, table_id=dropped_id, epoch=dropped_epoch),
            world.tiering.fail(table, table_id=dropped_id, epoch=dropped_epoch, error="late"),
            world.complete(table, dropped_epoch, table_id=dropped_id),
        ):
            with pytest.raises(TableNotFoundError, match=f"with id {dropped_id} does not exist"):
                await call

        assert world.tiering.status(table)["lease_left_ms"] == 4_000
        assert world.tiering.status(table)["worker_id"] == "two"


async def test_only_one_of_many_claims_at_once_wins(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        await world.table()

        answers = await asyncio.gather(*(world.claim(f"w{i}") for i in range(8)))

        assert sum(answer.assignment is not None for answer in answers) == 1
        assert {a.reason for a in answers if a.assignment is None} == {"leased"}


async def test_a_table_without_a_lake_is_not_the_reason_beside_others(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("first")
        assignment = await world.granted()
        await world.complete(table, assignment.epoch)
        await world.table("second", properties={"table.datalake.enabled": "false"})

        assert (await world.claim()).reason == "nothing_to_tier"


async def test_a_completed_round_moves_the_tiered_offsets_durably(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        assignment = await world.granted()

        lake = await world.complete(table, assignment.epoch)

        assert (lake.snapshot_id, lake.tiered_offsets) == (11, {0: 5, 1: 5})
        assert table.state().lake == lake
        assert (await world.claim()).reason == "nothing_to_tier"
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        assert (table.lake.snapshot_id, table.lake.table_uuid) == (11, "uuid")
        assert [p.tiered_offset for p in table.positions().values()] == [5, 5]


def _history(*ends: int) -> SideLakeState:
    return SideLakeState(snapshot_id=77, table_uuid="history", tiered_offsets=dict(enumerate(ends)))


async def test_a_full_history_is_reported_with_the_rows_and_stays(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        epoch = (await world.granted()).epoch

        await world.complete(
            table, epoch, tiered_offsets={0: 3, 1: 3}, changelog=_history(4, 3), keep_lease=True
        )
        # Maintenance reports a snapshot of rows alone.
        lake = await world.complete(table, epoch, tiered_offsets={0: 3, 1: 3}, snapshot_id=12)

        assert (lake.snapshot_id, lake.changelog) == (12, _history(4, 3))
        with pytest.raises(InvalidRequestError, match="would go back from 4"):
            await world.complete(table, epoch, changelog=_history(3, 3))
        assert table.lake == lake
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        assert table.lake.changelog == _history(4, 3)


async def test_a_round_that_outlived_a_restart_may_still_report(tmp_path: Path) -> None:
    epochs = []

    async with claim_world(tmp_path) as world:
        await world.table()
        epochs.append((await world.granted()).epoch)
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        await world.heartbeat(table, epoch=epochs[0])
        assert (await world.claim("two")).reason == "leased", "the heartbeat renewed the lease"
        await world.complete(table, epochs[0])


async def test_reporting_twice_answers_the_same(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        epoch = (await world.granted()).epoch

        first = await world.complete(table, epoch)
        world.seconds += 5

        assert await world.complete(table, epoch) == first


async def test_a_late_heartbeat_does_not_take_back_a_finished_rounds_lease(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        epoch = (await world.granted()).epoch
        await world.complete(table, epoch, tiered_offsets={0: 5, 1: 4})

        await world.heartbeat(table, epoch=epoch)

        assert (await world.granted("two")).epoch == 2


async def test_a_round_that_registers_an_ahead_snapshot_may_keep_its_lease(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        epoch = (await world.granted()).epoch

        await world.complete(table, epoch, tiered_offsets={0: 5, 1: 0}, keep_lease=True)

        assert (await world.claim("two")).reason == "leased"
        await world.complete(table, epoch, snapshot_id=12)
        assert table.lake.snapshot_id == 12


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tiered_offsets": {0: 5}}, InvalidRequestError, "exactly the buckets 0..1; bucket 1 is"),
        ({"tiered_offsets": {0: 5, 1: 5, 2: 0}}, InvalidRequestError, "bucket 2 is missing or unk"),
        ({"tiered_offsets": {0: 3, 1: 5}}, InvalidRequestError, "offset 3 would go back from 4"),
        ({"table_id": 99}, TableNotFoundError, "with id 99 does not exist: it was dropped"),
        ({"epoch": 7}, FencedError, "epoch 7 is not the current one, 1; stop this round"),
    ],
)
async def test_a_wrong_report_is_refused_and_changes_nothing(
    tmp_path: Path, changes: dict[str, Any], error: type[StreamhouseError], message: str
) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        epoch = (await world.granted()).epoch
        await world.complete(table, epoch, tiered_offsets={0: 4, 1: 4})
        before = table.lake

        with pytest.raises(error, match=re.escape(message)):
            await world.complete(table, **{"epoch": epoch, "snapshot_id": 12, **changes})

        assert table.lake == before


async def test_a_table_nobody_claimed_has_no_epoch_to_report_under(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()

        with pytest.raises(FencedError, match="epoch 0 is not the current one, 0"):
            await world.complete(table, 0)


async def test_after_failures_a_table_rests_longer_each_time(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table(properties={"table.datalake.freshness": "1ms"})
        world.seconds += 1
        for pause_ms in (1_000, 2_000, 4_000, 4_000):
            epoch = (await world.granted(force=False)).epoch
            assert await world.fail(table, epoch=epoch, error="boom") == pause_ms
            answer = await world.claim(force=False)
            assert answer.reason == "paused_after_failure"
            assert answer.retry_after_ms == pause_ms + 1
            world.seconds += pause_ms / 1000 + 0.001
        assert world.tiering.round_of(table).last_error == "boom"

        await world.complete(table, (await world.granted()).epoch)

        assert world.tiering.round_of(table).failures == 0


async def test_force_takes_a_resting_table_at_once(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        await world.fail(table, epoch=(await world.granted()).epoch, error="boom")

        assert (await world.granted(force=True)).epoch == 2


async def test_a_table_is_handed_out_when_its_rows_get_too_old(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        await world.table(properties={"table.datalake.freshness": "3s"})

        answer = await world.claim(force=False)
        assert (answer.reason, answer.retry_after_ms) == ("not_due", 2_400)
        world.seconds += 2.4

        assert (await world.granted(force=False)).epoch == 1


async def test_the_table_furthest_behind_its_freshness_comes_first(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        slow = await world.table("slow", properties={"table.datalake.freshness": "1h"})
        fast = await world.table("fast", properties={"table.datalake.freshness": "1s"})
        world.seconds += 2

        claimed = [(await world.granted()).state.table.path for _ in range(2)]

        assert claimed == [fast.path, slow.path]


async def test_only_the_wanted_tables_are_handed_out(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        wanted = await world.table("wanted")
        await world.table("other")

        assert (await world.granted(tables=[wanted])).state.table.path == wanted.path
        assert (await world.claim(tables=[wanted])).reason == "leased"


async def test_tables_that_cannot_be_tiered_are_not_handed_out(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        assert (await world.claim()).reason == "no_tables"
        await world.manager.create_table(table_descriptor("empty"))
        assert (await world.claim()).reason == "nothing_to_tier"
        off = await world.table("off", properties={"table.datalake.enabled": "false"})
        assert (await world.claim(tables=[off])).reason == "datalake_disabled"


async def test_a_damaged_log_does_not_keep_other_tables_from_being_tiered(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        damaged = await world.table("damaged")
        good = await world.table("good")
        directory = tmp_path / "tables" / str(damaged.info.table_id) / "bucket-0"
        (log,) = directory.glob("*.log")
        content = bytearray(log.read_bytes())
        content[-20] ^= 1
        with log.open("r+b") as file:
            file.write(content)

        assert (await world.granted()).state.table.path == good.path
        assert (await world.claim(tables=[damaged])).reason == "unreadable"


_OTHER_HISTORIES: list[tuple[dict[str, Any], str]] = [
    ({"tiered_offsets": {0: 6, 1: 5}}, "up to offset 6, but this log ends at 5"),
    ({"fingerprints": {1: "0" * 16}}, "bucket 1: the lake has other rows below offset 5"),
    ({"changelog": _history(4, 6)}, "bucket 1: the lake has rows up to offset 6"),
]


@pytest.mark.parametrize(("changes", "message"), _OTHER_HISTORIES)
async def test_a_lake_of_another_history_ends_writing_and_tiering_for_good(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    async def check(world: ClaimWorld) -> None:
        (table,) = world.manager.open_tables()
        assert message in table.lake.diverged
        assert table.lake.tiered_offsets == {0: 4, 1: 4}
        assert (await world.claim(force=True)).reason == "history_diverged"
        with pytest.raises(HistoryDivergedError, match=re.escape(message)):
            await table.gate.enter()

    async with claim_world(tmp_path) as world:
        table = await world.table()
        epoch = (await world.granted()).epoch
        await world.complete(table, epoch, tiered_offsets={0: 4, 1: 4})

        with pytest.raises(HistoryDivergedError, match=re.escape(message)):
            await world.complete(table, epoch, **{"tiered_offsets": {0: 5, 1: 5}, **changes})
        await check(world)
        # What fits is registered no more, until somebody has chosen.
        with pytest.raises(HistoryDivergedError, match=re.escape(message)):
            await world.complete(table, epoch, tiered_offsets={0: 5, 1: 5})
    async with claim_world(tmp_path) as world:
        await check(world)


async def test_an_epoch_that_was_not_given_out_here_needs_proof(tmp_path: Path) -> None:
    """Twins, or a directory restored from a backup, of which only one has the lake's rows."""

    async with claim_world(tmp_path) as world:
        table = await world.table()
        table_id = table.info.table_id
        ends = {0: 5, 1: 5}
        own = await world.tiering.compare_history(
            table, table_id=table_id, covered=None, offsets=ends
        )
        known = CoveredOffsets(tiered_offsets=ends, epoch=9, fingerprints=own)

        assert (await world.granted()).epoch == 1
        await world.tiering.compare_history(table, table_id=table_id, covered=known, offsets={})
        assert (await world.granted()).epoch == 10

        unknown = replace(known, epoch=11, fingerprints={0: own[0]})
        with pytest.raises(HistoryDivergedError, match=r"bucket 1: .* tiering epoch 11"):
            await world.tiering.compare_history(
                table, table_id=table_id, covered=unknown, offsets={}
            )


async def test_a_lake_state_of_another_log_is_noticed_at_the_start(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        await world.complete(table, (await world.granted()).epoch)
        assert set(table.lake.fingerprints) == {0, 1}
        other = {**table.lake.fingerprints, 0: "f" * 16}
        await world.tiering.record(table, replace(table.lake, fingerprints=other))
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        assert "bucket 0: the lake has other rows below offset" in table.lake.diverged
        assert table.gate.is_stopped


async def test_a_lake_that_is_the_logs_again_lets_the_table_go_on(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table()
        table_id, ends = table.info.table_id, {0: 4, 1: 0}
        own = await world.tiering.compare_history(
            table, table_id=table_id, covered=None, offsets=ends
        )
        await world.tiering.record(table, replace(table.lake, diverged="the lake has other rows"))
        proven = CoveredOffsets(tiered_offsets=ends, epoch=1, fingerprints=own)

        for unproven in (
            replace(proven, fingerprints={}),
            replace(proven, tiered_offsets={0: 5, 1: 0}),
        ):
            assert not await world.tiering.reconcile(table, unproven)
            assert table.gate.is_stopped
        assert await world.tiering.reconcile(table, proven)

        await world.append(table)
        assert (await world.granted()).epoch == 1
