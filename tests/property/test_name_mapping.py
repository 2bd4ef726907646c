"""Files without field ids in a table of others: columns are those of the table's name mapping.

One example is a table's life: files with ids and without are added while columns are renamed,
dropped and added under names that others had. The judge is stock pyiceberg; what a predicate keeps
is compared with the rows themselves.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.iceberg_world import IcebergWorld

NAMES = ["a", "b", "c"]
FIRST = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])

names = st.sampled_from(NAMES)
steps = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 3)),
    st.tuples(st.just("add_bare"), st.integers(1, 3)),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("add"), names),
    st.tuples(st.just("drop"), names),
)


class Life:
    """One table's life."""

    def __init__(self, world: IcebergWorld) -> None:
        self.world = world
        self._count = 0
        world.create(FIRST)

    def _rows(self, count: int) -> pa.Table:
        columns = self.world.table().schema().column_names
        start, self._count = self._count, self._count + count
        ids = range(start, self._count)
        return pa.table(
            {
                name: pa.array(ids, pa.int64())
                if name == "id"
                else pa.array([None if i % 5 == 4 else f"{name}{i}" for i in ids], pa.string())
                for name in columns
            }
        )

    def append(self, count: int) -> None:
        """Add a file with ids."""
        self.world.append(self._rows(count))

    def add_bare(self, count: int) -> None:
        """Add a file without ids."""
        self.world.add_without_ids(self._rows(count), f"bare-{self._count}")

    def rename(self, old: str, new: str) -> None:
        """Rename a column, if that can be."""
        columns = self.world.table().schema().column_names
        if old in columns and new not in columns:
            with self.world.table().update_schema() as change:
                change.rename_column(old, new)

    def add(self, name: str) -> None:
        """Add a column, if there is none of the name."""
        table = self.world.table()
        if name not in table.schema().column_names:
            with table.update_schema() as change:
                change.union_by_name(pa.schema([(name, pa.string())]))

    def drop(self, name: str) -> None:
        """Drop a column, if it is there."""
        table = self.world.table()
        if name in table.schema().column_names:
            with table.update_schema() as change:
                change.delete_column(name)

    def check(self) -> None:
        """Every read finds what pyiceberg finds."""
        table = self.world.table()
        if table.current_snapshot() is None:
            return
        expected = table.scan().to_arrow().sort_by("id").to_pylist()
        assert self.world.read().sort_by("id").to_pylist() == expected
        for name in table.schema().column_names[1:]:
            values = {row[name] for row in expected}
            for value in [None, min((v for v in values if v), default="none")]:
                where = f"{name} IS NULL" if value is None else f"{name} = '{value}'"
                kept = [row for row in expected if row[name] == value]
                assert self.world.read(where=where).sort_by("id").to_pylist() == kept, where
                assert self.world.read(where=where, columns="id").num_rows == len(kept), where


@settings(max_examples=examples(20), deadline=None)
@given(life=st.lists(steps, min_size=3, max_size=10))
def test_files_without_ids_are_read_by_the_name_mapping(life: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder, IcebergWorld(Path(folder)) as world:
        table = Life(world)
        for step, *arguments in life:
            getattr(table, str(step))(*arguments)
        table.check()
