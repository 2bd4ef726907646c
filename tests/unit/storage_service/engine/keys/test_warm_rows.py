"""Rows by key that a standby keeps up with a log that it is given file by file."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.keys.warm_rows import WarmRows
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.in_process_service import EVENTS, ids_of, open_manager, table_descriptor
from tests.support.kv_world import looked_up

TABLE = TablePath.parse("default.keyed")


class _World:
    """An owner's directory, and one to which its files are copied as they change."""

    def __init__(self, folder: Path, manager: TabletManager) -> None:
        self.owner, self.standby = folder / "owner", folder / "standby"
        self.manager = manager
        self.standby.mkdir()
        self.warm = WarmRows(DataDirectory(self.standby), ServiceConfig(data_dir=self.standby))
        self._copied: dict[str, bytes] = {}

    async def create(self, **properties: str) -> None:
        await self.manager.create_table(
            table_descriptor(str(TABLE), primary_key=("id",), properties=properties)
        )

    async def write(self, ids: list[int], name: str) -> None:
        table = self.manager.table(TABLE)
        assert isinstance(table, KeyTable)
        rows = pa.record_batch([pa.array(ids, pa.int64()), [name] * len(ids)], schema=EVENTS)
        await self.manager.write_keys(table, [KeyWrite(0, rows)], columns=None, writer_id=0)

    def copy(self) -> set[str]:
        """Copy what has changed; return its paths."""
        changed = set()
        for source in sorted(self.owner.rglob("*")):
            path = source.relative_to(self.owner).as_posix()
            if not source.is_file() or "/kv" in path or path == "LOCK":
                continue
            data = source.read_bytes()
            if self._copied.get(path) != data:
                self._copied[path] = data
                (self.standby / path).parent.mkdir(parents=True, exist_ok=True)
                (self.standby / path).write_bytes(data)
                changed.add(path)
        return changed

    def follow(self) -> None:
        self.warm.follow(self.copy())

    def applied_offset(self) -> int:
        (warm,) = self.warm._buckets.values()
        return warm.rows.applied_offset


async def _names_after_takeover(world: _World) -> dict[int, str]:
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
        world = _World(tmp_path, manager)
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
        world = _World(tmp_path, manager)
        await world.create()
        await world.write([1], "before")
        world.follow()
        await manager.alter_schema(TABLE, [{"add": "more", "type": "bigint"}])
        world.follow()

    assert await _names_after_takeover(world) == {1: "before"}


async def test_a_dropped_table_is_let_go(tmp_path: Path) -> None:
    async with open_manager(tmp_path / "owner") as manager:
        world = _World(tmp_path, manager)
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
        world = _World(tmp_path, manager)
        await world.create()
        await world.write([1], "before")
        changed = world.copy()
        (log,) = world.standby.glob("tables/*/bucket-0/*.log")
        data = bytearray(log.read_bytes())
        data[-20] ^= 1
        log.write_bytes(data)

        world.warm.follow(changed)

    assert not world.warm._buckets
