"""A lookup join is the join of a dict: whatever the keys, the batches, and how rows are got."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.connector.lookup._joined_batches import joined, joined_structs
from streamhouse.connector.lookup._row_source import RowSource
from tests.support.examples import examples
from tests.support.lookup_world import FakeTable, plan_of

_EPOCH = datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))
_VALUES: dict[str, tuple[pa.DataType, Any]] = {
    "close": (pa.int64(), lambda r: r.randint(-30, 30)),
    "far": (pa.int64(), lambda r: r.choice([-(2**63), 2**63 - 1, 0, r.getrandbits(40)])),
    "small": (pa.int16(), lambda r: r.randint(-(2**15), 2**15 - 1)),
    "text": (pa.string(), lambda r: "".join(r.choices("a\0é", k=r.randint(0, 4)))),
    "bytes": (pa.binary(), lambda r: r.randbytes(r.randint(0, 3))),
    "day": (pa.date32(), lambda r: date(2026, 1, 1) + timedelta(days=r.randint(-50, 50))),
    "time": (
        pa.timestamp("us", tz="UTC"),
        lambda r: _EPOCH + timedelta(microseconds=r.randint(0, 40)),
    ),
    "money": (pa.decimal128(20, 2), lambda r: Decimal(r.randint(-4000, 4000)).scaleb(-2)),
    "flag": (pa.bool_(), lambda r: r.random() < 0.5),
}


class _World:
    """A table, rows that look up in it by its first key columns, and what must come out."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        kinds = random.choices(list(_VALUES), k=random.choice([1, 1, 2, 3]))
        key = [f"k{i}" for i in range(len(kinds))]
        self.makers = [_VALUES[kind][1] for kind in kinds]
        types = [_VALUES[kind][0] for kind in kinds]
        schema = pa.schema(
            [
                *(pa.field(n, t, nullable=False) for n, t in zip(key, types, strict=True)),
                pa.field("name", pa.string()),
                pa.field("tags", pa.list_(pa.field("element", pa.int32()))),
            ]
        )
        rows = [
            dict(zip(key, self.key_values(), strict=True))
            | {"name": random.choice([None, "x", f"n{i}"]), "tags": random.choice([None, [], [i]])}
            for i in range(random.choice([0, 1, 5, 60]))
        ]
        self.table = FakeTable(schema, key, rows)
        self.depth = random.randint(1, len(key))
        self.given = [f"left {i}" for i in range(self.depth)]
        self.columns = random.choice([["name"], ["tags", "name"], [key[0], "name"]])
        self.left_schema = pa.schema(
            [pa.field("row", pa.int64()), *map(pa.field, self.given, types[: self.depth])]
        )

    def key_values(self) -> list[Any]:
        return [make(self.random) for make in self.makers]

    def left_rows(self) -> list[dict[str, Any]]:
        known = list(self.table.rows)
        rows = []
        for number in range(self.random.choice([0, 1, 10, 200])):
            chosen = self.random.choice(known) if known else self.key_values()
            values = list(self.random.choice([chosen, self.key_values()]))[: self.depth]
            if self.random.random() < 0.1:
                values[self.random.randrange(self.depth)] = None
            rows.append({"row": number, **dict(zip(self.given, values, strict=True))})
        return rows

    def batches(self, rows: list[dict[str, Any]]) -> list[pa.RecordBatch]:
        batches, start = [], 0
        while start < len(rows):
            end = start + self.random.randint(1, 70)
            part = rows[start:end]
            batches.append(pa.RecordBatch.from_pylist(part, schema=self.left_schema))
            start = end
        return batches

    def expected(self, rows: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
        names = self.table.key[: self.depth]
        out = []
        for row in rows:
            wanted = [row[name] for name in self.given]
            matches = [
                each
                for each in self.table.rows.values()
                if None not in wanted and [each[name] for name in names] == wanted
            ]
            for match in matches or ([None] if how == "left" else []):
                found = {name: None if match is None else match[name] for name in self.columns}
                out.append(row | {f"its {name}": value for name, value in found.items()})
        return out


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    # The matches of one row come in no particular order, the rows in theirs.
    return [repr(row) for row in sorted(rows, key=lambda row: (row["row"], repr(row)))]


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32))
def test_it_is_the_join_of_a_dict(seed: int) -> None:
    world = _World(seed)
    random, table = world.random, world.table
    how = random.choice(["left", "inner"])
    table.is_unreadable = random.random() < 0.2
    plan = plan_of(table, given=world.given, columns=world.columns, how=how)
    named = [field.with_name(f"its {field.name}") for field in plan.row_schema]
    plan = plan_of(
        table,
        given=world.given,
        columns=world.columns,
        how=how,
        row_schema=pa.schema(named),
        cache_bytes=random.choice([1, 1 << 27]),
    )
    source = RowSource(plan, table, table, key_count_min=random.choice([0, 20, 10_000]))
    rows = world.left_rows()

    out = list(joined(world.batches(rows), plan, source, window_rows=random.choice([1, 30, 1000])))

    got = [row for batch in out for row in batch.to_pylist()]
    assert [row["row"] for row in got] == sorted(row["row"] for row in got)
    assert _sorted(got) == _sorted(world.expected(rows, how))
    for batch in out:
        assert batch.schema.names == [*world.left_schema.names, *plan.row_schema.names]
        assert batch.schema.types == [*world.left_schema.types, *plan.row_schema.types]
        batch.validate(full=True)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_a_function_returns_the_row_or_null(seed: int) -> None:
    world = _World(seed)
    world.depth = len(world.table.key)
    world.given = list(world.table.key)
    plan = plan_of(world.table, given=world.given, columns=world.columns)
    world.left_schema = pa.schema([pa.field("row", pa.int64()), *plan.key_schema])
    world.left_schema = pa.schema([f.with_nullable(True) for f in world.left_schema])
    source = RowSource(
        plan, world.table, world.table, key_count_min=world.random.choice([0, 10_000])
    )
    rows = world.left_rows()

    out = joined_structs(world.batches(rows), plan, source, window_rows=30)

    got = [value for array in out for value in array.to_pylist()]
    assert len(got) == len(rows)
    for row, value in zip(rows, got, strict=True):
        match = world.table.rows.get(tuple(row[name] for name in world.table.key))
        assert value == (None if match is None else {n: match[n] for n in world.columns})
