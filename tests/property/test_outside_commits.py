"""Commits of other engines, through the catalog and past it, against sets of ids.

One example is the life of a log table and of a table with a primary key: rows come, rounds and
maintenance go on, and between them other engines delete, compact, expire and roll back. After each
step every read has the rows that the model has: of the log table those that nobody deleted, of the
other all of them, whatever was tried.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.exceptions import ForbiddenError
from pyiceberg.table import Table

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.lake.facts import LakeRole
from streamhouse.lake.snapshots._outside_changes import was_changed_outside
from streamhouse.reading.lake_only.lake_check import lake_problems
from tests.support.examples import examples
from tests.support.foreign_deletes import commit_compaction
from tests.support.key_table_world import KEY_SCHEMA, KeyTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld
from tests.support.union_world import UnionWorld

_PLACES = st.sampled_from(["through", "past"])
_STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 6)),
    st.tuples(st.just("tier")),
    st.tuples(st.just("delete"), _PLACES, st.integers(2, 4)),
    st.tuples(st.just("truncate"), _PLACES),
    st.tuples(st.just("compact"), _PLACES),
    st.tuples(st.just("expire")),
)


class _Life:
    """One table and the ids that it must have."""

    def __init__(self, rest: RestWorld, union: UnionWorld) -> None:
        self.rest, self.union = rest, union
        self.tiering: TieringWorld = union.tiering
        self.ids: set[int] = set()
        self.next_id = 0
        self.damaged: int | None = None

    def new_ids(self, count: int) -> range:
        found = range(self.next_id, self.next_id + count)
        self.next_id = found.stop
        self.ids.update(found)
        return found

    @property
    def has_lake(self) -> bool:
        return self.union.state().lake.snapshot_id is not None

    def table(self, place: str) -> Table:
        return (
            self.rest.client().load_table("db.t")
            if place == "through"
            else self.tiering.lake_table()
        )

    def tier(self) -> None:
        state = self.union.state()
        if any(at.high_watermark > at.tiered_offset for at in state.positions.values()):
            self.tiering.tier()

    def compact(self, place: str) -> None:
        if self.has_lake and self.table(place).scan().to_arrow().num_rows:
            commit_compaction(self.table(place))

    def expire(self) -> None:
        """All but the current snapshot and the registered one, which a reader may plan on."""
        table = self.tiering.lake_table() if self.has_lake else None
        if table is not None:
            kept = {table.metadata.current_snapshot_id, self.union.state().lake.snapshot_id}
            old = [s.snapshot_id for s in table.snapshots() if s.snapshot_id not in kept]
            if old and self.damaged is None:
                table.maintenance.expire_snapshots().by_ids(old).commit()

    def check(self) -> None:
        wanted = sorted(self.ids)
        assert sorted(self.union.read(columns="id")["id"].to_pylist()) == wanted
        assert self.union.count() == len(wanted)
        found = self.union.read(columns="id", where="id >= 3")["id"].to_pylist()
        assert sorted(found) == [n for n in wanted if n >= 3]


class _LogLife(_Life):
    """Rows of the log table go when another engine deletes them: those that the lake has."""

    def write(self, count: int) -> None:
        rows = [{"id": n, "region": "r", "amount": 1.0} for n in self.new_ids(count)]
        self.union.append(0, pa.RecordBatch.from_pylist(rows, schema=KEY_SCHEMA))

    def check(self) -> None:
        super().check()
        state = self.union.state()
        if self.has_lake:
            # A row that is not there is no damage, even if nobody knows any more who deleted it.
            assert not lake_problems(
                self.tiering.catalog,
                state.table,
                state.lake,
                log_ends={b: at.high_watermark for b, at in state.positions.items()},
                key_offsets={},
                fingerprints=lambda *_: {},
                read_rows=True,
            )

    def delete(self, place: str, divisor: int) -> None:
        self._delete(place, f"amount = 1.0 and id >= {self.next_id // divisor}")

    def truncate(self, place: str) -> None:
        self._delete(place, "true")

    def _delete(self, place: str, where: str) -> None:
        if self.has_lake:
            before = set(self.tiering.lake_table().scan().to_arrow()["id"].to_pylist())
            self.table(place).delete(where)
            after = set(self.tiering.lake_table().scan().to_arrow()["id"].to_pylist())
            self.ids -= before - after
            if before - after:
                table = self.tiering.lake_table()
                info = self.union.state().table
                assert was_changed_outside(table.metadata, info, LakeRole.ROWS, table.io)


class _KeyLife(_Life):
    """Rows of the other table stay: commits are refused, or rounds until they are taken back."""

    def __init__(self, rest: RestWorld, world: KeyTableWorld) -> None:
        super().__init__(rest, world.union)
        self.world = world

    def write(self, count: int) -> None:
        self.world.upsert(*({"id": n, "region": "r", "amount": 1.0} for n in self.new_ids(count)))

    def delete(self, place: str, divisor: int) -> None:
        self._change(place, lambda table: table.delete(f"id >= {self.next_id // divisor}"))

    def truncate(self, place: str) -> None:
        self._change(place, lambda table: table.delete("true"))

    def compact(self, place: str) -> None:
        if self.damaged is None:
            super().compact(place)

    def tier(self) -> None:
        if self.damaged is None:
            return super().tier()
        with pytest.raises(CorruptDataError, match=f"back to {self.damaged}"):
            self.tiering.tier()
        self.tiering.service.release("db.t")
        before, self.damaged = self.damaged, None
        self.tiering.lake_table().manage_snapshots().rollback_to_snapshot(before).commit()
        super().tier()

    def _change(self, place: str, change: Callable[[Table], Any]) -> None:
        if not self.has_lake or self.damaged is not None:
            return
        table = self.table(place)
        before = table.metadata.current_snapshot_id
        expected = pytest.raises(ForbiddenError) if place == "through" else contextlib.nullcontext()
        with expected:
            change(table)
            if self.tiering.lake_table().metadata.current_snapshot_id == before:
                raise ForbiddenError("there was nothing to delete")
            self.damaged = before


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(is_keyed=st.booleans(), steps=st.lists(_STEPS, min_size=2, max_size=10))
def test_reads_have_what_others_may_delete_and_nothing_else(
    is_keyed: bool, steps: list[tuple[Any, ...]]
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        KeyTableWorld(Path(folder)) as world,
        RestWorld(world.tiering) as rest,
    ):
        life: _Life
        if is_keyed:
            world.create_key_table()
            life = _KeyLife(rest, world)
        else:
            world.tiering.create_table("db.t", KEY_SCHEMA)
            life = _LogLife(rest, world.union)
        for name, *arguments in [("write", 5), ("tier",), *steps]:
            getattr(life, name)(*arguments)
            life.check()
