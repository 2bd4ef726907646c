"""A table gets, changes and loses its batch layout: what is registered, what is not any more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamhouse.storage_service.errors import InvalidSchemaError, UnknownColumnError
from streamhouse.storage_service.model.lake import LakeState, SideLakeState
from streamhouse.storage_service.tablet.data_directory import DataDirectory
from streamhouse.storage_service.tablet.lake_store import load_lake_state
from streamhouse.storage_service.tablet.open_table import OpenTable
from tests.support.claim_world import World, run

PARTITION = "table.datalake.batch-layout.partition"
SORT = "table.datalake.batch-layout.sort"
ENDS = {0: 1, 1: 0}


async def _alter(world: World, table: OpenTable, layout: Mapping[str, str]) -> None:
    removals = [key for key in (PARTITION, SORT) if key not in layout]
    await world.manager.alter_properties(table.path, updates=layout, removals=removals)


async def _round(world: World, table: OpenTable, number: int) -> int:
    """Run a round that brings the rows into both lake tables."""
    granted = await world.granted(tables=[table])
    await world.complete(table, granted.epoch, tiered_offsets=ENDS, batch=_batch(number))
    return granted.epoch


def _batch(number: int) -> SideLakeState:
    return SideLakeState(snapshot_id=number, table_uuid="b", tiered_offsets=ENDS)


def _kept(data_dir: Path, table: OpenTable) -> LakeState:
    return load_lake_state(DataDirectory(data_dir), table.info)


def test_what_is_in_another_layout_counts_no_more(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        table = await world.table("t", properties={SORT: "id"})
        await _round(world, table, 1)
        assert table.lake.batch == _batch(1)

        for layout in ({SORT: "id", PARTITION: "bucket(2, id)"}, {}, {SORT: "id"}):
            await _alter(world, table, layout)
            assert table.lake.batch is None
            assert table.lake.batch_since_epoch == table.lake.tiering_epoch
            assert _kept(tmp_path, table) == table.lake
            assert table.lacks_batch_rows == bool(layout)
            if layout:
                await _round(world, table, 2)
                assert table.lake.batch == _batch(2)

        # Nothing but the layout itself makes it another one.
        await world.manager.alter_properties(
            table.path,
            updates={SORT: " id ", "table.datalake.batch-layout.freshness": "1h"},
            removals=(),
        )
        assert table.lake.batch == _batch(2)

    run(tmp_path, scenario)


def test_a_round_that_ran_meanwhile_registers_rows_but_no_layout(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        table = await world.table("t", properties={SORT: "id"})
        granted = await world.granted(tables=[table])

        await _alter(world, table, {PARTITION: "bucket(2, id)"})
        for keep_lease in (True, False):
            await world.complete(
                table, granted.epoch, tiered_offsets=ENDS, batch=_batch(1), keep_lease=keep_lease
            )

        assert table.lake.tiered_offsets == ENDS
        assert table.lake.batch is None
        # The next one brings them into the layout there is.
        await _round(world, table, 2)
        assert table.lake.batch == _batch(2)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "updates",
    [{SORT: "nobody"}, {PARTITION: "day(id)"}],
)
def test_a_layout_that_cannot_be_leaves_all_as_it_was(
    tmp_path: Path, updates: dict[str, Any]
) -> None:
    async def scenario(world: World) -> None:
        table = await world.table("t", properties={PARTITION: "bucket(2, id)"})
        await _round(world, table, 1)
        before = table.lake

        with pytest.raises((InvalidSchemaError, UnknownColumnError)):
            await world.manager.alter_properties(table.path, updates=updates, removals=())

        assert table.lake == before == _kept(tmp_path, table)
        assert table.info.descriptor.properties == {PARTITION: "bucket(2, id)"}

    run(tmp_path, scenario)
