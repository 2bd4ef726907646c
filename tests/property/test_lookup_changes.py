"""A looked-up table that is brought up to a cut is the one that would be read at it.

One example is a table's life: upserts, partial updates, deletes and new keys, rounds and retention,
and between them lookups by tasks that share their files. What each finds is compared with a dict,
for all keys that were ever there and some that were not. A file is damaged now and then.
"""

from __future__ import annotations

import tempfile
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.connector.lookup.key_rows import KeyRows, Keys
from streamhouse.connector.lookup.lookup_plan import LookupPlan
from streamhouse.connector.lookup.shared_tables import SharedTables
from streamhouse.connector.lookup.table_cut import PlannedTable
from streamhouse.connector.lookup.whole_rows import SharedCut
from tests.support.examples import examples
from tests.support.key_table_world import KeyTableWorld
from tests.support.union_world import Tiers

ROWS: Final = 64
BUCKETS: Final = 2
VALUES: Final = (pa.field("name", pa.string()), pa.field("n", pa.int64()))
KEYS: Final[dict[str, tuple[list[pa.DataType], Any]]] = {
    "close integers": ([pa.int64()], lambda i: (i,)),
    "integers far apart": (
        [pa.int64()],
        lambda i: (i * 0x9E3779B97F4A7C15 % (1 << 64) - (1 << 63),),
    ),
    "days": ([pa.date32()], lambda i: (date(2026, 1, 1) + timedelta(days=i),)),
    "short texts": ([pa.string()], lambda i: (f"k{i}",)),
    "texts": ([pa.string()], lambda i: (f"k{i}" * (1 + i % 9),)),
    "two columns": ([pa.int32(), pa.string()], lambda i: (i % 7, f"k{i}")),
}


class _Counted(SharedCut):
    """A cut that says how it was come by."""

    def made(self) -> KeyRows:
        _told.append("read")
        return super().made()

    def brought(self, table: KeyRows, place: Any) -> KeyRows | None:
        brought = super().brought(table, place)
        _told.append("not brought" if brought is None else "brought")
        return brought


_told: list[str] = []


class _World:
    """A table, what its tasks share, and lookups of all keys in it."""

    def __init__(self, folder: Path, kind: str, **more: Any) -> None:
        types, self.key_of = KEYS[kind]
        self.names = [f"k{i}" for i in range(len(types))]
        fields = [pa.field(n, t, nullable=False) for n, t in zip(self.names, types, strict=True)]
        self.table = KeyTableWorld(folder)
        self.schema = pa.schema([*fields, *VALUES])
        self.table.create_key_table(
            self.schema, primary_key=self.names, bucket_count=BUCKETS, **more
        )
        self.directory = folder / "shared"
        self.plan = LookupPlan(
            table=KeyTableWorld.PATH,
            endpoint="http://memory",
            token=None,
            given=tuple(self.names),
            key_schema=pa.schema(fields),
            is_whole_key=True,
            columns=("n", "name"),
            row_schema=pa.schema([VALUES[1], VALUES[0]]),
            cache_bytes=1 << 27,
        )

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *error: object) -> None:
        self.table.__exit__(*error)

    def row(self, i: int, **values: Any) -> dict[str, Any]:
        """The row of the i-th key with these values, or as it is in the beginning."""
        key = dict(zip(self.names, self.key_of(i), strict=True))
        return key | (values or {"name": f"n{i}", "n": i})

    def fill(self, count: int = ROWS) -> None:
        self.table.upsert(*(self.row(i) for i in range(count)))

    def cut(self) -> SharedCut:
        cut = PlannedTable(self.plan, self.table.union.client).cut()
        assert cut.name is not None
        return _Counted(self.plan, cut, cut.name)

    def looked_up(self, cut: SharedCut | None = None) -> list[str]:
        """Look all keys up as a task does, and return how it came by the table."""
        _told.clear()
        rows = SharedTables(self.directory).made_once(cut or self.cut())
        told = list(_told)
        expected = {
            tuple(row[name] for name in self.names): row for row in self.table.rows.values()
        }
        asked = [self.key_of(i) for i in range(-3, 3 * ROWS)]
        arrays = [
            pa.array(list(column), field.type)
            for column, field in zip(zip(*asked, strict=True), self.plan.key_schema, strict=True)
        ]
        numbers = rows.find(Keys(arrays))
        starts, counts = rows.runs(numbers)
        n, name = (a.to_pylist() for a in rows.values.at(starts, counts == 0))
        as_python = [tuple(row.values()) for row in pa.table(arrays, names=self.names).to_pylist()]
        for key, found, row in zip(as_python, counts, zip(n, name, strict=True), strict=True):
            there = expected.get(key)
            wanted = (None, None) if there is None else (there["n"], there["name"])
            assert (row, found) == (wanted, there is not None), (key, told)
        return told


def _live(world: _World, random: Random) -> None:
    """Do to the table what may come between two lookups."""
    tiers = Tiers(world.table.union, ())
    what = random.choice(["write"] * 9 + ["tier", "expire", "damage", "nothing"])
    if what == "tier" and tiers.lacks_rows():
        world.table.tiering.tier()
    elif what == "expire":
        tiers.expire(random.random())
    elif what == "damage":
        path = random.choice(sorted(world.directory.iterdir()))
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    elif what == "write":
        span = random.choice([ROWS, ROWS + 20, 2 * ROWS])
        for _ in range(random.choice([1, 1, 2, 3, 9])):
            row = world.row(random.randrange(span), name=f"a{random.random()}", n=None)
            kind = random.choice(["upsert", "upsert", "partial", "delete", "delete then upsert"])
            if kind == "partial":
                row.pop("n")
                world.table.change([("upsert", row)], [*world.names, "name"])
            if kind.startswith("delete"):
                world.table.delete({name: row[name] for name in world.names})
            if kind.endswith("upsert"):
                world.table.upsert(row)


@pytest.mark.parametrize("kind", KEYS)
@settings(max_examples=examples(4), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_brought_is_what_would_be_read(kind: str, seed: int) -> None:
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder, _World(Path(folder), kind) as world:
        world.fill()
        for _ in range(8):
            world.looked_up()
            _live(world, random)
        world.looked_up()


@pytest.mark.parametrize("kind", KEYS)
def test_after_few_changes_only_these_are_read(kind: str, tmp_path: Path) -> None:
    with _World(tmp_path, kind) as world:
        world.fill()
        assert world.looked_up() == ["read"]
        world.table.upsert(world.row(5, name="new", n=50))
        assert world.looked_up() == ["brought"]
        # So little is not written: the next task brings it again, and the changes since.
        world.table.upsert(world.row(5, name="newer", n=51), world.row(ROWS, n=1, name="more"))
        world.table.delete(world.row(6))
        assert world.looked_up() == ["brought"]
        assert world.looked_up() == []
        # A deleted key comes back, a new one goes.
        world.table.upsert(world.row(6, name="back", n=7))
        world.table.delete(world.row(ROWS))
        assert world.looked_up() == ["brought"]
