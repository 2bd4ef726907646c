"""A table gets other properties: what is registered, what is not any more, and what is due now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    InvalidSchemaError,
    UnknownColumnError,
)
from streamhouse.core.model.lake.facts import LakeState, SideLakeState
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.service_state import load_service_state
from streamhouse.storage_service.directory.table_files import load_lake_state
from streamhouse.storage_service.engine.open_table import OpenTable
from tests.support.in_process_service import ClaimWorld, claim_world

PARTITION = "table.datalake.batch-layout.partition"
SORT = "table.datalake.batch-layout.sort"
ENDS = {0: 1, 1: 0}


async def _alter(world: ClaimWorld, table: OpenTable, layout: Mapping[str, str]) -> None:
    removals = [key for key in (PARTITION, SORT) if key not in layout]
    await world.manager.alter_properties(table.path, updates=layout, removals=removals)


async def _round(world: ClaimWorld, table: OpenTable, number: int) -> int:
    """Run a round that brings the rows into both lake tables."""
    granted = await world.granted(tables=[table])
    await world.complete(table, granted.epoch, tiered_offsets=ENDS, batch=_batch(number))
    return granted.epoch


def _batch(number: int) -> SideLakeState:
    return SideLakeState(snapshot_id=number, table_uuid="b", tiered_offsets=ENDS)


def _kept(data_dir: Path, table: OpenTable) -> LakeState:
    directory = DataDirectory(data_dir)
    load_service_state(directory)
    return load_lake_state(directory, table.info)


async def test_what_is_in_another_layout_counts_no_more(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
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


async def test_a_round_that_ran_meanwhile_registers_rows_but_no_layout(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
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


async def test_only_another_lake_table_of_the_layout_may_begin_anew(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("t", properties={SORT: "id"})
        await _round(world, table, 1)
        await world.append(table)
        granted = await world.granted(tables=[table])
        fewer = replace(_batch(2), tiered_offsets={0: 0, 1: 0})
        with pytest.raises(InvalidRequestError, match="offset 0 would go back from 1"):
            await world.complete(table, granted.epoch, tiered_offsets=ENDS, batch=fewer)
        # Somebody dropped the one there was.
        anew = replace(fewer, table_uuid="another")
        await world.complete(table, granted.epoch, tiered_offsets=ENDS, batch=anew)
        assert table.lake.batch == anew


@pytest.mark.parametrize(
    "updates",
    [{SORT: "nobody"}, {PARTITION: "day(id)"}],
)
async def test_a_layout_that_cannot_be_leaves_all_as_it_was(
    tmp_path: Path, updates: dict[str, Any]
) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("t", properties={PARTITION: "bucket(2, id)"})
        await _round(world, table, 1)
        before = table.lake

        with pytest.raises((InvalidSchemaError, UnknownColumnError)):
            await world.manager.alter_properties(table.path, updates=updates, removals=())

        assert table.lake == before == _kept(tmp_path, table)
        assert table.info.descriptor.properties == {PARTITION: "bucket(2, id)"}


_NOTHING = {"table.datalake.auto-maintenance": "false"}
_LAKE_CHANGES: list[dict[str, str]] = [
    {"table.datalake.auto-maintenance": "true"},
    {"table.datalake.ttl": "1h"},
    {"table.datalake.snapshot.max-age": "1min"},
    {"table.datalake.snapshot.min-count": "1"},
    {"table.datalake.orphan.min-age": "1d"},
    {"table.datalake.target-file-bytes": "1gb"},
]


@pytest.mark.parametrize("updates", _LAKE_CHANGES, ids=lambda updates: next(iter(updates)))
async def test_a_table_of_which_nothing_was_due_is_looked_at_with_other_properties(
    tmp_path: Path, updates: dict[str, str]
) -> None:
    is_off = "table.datalake.auto-maintenance" in updates

    async with claim_world(tmp_path) as world:
        table = await world.table("t", properties=_NOTHING if is_off else {})
        granted = await world.granted(tables=[table])
        await world.complete(table, granted.epoch, maintenance_due_us=None)
        world.seconds += 1e6
        assert (await world.claim(force=False)).reason == "nothing_to_tier"
        await world.manager.alter_properties(table.path, updates=updates, removals=())
    # Also if the service dies right after the change.
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        granted = await world.granted(force=False)
        # It has looked with these properties: what it says counts.
        await world.complete(table, granted.epoch, maintenance_due_us=1 << 60)
        world.seconds += 1e6
        assert (await world.claim(force=False)).reason == "nothing_to_tier"


async def test_what_a_round_that_ran_meanwhile_says_is_due_is_not_believed(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("t")
        granted = await world.granted(tables=[table])
        updates = {"table.datalake.ttl": "1h"}
        await world.manager.alter_properties(table.path, updates=updates, removals=())
        # Its worker knows of no time to live.
        await world.complete(table, granted.epoch, keep_lease=True)
    async with claim_world(tmp_path) as world:
        (table,) = world.manager.open_tables()
        await world.complete(table, 1, maintenance_due_us=None)
        assert table.lake.maintenance_due_us == 0
        world.seconds += 60
        granted = await world.granted(force=False)
        assert granted.epoch == 2

        await world.complete(table, 2, maintenance_due_us=77)
        assert table.lake.maintenance_due_us == 77


async def test_other_changes_wake_no_worker(tmp_path: Path) -> None:
    async with claim_world(tmp_path) as world:
        table = await world.table("t")
        updates = {"table.datalake.ttl": "1h"}
        await world.manager.alter_properties(table.path, updates=updates, removals=())
        # There is no lake table yet.
        assert table.lake.maintenance_due_us is None
        granted = await world.granted(tables=[table])
        await world.complete(table, granted.epoch, maintenance_due_us=1 << 60)
        before = table.lake

        for updates in (
            {"table.datalake.ttl": "60min"},
            {"table.log.ttl": "1h"},
            {"table.log.segment-bytes": "1mb"},
        ):
            await world.manager.alter_properties(table.path, updates=updates, removals=())

        assert table.lake == before == _kept(tmp_path, table)
