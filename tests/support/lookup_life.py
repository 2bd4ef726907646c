"""A looked-up table with a log and a lake, and tasks that look up all of its keys and share files.

What a lookup finds is compared with a dict, for all keys that were ever there and some that were
not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from streamhouse.connector.lookup._key_rows import KeyRows, Keys
from streamhouse.connector.lookup._lookup_plan import LookupPlan
from streamhouse.connector.lookup._shared_tables import SharedTables
from streamhouse.connector.lookup._table_cut import PlannedTable
from streamhouse.connector.lookup._whole_rows import SharedCut
from tests.support.key_table_world import KeyTableWorld

__all__ = ["KEYS", "ROWS", "LookupLife"]

ROWS: Final = 64
BUCKETS: Final = 2
VALUES: Final = (pa.field("name", pa.string()), pa.field("n", pa.int64()))
KEYS: Final[dict[str, tuple[list[pa.DataType], Callable[[int], tuple[Any, ...]]]]] = {
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


class _Told:
    """A cut that tells how its table was come by (`shared_tables.Cut`)."""

    def __init__(self, cut: SharedCut, told: list[str]) -> None:
        self._cut = cut
        self._told = told
        self.name, self.form, self.place = cut.name, cut.form, cut.place

    def since(self, place: Any) -> int | None:
        return self._cut.since(place)

    def load(self) -> KeyRows:
        self._told.append("read")
        return self._cut.load()

    def advance(self, table: KeyRows, place: Any) -> KeyRows | None:
        brought = self._cut.advance(table, place)
        self._told.append("not brought" if brought is None else "brought")
        return brought


class LookupLife:
    """The table `db.t`, closed by `with`; `directory` is what its tasks share."""

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
            frame_columns=tuple(self.names),
            key_schema=pa.schema(fields),
            is_whole_key=True,
            columns=("n", "name"),
            row_schema=pa.schema([VALUES[1], VALUES[0]]),
            cache_bytes=1 << 27,
        )

    def __enter__(self) -> LookupLife:
        return self

    def __exit__(self, *error: object) -> None:
        self.table.__exit__(*error)

    def row(self, i: int, **values: Any) -> dict[str, Any]:
        """The row of the i-th key with these values, or as it is in the beginning."""
        key = dict(zip(self.names, self.key_of(i), strict=True))
        return key | (values or {"name": f"n{i}", "n": i})

    def fill(self, count: int = ROWS) -> None:
        """Put the first keys in."""
        self.table.upsert(*(self.row(i) for i in range(count)))

    def cut(self) -> SharedCut:
        """The table as it is now."""
        cut = PlannedTable(self.plan, self.table.union.client).cut()
        assert cut.name is not None
        return SharedCut(self.plan, cut, cut.name)

    def looked_up(self, cut: SharedCut | None = None) -> list[str]:
        """Look all keys up as a task does, at a cut, and return how it came by the table.

        The table it must find is the one that is there now.
        """
        told: list[str] = []
        rows = SharedTables(self.directory).load_once(_Told(cut or self.cut(), told))
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
