"""Rows by key that a standby keeps up with a log that it is given file by file."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from tests.support.followed_directory import TABLE, FollowedWorld
from tests.support.in_process_service import ids_of, open_manager
from tests.support.kv_world import looked_up


async def _names_after_takeover(world: FollowedWorld) -> dict[int, str]:
    """Return the rows of a service that takes the standby's directory over."""
    recovery = KeyRecovery(warm=world.warm)
    async with open_manager(world.standby, recovery=recovery) as manager:
        world.warm.close()
        table = manager.table(TABLE)
        keys = pa.record_batch([pa.array(ids_of(table), pa.int64())], names=["id"])
        found = looked_up(table.key_buckets[0].rows, keys).rows.to_pylist()
    return {row["id"]: row["name"] for row in found}


@pytest.mark.parametrize("seed", range(4))
async def test_the_rows_are_those_of_the_owner_at_every_moment(tmp_path: Path, seed: int) -> None:
    """Segments roll, the service restarts, and objects come whole or several at once."""
    random, rows = Random(seed), dict[int, str]()
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create(**{"table.log.segment-bytes": "1mb"})
        for number in range(30):
            ids = random.sample(range(100), random.randint(1, 40))
            name = f"{number}-{'x' * random.choice([1, 5_000])}"
            await world.write(ids, name)
            rows |= dict.fromkeys(ids, name)
            if random.random() < 0.5:
                world.follow()
                ends = [tablet.high_watermark for tablet in manager.table(TABLE).tablets]
                assert world.applied_offset() == ends[0]
        world.follow()

    assert await _names_after_takeover(world) == rows


async def test_a_changed_schema_is_followed(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1], "before")
        world.follow()
        await manager.alter_schema(TABLE, [{"add": "more", "type": "bigint"}])
        world.follow()

    assert await _names_after_takeover(world) == {1: "before"}


async def test_rows_are_loaded_although_changes_never_stop(tmp_path: Path) -> None:
    """A standby that restarts under a busy owner; `load_some` is for a quiet one."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write(list(range(100)), "old")
        world.follow()
        world.restart()
        (warm,) = world.warm._buckets.values()
        assert not warm.rows.is_loaded

        for number in range(3):
            await world.write([number], "new")
            world.follow()
        assert warm.rows.is_loaded

    names = await _names_after_takeover(world)
    assert names == dict.fromkeys(range(100), "old") | dict.fromkeys(range(3), "new")


async def test_a_dropped_table_is_let_go(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1], "before")
        world.follow()

        world.warm.leave("tables/1")

    assert not world.warm._buckets
    shutil.rmtree(world.standby / "tables/1")
    world.warm.close()


async def test_a_bucket_whose_log_is_damaged_is_let_go(tmp_path: Path) -> None:
    """Its damage is met, and said, when somebody owns the directory."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create()
        await world.write([1], "before")
        changed = world.copy()
        (log,) = world.standby.glob("tables/*/bucket-0/*.log")
        data = bytearray(log.read_bytes())
        data[-20] ^= 1
        log.write_bytes(data)

        world.warm.follow(changed)

    assert not world.warm._buckets
