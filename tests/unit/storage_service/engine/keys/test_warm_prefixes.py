"""Lookups by prefix in the rows that a standby follows: those of the owner when it was applied."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.model.bucketing import buckets_for_rows
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.engine.keys.key_lookup import KeyAnswer
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.keys.warm_tables import WarmTable
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from tests.support.followed_directory import TABLE, FollowedWorld
from tests.support.in_process_service import begin, open_manager, routed, table_descriptor

ROWS = pa.schema(
    [
        pa.field("shop", pa.string(), nullable=False),
        pa.field("item", pa.int64(), nullable=False),
        pa.field("value", pa.int64()),
    ]
)
SHOPS = ["", "a", "ab", "b", "\N{GREEK SMALL LETTER OMEGA}"]
BUCKETS = 3
Model = dict[tuple[str, int], int]


class _Shops(FollowedWorld):
    """A table with keys of two columns, and the rows that it should have."""

    def __init__(self, folder: Path, manager: TabletManager, bucket_key: tuple[str, ...]) -> None:
        super().__init__(folder, manager)
        self.bucket_key = bucket_key
        self.rows: Model = {}

    async def create_shops(self) -> None:
        await self.manager.create_table(
            table_descriptor(
                str(TABLE),
                ROWS,
                primary_key=("shop", "item"),
                bucket_key=self.bucket_key,
                bucket_count=BUCKETS,
                properties={"table.log.segment-bytes": "64kb"},
            )
        )
        self.follow()

    def routed(self, rows: Model) -> list[tuple[int, pa.RecordBatch]]:
        columns = ([shop for shop, _ in rows], [item for _, item in rows], list(rows.values()))
        arrays = [pa.array(c, f.type) for c, f in zip(columns, ROWS, strict=True)]
        batch = pa.record_batch(arrays, schema=ROWS)
        numbers = buckets_for_rows(batch, self.bucket_key, BUCKETS)
        return [(int(n), batch.filter(pa.array(numbers == n))) for n in np.unique(numbers)]

    async def put(self, rows: Model) -> None:
        self.rows |= rows
        await self._write([KeyWrite(bucket, part) for bucket, part in self.routed(rows)])

    async def remove(self, rows: Model) -> None:
        self.rows = {key: value for key, value in self.rows.items() if key not in rows}
        parts = self.routed(rows)
        await self._write([delete_of(b, part.select(["shop", "item"])) for b, part in parts])

    async def _write(self, writes: list[KeyWrite]) -> None:
        table = self.manager.table(TABLE)
        assert isinstance(table, KeyTable)
        await self.manager.write_keys(table, writes, columns=None, writer_id=0)

    async def overwrite(self, rows: Model) -> None:
        """Replace all rows by a transaction."""
        self.rows = dict(rows)
        table = self.manager.table(TABLE)
        transactions = self.manager.transactions.of(table)
        begun = await begin(transactions, operation=TransactionOperation.OVERWRITE)
        batches = [routed(bucket, part) for bucket, part in self.routed(rows)]
        part, _ = await transactions.stage(begun, ROWS, batches, token=None)
        await transactions.commit(begun, [part], wait_s=20)

    @property
    def shown(self) -> WarmTable:
        return self.tables.by_path[TABLE]


def _under(table: WarmTable, *shops: str, limit: int = 1_000) -> KeyAnswer:
    return table.lookup.prefix_rows(pa.record_batch([list(shops)], names=["shop"]), rows_max=limit)


def _check(table: WarmTable, model: Model, random: Random) -> None:
    """Compare an answer of several prefixes with the model."""
    shops, limit = random.sample(SHOPS, random.randint(1, 3)), random.randint(1, 12)
    answer = _under(table, *shops, limit=limit)
    assert table.shows(answer.ends)
    expected, more = [], []
    for position, shop in enumerate(shops):
        rows = sorted((item, value) for (name, item), value in model.items() if name == shop)
        expected += [{"shop": shop, "item": i, "value": v} for i, v in rows[:limit]]
        more += [position] if len(rows) > limit else []
    assert (answer.rows.to_pylist(), list(answer.more)) == (expected, more)


@pytest.mark.parametrize("bucket_key", [("shop",), ("shop", "item")])
@pytest.mark.parametrize("seed", range(3))
async def test_the_rows_under_a_prefix_are_those_of_the_applied_moment(
    tmp_path: Path, bucket_key: tuple[str, ...], seed: int
) -> None:
    """In memory and in files, through deletes, overwrites, rolled segments and restarts."""
    random = Random(seed)
    async with open_manager(tmp_path / "owner") as manager:
        world = _Shops(tmp_path, manager, bucket_key)
        await world.create_shops()
        applied: Model = {}
        for number in range(40):
            keys = [(random.choice(SHOPS), random.randrange(12)) for _ in range(10)]
            rows = {key: 100 * number + i for i, key in enumerate(keys)}
            match random.randrange(8):
                case 0:
                    await world.remove(rows)
                case 1:
                    await world.overwrite(rows)
                case _:
                    await world.put(rows)
            _check(world.shown, applied, random)
            if random.random() < 0.6:
                world.follow()
                applied = dict(world.rows)
            match random.randrange(6):
                case 0:
                    world.restart()
                case 1:
                    for warm in world.warm._buckets.values():
                        warm.rows.flush()
            _check(world.shown, applied, random)
        world.close()


class _Reader(threading.Thread):
    """Reads one prefix again and again; `answers` has the visible ends before, and the answer."""

    def __init__(self, table: WarmTable, is_over: threading.Event) -> None:
        super().__init__()
        self._table, self._is_over = table, is_over
        self.answers: list[tuple[tuple[int, ...], KeyAnswer]] = []

    def run(self) -> None:
        while not self._is_over.is_set():
            ends = tuple(self._table.ends)
            self.answers.append((ends, _under(self._table, "a")))


async def test_rows_under_a_prefix_never_go_back_beside_the_following_thread(
    tmp_path: Path,
) -> None:
    """An answer has what is visible before, and nothing beyond its own ends."""
    async with open_manager(tmp_path / "owner") as manager:
        world = _Shops(tmp_path, manager, ("shop", "item"))
        await world.create_shops()
        is_over, ends = threading.Event(), list[tuple[int, ...]]()

        async def write(number: int) -> None:
            await world.put({("a", item): number for item in range(60)})
            world.follow()
            ends.append(tuple(world.shown.ends))
            if number % 10 == 9:
                for warm in world.warm._buckets.values():
                    warm.rows.flush()

        await write(0)
        readers = [_Reader(world.shown, is_over) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(1, 60):
            await write(number)
        is_over.set()
        for reader in readers:
            reader.join(60)

        answers = [answer for reader in readers for answer in reader.answers]
        assert answers
        for before, answer in answers:
            values = answer.rows["value"].to_pylist()
            newest = next(
                number
                for number, visible in enumerate(ends)
                if all(end <= visible[bucket] for bucket, end in answer.ends.items())
            )
            assert len(values) == 60
            assert ends.index(before) <= min(values) <= max(values) <= newest
        for reader in readers:
            columns = [answer.rows["value"].to_numpy() for _, answer in reader.answers]
            assert all((former <= later).all() for former, later in pairwise(columns))
        world.close()
