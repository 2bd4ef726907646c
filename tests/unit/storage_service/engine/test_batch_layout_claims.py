"""When a round is to advance the batch layout, and what is known of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamhouse.core.model.lake.facts import SideLakeState
from tests.support.in_process_service import claim_world

LAYOUT = {
    "table.datalake.batch-layout.sort": "id",
    "table.datalake.batch-layout.freshness": "10min",
}


def _layout(*ends: int) -> SideLakeState:
    return SideLakeState(snapshot_id=77, table_uuid="layout", tiered_offsets=dict(enumerate(ends)))


async def test_a_batch_layout_of_its_own_freshness_is_due_less_often(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table(properties=LAYOUT)
        first = await world.granted()
        assert first.is_batch_due
        both = _layout(5, 5)
        lake = await world.complete(table, first.epoch, batch=both)
        assert (lake.batch, lake.batch_tiered_at_us) == (both, lake.tiered_at_us)
        assert (await world.claim()).reason == "nothing_to_tier"

        await world.append(table)
        world.seconds += 70
        second = await world.granted(force=False)
        assert not second.is_batch_due
        await world.complete(table, second.epoch, tiered_offsets={0: 10, 1: 10})
        assert (await world.claim(force=False)).reason == "not_due"

        world.seconds += 600
        third = await world.granted(force=False)
        assert third.is_batch_due
        lake = await world.complete(
            table, third.epoch, tiered_offsets={0: 10, 1: 10}, batch=_layout(10, 10)
        )
        assert lake.batch == _layout(10, 10)
        assert (await world.claim(force=False)).reason == "nothing_to_tier"


async def test_who_asks_for_a_table_gets_its_batch_layout_too(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table(properties=LAYOUT)
        epoch = (await world.granted()).epoch
        await world.complete(table, epoch, batch=_layout(2, 2))

        assert (await world.granted(force=True)).is_batch_due


async def test_a_batch_layout_in_every_round_is_always_due(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table(properties={"table.datalake.batch-layout.sort": "id"})
        epoch = (await world.granted()).epoch
        await world.complete(table, epoch, batch=_layout(5, 5))
        await world.append(table)
        world.seconds += 61

        assert (await world.granted(force=False)).is_batch_due


async def test_an_overwrite_is_due_in_the_rows_and_in_the_batch_layout(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table(properties={"table.datalake.batch-layout.sort": "id"})
        await world.complete(table, (await world.granted()).epoch, batch=_layout(5, 5))
        table.truncate({0: 5, 1: 5}, timestamp_us=world._clock_us())
        transactions = world.manager.transactions.of(table)
        transactions._files.save_truncated(table.truncated_offsets, table.truncated_at_us)
        world.seconds += 61

        epoch = (await world.granted(force=False)).epoch
        lake = await world.complete(table, epoch, truncated_offsets={0: 5, 1: 5})
        assert (lake.truncated_offsets, lake.tiered_offsets) == ({0: 5, 1: 5}, {0: 5, 1: 5})
        assert table.lacks_batch_rows

        layout = replace(_layout(5, 5), truncated_offsets={0: 5, 1: 5})
        lake = await world.complete(table, (await world.granted()).epoch, batch=layout)
        assert (lake.batch, lake.truncated_offsets) == (layout, {0: 5, 1: 5})
        assert (await world.claim()).reason == "nothing_to_tier"
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        assert table.lake.truncated_offsets == {0: 5, 1: 5}
        assert table.lake.batch is not None
        assert table.lake.batch.truncated_offsets == {0: 5, 1: 5}
