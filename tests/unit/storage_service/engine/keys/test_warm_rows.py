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
    """Segments roll and go, the standby restarts, and objects come whole or several at once."""
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
                (log,) = manager.table(TABLE).tablets
                assert world.applied_offset() == log.high_watermark
                if random.random() < 0.3:
                    log.apply_retention(timestamp_us_before=1 << 62, offset_max=log.high_watermark)
                if random.random() < 0.3:
                    world.restart()
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


async def _write_segments(world: FollowedWorld, count: int) -> None:
    """Write `count` changes, each of which takes a segment."""
    for number in range(count):
        await world.write([number], f"{number}" * (1 << 20))


def _mapped(world: FollowedWorld) -> list[str]:
    """Return the lines of the standby's logs in the process's memory map."""
    lines = Path("/proc/self/maps").read_text("utf-8").split("\n")
    return [line for line in lines if f"{world.standby}/tables/1/bucket-0" in line]


async def test_no_file_of_a_log_stays_mapped_once_its_changes_are_applied(tmp_path: Path) -> None:
    """The owner removes it, and a restored directory cuts it in place."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create(**{"table.log.segment-bytes": "1mb"})
        await _write_segments(world, 3)
        world.follow()
        (log,) = manager.table(TABLE).tablets
        log.apply_retention(timestamp_us_before=1 << 62, offset_max=2)
        world.follow()

        assert not [line for line in _mapped(world) if "(deleted)" in line]
        await world.write([9], "x" * 100_000)
        world.follow()
        assert _mapped(world)
        world.warm.leave("tables/1")
        assert not _mapped(world)
        world.close()


async def test_a_bucket_whose_changes_have_left_the_log_is_let_go(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create(**{"table.log.segment-bytes": "1mb"})
        await _write_segments(world, 1)
        world.follow()
        await _write_segments(world, 3)
        (log,) = manager.table(TABLE).tablets
        log.apply_retention(timestamp_us_before=1 << 62, offset_max=3)
        world.follow()

        assert not world.warm._buckets
        world.close()


async def test_damage_of_changes_that_the_rows_have_is_not_met(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create(**{"table.log.segment-bytes": "1mb"})
        await _write_segments(world, 3)
        world.follow()
        for log in sorted(world.standby.glob("tables/*/bucket-0/*.log"))[:2]:
            log.write_bytes(b"damaged")
        world.restart()
        await world.write([7], "more")
        world.follow()

        assert world.applied_offset() == 4
        world.close()


@pytest.mark.parametrize("damaged_byte", [64, 80, 128 + 20])
@pytest.mark.parametrize("is_open_before", [True, False])
async def test_damage_in_the_middle_of_a_log_closes_the_bucket(
    tmp_path: Path, damaged_byte: int, is_open_before: bool
) -> None:
    """In a frame's header, whose chain is broken then, or in its payload."""
    async with open_manager(tmp_path / "owner") as manager:
        world = FollowedWorld(tmp_path, manager)
        await world.create(**{"table.log.segment-bytes": "1mb"})
        if is_open_before:
            world.follow()
        await _write_segments(world, 3)
        changed = world.copy()
        log = min(world.standby.glob("tables/*/bucket-0/*.log"))
        data = bytearray(log.read_bytes())
        data[damaged_byte] ^= 1
        log.write_bytes(data)

        world.warm.follow(changed)

        assert not world.warm._buckets
        world.close()


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
