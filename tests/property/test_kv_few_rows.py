"""Few rows planned one by one give, byte for byte, what vectorised code gives, or are left to it.

A run is a seed: `check(seed)` repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.errors import InvalidRequestError, StreamhouseError
from streamhouse.core.model.changelog import (
    DELETE,
    OPERATION_DELETE,
    OPERATION_NONE,
    UPDATE_BEFORE,
)
from streamhouse.core.model.hashing.key_hash import HashedKeys
from streamhouse.core.model.lake.limits import LakeLimits, decimal_limits
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, Schema
from streamhouse.storage_service.kv.plan._few_rows import (
    FewBucketRows,
    few_rows_plan,
)
from streamhouse.storage_service.kv.plan.upsert_plan import BucketRows, PlannedWrite, plan_rows
from streamhouse.storage_service.kv.plan.write_input import KEY_BYTES_MAX, check_rows
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.kv_model import Change
from tests.support.kv_world import (
    FLAT_TYPES,
    KEY_TYPES,
    NESTED_TYPES,
    Batch,
    batch_of,
    operations_of_changes,
    random_batch,
    random_keys,
)

ENGINES: tuple[dict[str, str], ...] = (
    {},
    {"table.changelog.image": "after"},
    {"table.delete.behavior": "ignore"},
    {"table.delete.behavior": "disallow"},
    {"table.merge-engine": "first_row"},
    {
        "table.merge-engine": "versioned",
        "table.merge-engine.versioned.ver-column": "version",
    },
    {"table.merge-engine": "aggregation", "table.delete.behavior": "allow"},
)
MOMENTS = (0, 1, -1, 1 << 31, -(1 << 63), (1 << 63) - 1)
# Zeros, infinity, and some of the many NaNs.
FLOATS = {
    32: ((0, 5, -1 << 31, 0x7F80 << 16), (0x7FC0 << 16, -1, 0x7F80_0001)),
    64: ((0, 5, -1 << 63, 0x7FF0 << 48), (0x7FF8 << 48, -1, (0x7FF0 << 48) + 1)),
}


class Store:
    """Rows by key of one bucket."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.end_offset = 0
        self.row_bytes_max = 0

    def few(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def many(self, hashed: HashedKeys) -> pa.Array:
        return pa.array(self.few(hashed.keys.to_pylist()), pa.binary())

    def apply(self, write: PlannedWrite) -> None:
        self.end_offset = write.end_offset
        for key, value in zip(write.keys.to_pylist(), write.values.to_pylist(), strict=True):
            if value is None:
                del self.values[key]
            else:
                self.values[key] = value


class Asked(NamedTuple):
    """Rows that lie bucket after bucket, up to `row_ends`."""

    rows: pa.RecordBatch
    operations: npt.NDArray[np.int8] | None
    columns: tuple[str, ...] | None
    row_ends: list[int]


Planned = tuple[list[PlannedWrite], list[int]]


def plan_many(asked: Asked, stores: list[Store], rules: TableRules, codec: RowCodec) -> Planned:
    rows, operations, columns, row_ends = asked
    given = check_rows(rows, rules, operations=operations, columns=columns)
    ends = np.searchsorted(given.row_numbers, row_ends).tolist()
    buckets = [
        BucketRows(end, store.end_offset, store.many)
        for end, store in zip(ends, stores, strict=True)
    ]
    writes, changes = plan_rows(given, buckets, rules=rules, codec=codec)
    return writes, changes.tolist()


def plan_few(
    asked: Asked, stores: list[Store], rules: TableRules, codec: RowCodec
) -> Planned | None:
    rows, operations, columns, row_ends = asked
    plan = few_rows_plan(rules, codec)
    buckets = [
        FewBucketRows(end, store.end_offset, store.few, store.row_bytes_max)
        for end, store in zip(row_ends, stores, strict=True)
    ]
    return None if plan is None else plan.plan(rows, operations, buckets, columns=columns)


def random_table(random: Random) -> TableRules:
    properties = random.choice(ENGINES)
    fields = [
        pa.field(f"k{i}", random.choice(KEY_TYPES), nullable=False)
        for i in range(random.choice([1, 1, 2, 3]))
    ]
    primary_key = tuple(field.name for field in fields)
    types = FLAT_TYPES + (NESTED_TYPES if random.random() < 0.05 else ())
    fields += [
        pa.field(f"v{i}", random.choice(types), nullable=random.random() < 0.7)
        for i in range(random.randint(0, 10))
    ]
    if "table.merge-engine.versioned.ver-column" in properties:
        version = random.choice([pa.int16(), pa.int64(), pa.timestamp("us"), pa.date32()])
        fields.append(pa.field("version", version, nullable=random.random() < 0.5))
    random.shuffle(fields)
    schema = Schema.from_arrow(pa.schema(fields))
    limits = tuple(x for c in schema.columns for x in decimal_limits(c.name, c.type))
    return TableRules(
        table="db.t",
        schema=schema,
        primary_key=primary_key,
        merge=MergeRules.parse(properties, schema=schema, primary_key=primary_key, table="db.t"),
        limits=LakeLimits(limits),
        schema_id=random.choice([0, 3]),
        renews_unchanged=random.random() < 0.2,
    )


def changes_of(
    random: Random,
    rules: TableRules,
    keys: list[tuple[Any, ...]],
    columns: tuple[str, ...] | None,
    rows_max: int,
) -> list[Change]:
    """Return at least one change of some of `keys`."""
    while True:
        made = random_batch(random, rules, keys, rows_max=rows_max)
        if made.columns is None and made.changes:
            break
    names = rules.schema.names if columns is None else columns
    return [(kind, {name: row[name] for name in names}) for kind, row in made.changes]


def with_odd_values(random: Random, rules: TableRules, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Put moments of every year, any NaN, and now and then a null where none may be."""
    columns = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        t = field.type
        if random.random() < 0.01:
            column = pa.nulls(len(column), t)
        elif field.name not in rules.primary_key and (bits := odd_bits(t)):
            drawn = np.array([random.choice(bits) for _ in range(len(column))], dtype=np.int64)
            odd = pa.array(drawn.astype(f"<i{t.bit_width // 8}")).view(t)
            column = pc.if_else(column.is_valid(), odd, pa.nulls(len(odd), t))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def odd_bits(t: pa.DataType) -> tuple[int, ...]:
    if pa.types.is_timestamp(t) or pa.types.is_date(t):
        return MOMENTS
    if not pa.types.is_floating(t):
        return ()
    numbers, nans = FLOATS[t.bit_width]
    return (*numbers, *nans)


def in_another_form(random: Random, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return what clients send as well: fields that say otherwise of nulls, another order, less."""
    if random.random() < 0.1:
        rows = rows.cast(pa.schema([field.with_nullable(True) for field in rows.schema]))
    if random.random() < 0.05:
        rows = rows.select(random.sample(rows.schema.names, rows.num_columns))
    if random.random() < 0.05:
        rows = rows.select(rows.schema.names[1:])
    return rows


def check(seed: int) -> int:
    """Return how many batches were planned one by one."""
    random = Random(seed)
    rules = random_table(random)
    codec = RowCodec(rules.schema, schema_id=rules.schema_id, table=rules.table)
    keys = random_keys(random, rules, random.choice([4, 8, 24]))
    count = min(random.choice([1, 1, 2, 4]), len(keys))
    of_bucket = [keys[number::count] for number in range(count)]
    stores = [Store() for _ in range(count)]
    planned = 0
    for _ in range(6):
        asked = random_changes(random, rules, of_bucket)
        few = plan_few(asked, stores, rules, codec)
        try:
            many = plan_many(asked, stores, rules, codec)
        except StreamhouseError:
            assert few is None
            continue
        if few is not None:
            planned += 1
            check_same(few, many)
        for store, write in zip(stores, many[0], strict=True):
            store.apply(write)
    return planned


def random_changes(
    random: Random, rules: TableRules, of_bucket: list[list[tuple[Any, ...]]]
) -> Asked:
    keys = [key for some in of_bucket for key in some]
    columns = random_batch(random, rules, keys, rows_max=0).columns
    rows_max = random.choice([2, 6, 15])
    parts = [changes_of(random, rules, some, columns, rows_max) for some in of_bucket]
    if random.random() < 0.2:
        parts[random.randrange(len(parts))] = []
    whole = Batch([change for part in parts for change in part], columns)
    rows = in_another_form(random, with_odd_values(random, rules, batch_of(rules, whole)))
    operations = operations_of_changes(whole)
    kind = random.random()
    if kind < 0.1:
        operations[[random.random() < 0.2 for _ in range(len(operations))]] = OPERATION_NONE
    elif kind < 0.2:
        operations[:] = OPERATION_DELETE
    row_ends = np.cumsum([len(part) for part in parts]).tolist()
    return Asked(rows, None if kind > 0.6 else operations, columns, row_ends)


def check_same(few: Planned, many: Planned) -> None:
    assert few[1] == many[1]
    for one, other in zip(few[0], many[0], strict=True):
        one.changelog.validate(full=True)
        assert one.changelog.schema.equals(other.changelog.schema, check_metadata=True)
        assert bytes_of(one.changelog) == bytes_of(other.changelog)
        assert one.keys.equals(other.keys)
        assert one.values.equals(other.values)
        assert one.base_offset == other.base_offset
        assert one.row_count_delta == other.row_count_delta


def bytes_of(changelog: pa.RecordBatch) -> bytes:
    # What follows a slice's values in their buffers is written with them, up to eight bytes.
    alone = changelog.take(pa.array(range(changelog.num_rows), pa.int64()))
    kinds = alone.column(CHANGE_TYPE_COLUMN).to_numpy()
    is_before = np.isin(kinds, (UPDATE_BEFORE, DELETE))
    columns = [
        with_one_nan(column, is_before) if pa.types.is_floating(column.type) else column
        for column in alone.columns
    ]
    return bytes(pa.RecordBatch.from_arrays(columns, schema=alone.schema).serialize())


def with_one_nan(column: pa.Array, rows: npt.NDArray[np.bool_]) -> pa.Array:
    """Of `rows` that are identical but for their NaNs any may be shown as the one before."""
    valid, data = column.buffers()
    values = np.frombuffer(data, dtype=f"f{column.type.bit_width // 8}", count=len(column))
    values = np.where(rows & np.isnan(values), np.array(np.nan, values.dtype), values)
    return pa.Array.from_buffers(column.type, len(column), [valid, pa.py_buffer(values)])


@given(st.integers(0, 1 << 32))
def test_few_rows_are_planned_as_many_are(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("key_type", [pa.string(), pa.binary()], ids=str)
@pytest.mark.parametrize("is_too_long", [False, True])
def test_a_key_is_as_long_as_it_may_be_among_few_and_many(
    key_type: pa.DataType, is_too_long: bool
) -> None:
    fields = [pa.field("k", key_type, nullable=False), pa.field("n", pa.int8(), nullable=False)]
    rules = TableRules(
        table="db.t",
        schema=Schema.from_arrow(pa.schema(fields)),
        primary_key=("k", "n"),
        merge=MergeRules(),
    )
    codec = RowCodec(rules.schema, schema_id=0, table=rules.table)
    # The marks of two parts, the end of the first, the second, and a zero, which takes two bytes.
    key = b"\0" + b"x" * (KEY_BYTES_MAX - 7 + is_too_long)
    columns = [pa.array([key]).cast(key_type), pa.array([-128], pa.int8())]
    rows = pa.RecordBatch.from_arrays(columns, schema=rules.schema.to_arrow())
    asked = Asked(rows, None, None, [1])

    few = plan_few(asked, [Store()], rules, codec)

    if is_too_long:
        assert few is None
        with pytest.raises(InvalidRequestError, match=f"has {KEY_BYTES_MAX + 1} bytes; at most"):
            plan_many(asked, [Store()], rules, codec)
    else:
        assert few is not None
        check_same(few, plan_many(asked, [Store()], rules, codec))


def test_rows_that_meet_long_ones_are_not_planned_one_by_one() -> None:
    # They would be copied again and again, while nobody else has the interpreter.
    fields = [pa.field("k", pa.int64(), nullable=False), pa.field("text", pa.string())]
    schema = Schema.from_arrow(pa.schema(fields))
    rules = TableRules(table="db.t", schema=schema, primary_key=("k",), merge=MergeRules())
    codec = RowCodec(schema, schema_id=0, table=rules.table)
    keys = pa.record_batch([pa.array(range(5), pa.int64())], schema=pa.schema(fields[:1]))
    asked = Asked(keys, np.full(5, OPERATION_DELETE, dtype=np.int8), None, [2, 5])
    stores = [Store(), Store()]

    assert plan_few(asked, stores, rules, codec) is not None
    stores[1].row_bytes_max = 1 << 20
    assert plan_few(asked, stores, rules, codec) is None


def test_what_small_writes_mostly_are_is_planned_one_by_one() -> None:
    assert sum(check(seed) for seed in range(20)) >= 20
