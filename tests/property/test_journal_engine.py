"""The engine opens what was restored, and shows exactly the rows that it must."""

from __future__ import annotations

import errno
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.errors import InvalidRequestError, StorageFailedError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.filesystem import LocalFilesystem
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from tests.support.held_step import around
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    make_table,
    open_manager,
    routed,
    table_descriptor,
)
from tests.support.journalled_engine import (
    Gate,
    JournalledEngine,
    journalled_engine,
    logged_ids,
    names_by_id,
)


@dataclass
class Rows:
    """What tables must show: ids by bucket, names by key."""

    logged: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    keyed: dict[str, dict[int, str]] = field(default_factory=dict)
    next_id: int = 0


class Work:
    """Random changes of an engine, and what they must lead to."""

    def __init__(self, engine: JournalledEngine, rows: Rows, rng: random.Random) -> None:
        self.manager = engine.manager
        self.engine = engine
        self.rows = rows
        self.rng = rng

    async def step(self) -> None:
        kind = self.rng.choice(["append"] * 6 + ["upsert"] * 6 + ["create", "drop"])
        logs, keyed = sorted(self.rows.logged), sorted(self.rows.keyed)
        if kind == "append" and logs:
            await self.append(self.rng.choice(logs))
        elif kind == "upsert" and keyed:
            await self.upsert(self.rng.choice(keyed))
        elif kind == "drop" and len(logs) + len(keyed) > 3:
            await self.drop(self.rng.choice(logs + keyed))
        elif len(logs) + len(keyed) < 5:
            await self.create(is_keyed=self.rng.random() < 0.5)

    async def create(self, *, is_keyed: bool) -> None:
        name = f"t{self.rng.randrange(10**9)}"
        key = ("id",) if is_keyed else ()
        descriptor = table_descriptor(
            name, bucket_count=2, primary_key=key, properties={"table.log.segment-bytes": "128kb"}
        )
        await self.manager.create_table(descriptor)
        if is_keyed:
            self.rows.keyed[name] = {}
        else:
            self.rows.logged[name] = defaultdict(list)

    async def drop(self, name: str) -> None:
        await self.manager.drop_table(TablePath.parse(name))
        self.rows.logged.pop(name, None)
        self.rows.keyed.pop(name, None)

    async def append(self, name: str, *, width: int = 500) -> None:
        first, bucket = self.rows.next_id, self.rng.randrange(2)
        count = self.rng.randrange(1, 40)
        self.rows.next_id += count
        table = self.manager.table(TablePath.parse(name))
        # A few of these fill a segment.
        wide = pa.array(["x" * width] * count)
        events = pa.record_batch([pa.array(range(first, first + count)), wide], schema=EVENTS)
        await self.manager.append(table, [routed(bucket, events)])
        self.rows.logged[name][bucket].extend(range(first, first + count))

    async def upsert(self, name: str) -> None:
        bucket = self.rng.randrange(2)
        # A key has one bucket for good.
        ids = [2 * number + bucket for number in self.rng.sample(range(50), 5)]
        value = f"v{self.rng.randrange(10**6)}"
        table = self.manager.table(TablePath.parse(name))
        rows = pa.record_batch([pa.array(ids, pa.int64()), [value] * 5], schema=EVENTS)
        await self.manager.write_keys(table, [KeyWrite(bucket, rows)], columns=None, writer_id=0)
        self.rows.keyed[name].update(dict.fromkeys(ids, value))


def check(engine: JournalledEngine, rows: Rows) -> None:
    assert not engine.manager.damaged_tables()
    names = {str(path).rpartition(".")[2] for path in engine.manager.list_tables(None)}
    assert names == set(rows.logged) | set(rows.keyed)
    for name, logged in rows.logged.items():
        found = logged_ids(engine.manager.table(TablePath.parse(name)))
        assert found == [logged.get(bucket, []) for bucket in range(2)], name
    for name, keyed in rows.keyed.items():
        assert names_by_id(engine.manager.table(TablePath.parse(name))) == keyed, name


@pytest.mark.one_of(2)
@pytest.mark.parametrize("seed", range(4))
async def test_eras_on_several_machines_show_exactly_what_was_acknowledged(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    store = FileObjectStore(tmp_path / "store")
    stored, here, last = Rows(), Rows(), ""
    for number in range(5):
        name = rng.choice(["a", "a", "b", f"new{number}"])
        gate = Gate(store)
        async with journalled_engine(tmp_path / name, gate, is_waited_for=False) as engine:
            rows = here if name == last else stored
            check(engine, rows)

            work = Work(engine, rows, rng)
            for _ in range(rng.randrange(25)):
                await work.step()
                if rng.random() < 0.1:
                    await engine.checkpoint()
            await engine.wait_stored()
            stored = deepcopy(rows)
            gate.is_shut = True
            for table in sorted(rows.logged) * 2:
                # A new segment would wait for the journal.
                await work.append(table, width=1)
            for table in sorted(rows.keyed) * 2:
                await work.upsert(table)
            # What is not stored has numbers of its own.
            stored.next_id = rows.next_id
            here, last = rows, name


async def test_a_directory_without_a_journal_is_uploaded_before_anything_else(
    tmp_path: Path,
) -> None:
    store = FileObjectStore(tmp_path / "store")
    async with open_manager(tmp_path / "a") as manager:
        table = await make_table(manager, False)
        for number in range(20):
            rows = event_rows(10 * number, 10 * number + 10)
            await manager.append(table, [routed(0, rows), routed(1, rows)])
        before = logged_ids(table)

    async with journalled_engine(tmp_path / "a", store) as engine:
        assert engine.begun.is_upload

    async with journalled_engine(tmp_path / "b", store) as engine:
        assert logged_ids(engine.manager.table(TablePath.parse("events"))) == before


async def test_a_directory_without_a_journal_is_refused_by_one_that_has_a_service(
    tmp_path: Path,
) -> None:
    store = FileObjectStore(tmp_path / "store")
    async with journalled_engine(tmp_path / "a", store):
        pass
    async with open_manager(tmp_path / "b"):
        pass

    with pytest.raises(InvalidRequestError, match="never had a journal"):
        async with journalled_engine(tmp_path / "b", store):
            pass
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(InvalidRequestError, match="is empty, but"):
        async with journalled_engine(tmp_path / "a", store):
            pass


async def test_rows_by_key_come_from_the_checkpoint_and_the_log_after_it(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path / "store")
    rows = Rows()
    async with journalled_engine(tmp_path / "a", store) as engine:
        work = Work(engine, rows, random.Random(0))
        await work.create(is_keyed=True)
        (name,) = rows.keyed
        for number in range(30):
            await work.upsert(name)
            if number in (10, 20):
                await engine.checkpoint()

    async with journalled_engine(tmp_path / "b", store) as engine:
        restored = engine.begun.restored
        assert restored is not None
        assert len(restored.keys_restored) == 2
        check(engine, rows)


async def test_a_copy_that_went_astray_is_cut_and_its_rows_by_key_are_made_again(
    tmp_path: Path,
) -> None:
    gate = Gate(FileObjectStore(tmp_path / "store"))
    rows = Rows()
    async with journalled_engine(tmp_path / "a", gate, is_waited_for=False) as engine:
        work = Work(engine, rows, random.Random(0))
        await work.create(is_keyed=True)
        (name,) = rows.keyed
        await work.upsert(name)
        await engine.wait_stored()
        stored = deepcopy(rows)
        gate.is_shut = True
        for _ in range(10):
            await work.upsert(name)
    gate.is_shut = False
    async with journalled_engine(tmp_path / "b", gate) as engine:
        check(engine, stored)
        await Work(engine, stored, random.Random(1)).upsert(name)

    async with journalled_engine(tmp_path / "a", gate) as engine:
        restored = engine.begun.restored
        assert restored is not None
        assert restored.cuts
        check(engine, stored)


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("renamed", range(4))
async def test_a_process_that_ends_within_a_roll_goes_on_with_what_the_journal_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int, where: str
) -> None:
    """Index, writer state and next segment are stored; some of them have their names here."""
    store = FileObjectStore(tmp_path / "store")
    rows = Rows()

    def end_within(
        real: object, disk: LocalFilesystem, renames: Sequence[tuple[Path, Path]]
    ) -> None:
        del real
        for source, target in renames[:renamed]:
            disk.rename(source, target)
        raise OSError(errno.EIO, "the process ends here")

    async with journalled_engine(tmp_path / "a", store) as engine:
        work = Work(engine, rows, random.Random(renamed))
        await work.create(is_keyed=False)
        (name,) = rows.logged

        async def append_many() -> None:
            for _ in range(100):
                await work.append(name)

        around(monkeypatch, "files-renaming", end_within)
        with pytest.raises(StorageFailedError, match="the process ends here"):
            await append_many()
        monkeypatch.undo()
    assert any(rows.logged[name].values())

    for directory in (where, where, "c"):
        async with journalled_engine(tmp_path / directory, store) as engine:
            check(engine, rows)
            work = Work(engine, rows, random.Random(renamed))
            for _ in range(20):
                await work.append(name)
            check(engine, rows)
