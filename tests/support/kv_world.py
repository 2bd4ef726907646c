"""Random primary key tables and changes, and a bucket of one as the service runs it.

`LoggedBucket` is a tablet and a log that survives crashes; `kv_model` is what both must equal.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import strategies as st

from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.changelog import (
    DELETE,
    INSERT,
    OPERATION_DELETE,
    OPERATION_UPSERT,
    UPDATE_AFTER,
)
from streamhouse.core.model.hashing.key_hash import PROCESS_HASHER
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    RETRACTS_COLUMN,
    Schema,
    canonical_type,
)
from streamhouse.storage_service.kv.kv_tablet import KvOptions, KvTablet
from streamhouse.storage_service.kv.lookup import FoundRows, check_key_names
from streamhouse.storage_service.kv.plan.upsert_plan import PlannedWrite
from streamhouse.storage_service.kv.plan.write_input import check_keys
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from streamhouse.storage_service.kv.table_rules import TableRules
from tests.support.kv_model import Change, Entry, identity

__all__ = [
    "Batch",
    "LoggedBucket",
    "batch_of",
    "batches",
    "entries_of",
    "fold_log",
    "found_alone",
    "looked_up",
    "operations_of_changes",
    "random_batch",
    "random_keys",
    "random_rules",
    "simple_rules",
    "table_rules",
    "values",
]


def simple_rules(**properties: str) -> TableRules:
    """Return a table `id bigint, name string, amount double` with key `id`."""
    schema = Schema.from_arrow(
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                pa.field("name", pa.string()),
                pa.field("amount", pa.float64()),
            ]
        )
    )
    merge = MergeRules.parse(properties, schema=schema, primary_key=("id",), table="db.t")
    return TableRules(table="db.t", schema=schema, primary_key=("id",), merge=merge)


def entries_of(changelog: pa.RecordBatch, base_offset: int) -> list[Entry]:
    """Return the lines of a changelog batch."""
    entries = []
    for position, line in enumerate(changelog.to_pylist()):
        change_type, retracts = line.pop(CHANGE_TYPE_COLUMN), line.pop(RETRACTS_COLUMN)
        entries.append(Entry(base_offset + position, change_type, retracts, line))
    return entries


def fold_log(entries: Sequence[Entry], primary_key: Sequence[str]) -> dict[Any, tuple[int, Any]]:
    """Return what a reader of the changelog alone ends up with: version and row by key."""
    state: dict[Any, tuple[int, Any]] = {}
    for entry in entries:
        key = tuple(entry.row[name] for name in primary_key)
        if entry.change_type in (INSERT, UPDATE_AFTER):
            assert entry.retracts == (state[key][0] if key in state else None)
            state[key] = (entry.offset, entry.row)
        elif entry.change_type == DELETE:
            assert entry.retracts == state[key][0]
            assert identity(entry.row) == identity(state.pop(key)[1])
        else:
            assert identity(entry.row) == identity(state[key][1])
    return state


class LoggedBucket:
    """`log` holds (base offset, changelog batch) of what is durable; `tablet` may be reopened."""

    def __init__(self, path: Path, rules: TableRules, *, options: KvOptions | None = None) -> None:
        self.path = path
        self.rules = rules
        self.options = options
        self.log: list[tuple[int, pa.RecordBatch]] = []
        self.tablet = self._open()

    def _open(self) -> KvTablet:
        return KvTablet(self.path, table_id=7, bucket=0, rules=self.rules, options=self.options)

    @property
    def entries(self) -> list[Entry]:
        return [entry for base, batch in self.log for entry in entries_of(batch, base)]

    def plan(self, batch: Batch) -> PlannedWrite:
        return self.tablet.plan(
            batch_of(self.rules, batch),
            base_offset=self.tablet.planned_offset,
            operations=operations_of_changes(batch),
            columns=batch.columns,
        )

    def append(self, planned: PlannedWrite) -> None:
        """Make the changelog durable."""
        if planned.changelog.num_rows:
            self.log.append((planned.base_offset, planned.changelog))

    def write(self, batch: Batch) -> PlannedWrite:
        planned = self.plan(batch)
        self.append(planned)
        self.apply(planned)
        return planned

    def apply(self, planned: PlannedWrite) -> None:
        """Apply what is durable, then do what is due, as the one writer does."""
        self.tablet.apply(planned)
        if self.tablet.needs_upkeep:
            self.tablet.keep_up()

    def reopen(self, *, replay_from: int = 0) -> None:
        """Close without flushing and open again, as after a crash; replay at least what is needed.

        `replay_from` is the number of log batches to skip, if they are not needed.
        """
        self.tablet.close()
        self.tablet = self._open()
        self.replay(replay_from)

    def replay(self, skipped: int = 0) -> None:
        for base_offset, batch in self.log[skipped:]:
            if base_offset + batch.num_rows > self.tablet.applied_offset or skipped == 0:
                self.tablet.replay(batch, base_offset=base_offset)

    def lookup_all(self, keys: Sequence[tuple[Any, ...]]) -> dict[Any, Any]:
        """Return the rows found of `keys`, by key."""
        schema = self.rules.schema.select(self.rules.primary_key, table="").to_arrow()
        columns = [pa.array([key[i] for key in keys], f.type) for i, f in enumerate(schema)]
        found = looked_up(self.tablet, pa.RecordBatch.from_arrays(columns, schema=schema))
        assert found.end_offset == self.tablet.applied_offset
        positions = np.flatnonzero(found.found).tolist()
        rows = found.rows.to_pylist()
        assert len(rows) == len(positions)
        return {keys[i]: row for i, row in zip(positions, rows, strict=True)}


def looked_up(tablet: KvTablet, keys: pa.RecordBatch, *, bytes_max: int = 1 << 62) -> FoundRows:
    """Return the newest rows of many keys, given as rows of the key columns."""
    rules = tablet.rules
    check_key_names(keys.schema.names, rules)
    columns = rules.schema.select(rules.primary_key, table=rules.table)
    encoded = check_keys(conform(keys, columns, table=rules.table), rules)
    values, end_offset = tablet.find(encoded, bytes_max=bytes_max)
    found = values.is_valid().to_numpy(zero_copy_only=False)
    rows = tablet.codec.decode(values.drop_null() if values.null_count else values)
    return FoundRows(rows=rows, found=found, end_offset=end_offset)


def found_alone(tablet: KvTablet, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row of one key, looked up as few keys are: in memory, then in files."""
    rows = SingleRows(tablet.rules, tablet.codec)
    keys = [rows.encode_key(key)]
    hashes = PROCESS_HASHER.few(keys)
    found = tablet.find_few(keys, hashes, bytes_max=1 << 62, reads_files=True)
    assert found is not None
    (value,) = found.values
    names = tablet.rules.schema.names
    return None if value is None else dict(zip(names, rows.decode_values(value), strict=True))


_EXACT = Context(prec=40, traps=[Inexact])
_UTC = pa.timestamp("us", tz="UTC")
KEY_TYPES = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    _UTC,
    pa.timestamp("us"),
    pa.decimal128(20, 3),
    pa.decimal128(38, 38),
)
FLAT_TYPES = (*KEY_TYPES, pa.float32(), pa.float64())
NESTED_TYPES = tuple(
    canonical_type(t, where="nested")
    for t in (
        pa.list_(pa.int32()),
        pa.list_(pa.string()),
        pa.map_(pa.string(), pa.float64()),
        pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.list_(pa.bool_()))]),
        pa.list_(pa.struct([("x", pa.list_(pa.date32())), ("y", pa.map_(pa.int8(), pa.string()))])),
    )
)


def values(t: pa.DataType) -> st.SearchStrategy[Any]:
    """Return values of `t`, never null outside nested ones; few enough to repeat."""
    if pa.types.is_boolean(t):
        return st.booleans()
    if pa.types.is_integer(t):
        limit = 1 << (t.bit_width - 1)
        return st.integers(-3, 3) | st.integers(-limit, limit - 1)
    if pa.types.is_floating(t):
        return st.sampled_from([0.0, -0.0, 1.5, float("nan")]) | st.floats(width=t.bit_width)
    if pa.types.is_decimal(t):
        most = 10**t.precision - 1
        return st.integers(-most, most).map(lambda n: _EXACT.scaleb(Decimal(n), -t.scale))
    if pa.types.is_string(t):
        return st.sampled_from(["", "a", "b\x00", "ü"]) | st.text(max_size=6)
    if pa.types.is_binary(t):
        return st.binary(max_size=5)
    if pa.types.is_date(t):
        return st.dates()
    if pa.types.is_timestamp(t):
        zone = st.just(datetime.UTC) if t.tz else st.none()
        return st.datetimes(timezones=zone)
    if pa.types.is_map(t):
        pairs = st.tuples(values(t.key_type), st.none() | values(t.item_type))
        return st.lists(pairs, max_size=2)
    if pa.types.is_list(t):
        return st.lists(st.none() | values(t.value_type), max_size=3)
    return st.fixed_dictionaries({f.name: st.none() | values(f.type) for f in t})


@st.composite
def table_rules(
    draw: st.DrawFn,
    *,
    merge: st.SearchStrategy[dict[str, str]] | None = None,
    key_types: Sequence[pa.DataType] = KEY_TYPES,
    types: Sequence[pa.DataType] = FLAT_TYPES + NESTED_TYPES,
) -> TableRules:
    """Return a table of 1 to 3 key columns and up to 4 others, in any order."""
    keys = draw(st.lists(st.sampled_from(key_types), min_size=1, max_size=3))
    others = draw(st.lists(st.tuples(st.sampled_from(types), st.booleans()), max_size=4))
    fields = [pa.field(f"k{i}", t, nullable=False) for i, t in enumerate(keys)]
    fields += [pa.field(f"v{i}", t, nullable=n) for i, (t, n) in enumerate(others)]
    schema = Schema.from_arrow(pa.schema(draw(st.permutations(fields))))
    primary_key = tuple(f"k{i}" for i in range(len(keys)))
    properties = draw(merge) if merge is not None else {}
    rules = MergeRules.parse(properties, schema=schema, primary_key=primary_key, table="db.t")
    return TableRules(
        table="db.t",
        schema=schema,
        primary_key=primary_key,
        merge=rules,
        renews_unchanged=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Batch:
    """Changes of one call; `columns` of a partial update, else None."""

    changes: list[Change]
    columns: tuple[str, ...] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, row in self.changes]


@st.composite
def batches(
    draw: st.DrawFn,
    rules: TableRules,
    *,
    partial: bool = False,
    deletes: bool = True,
    rows_max: int = 12,
) -> list[Batch]:
    """Return a few batches over so few keys that rows meet."""
    schema = rules.schema
    key_row = st.tuples(*(values(schema.column(k, table="").type) for k in rules.primary_key))
    pool = draw(st.lists(key_row, min_size=1, max_size=5))
    others = {
        column.name: values(column.type) if not column.nullable else st.none() | values(column.type)
        for column in schema.columns
        if column.name not in rules.primary_key
    }
    found = []
    for _ in range(draw(st.integers(1, 4))):
        columns: tuple[str, ...] | None = None
        if partial and draw(st.booleans()):
            required = [c.name for c in schema.columns if not c.nullable]
            optional = [name for name in schema.names if name not in required]
            chosen = draw(st.sets(st.sampled_from(optional))) if optional else set()
            columns = tuple(n for n in schema.names if n in chosen or n in required)
        row = st.fixed_dictionaries(
            {name: others[name] for name in columns or schema.names if name in others}
        )
        kinds = st.sampled_from(["upsert", "upsert", "delete"] if deletes else ["upsert"])
        changes: list[Change] = []
        for key, kind, rest in draw(
            st.lists(st.tuples(st.sampled_from(pool), kinds, row), max_size=rows_max)
        ):
            whole = dict(zip(rules.primary_key, key, strict=True)) | rest
            names = columns or schema.names
            changes.append((kind, {name: whole[name] for name in names}))  # type: ignore[arg-type]
        found.append(Batch(changes, columns))
    return found


def batch_of(rules: TableRules, batch: Batch) -> pa.RecordBatch:
    """Return the rows of `batch` as Arrow."""
    schema = rules.schema
    if batch.columns is not None:
        schema = schema.select(batch.columns, table=rules.table)
    arrow = schema.to_arrow()
    # A slice, as batches of a stream often are: values of other rows lie before and after.
    skipped = len(batch.rows) % 3
    rows = [*batch.rows[-skipped:], *batch.rows, *batch.rows[:1]] if skipped else batch.rows
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in arrow]
    whole = pa.RecordBatch.from_arrays(columns, schema=arrow)
    return whole.slice(skipped, len(batch.rows))


def operations_of_changes(batch: Batch) -> npt.NDArray[np.int8]:
    """Return the operation of every row."""
    codes = {"upsert": OPERATION_UPSERT, "delete": OPERATION_DELETE}
    return np.array([codes[kind] for kind, _ in batch.changes], dtype=np.int8)


def random_value(random: Random, t: pa.DataType) -> Any:
    """Return a value of `t` without hypothesis: many are needed, and none must be shrunk."""
    if pa.types.is_boolean(t):
        return random.random() < 0.5
    if pa.types.is_integer(t):
        limit = 1 << (t.bit_width - 1)
        return random.choice([0, 1, -1, -limit, limit - 1, random.randrange(-100, 100)])
    if pa.types.is_floating(t):
        return random.choice([0.0, -0.0, 1.5, float("nan"), float(random.randrange(100))])
    if pa.types.is_decimal(t):
        most = 10**t.precision - 1
        unscaled = random.choice([most, -most, random.randrange(-999, 999)])
        return _EXACT.scaleb(Decimal(unscaled), -t.scale)
    if pa.types.is_string(t):
        return random.choice(["", "a\x00", "ü", "long " * 9, str(random.randrange(1000))])
    if pa.types.is_binary(t):
        return random.randbytes(random.randrange(6))
    if pa.types.is_date(t):
        return datetime.date(2020, 1, 1) + datetime.timedelta(days=random.randrange(-9999, 9999))
    if pa.types.is_timestamp(t):
        start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC if t.tz else None)
        return start + datetime.timedelta(microseconds=random.randrange(-(10**15), 10**15))
    if pa.types.is_map(t):
        return [
            (random_value(random, t.key_type), _or_null(random, t.item_type))
            for _ in range(random.randrange(3))
        ]
    if pa.types.is_list(t):
        return [_or_null(random, t.value_type) for _ in range(random.randrange(4))]
    return {f.name: _or_null(random, f.type) for f in t}


def _or_null(random: Random, t: pa.DataType) -> Any:
    return None if random.random() < 0.2 else random_value(random, t)


def random_rules(random: Random, properties: Mapping[str, str]) -> TableRules:
    """Return a table as `table_rules` does."""
    fields = [
        pa.field(f"k{i}", random.choice(KEY_TYPES), nullable=False)
        for i in range(random.randint(1, 3))
    ]
    primary_key = tuple(f.name for f in fields)
    types = FLAT_TYPES + NESTED_TYPES
    fields += [
        pa.field(f"v{i}", random.choice(types), nullable=random.random() < 0.7)
        for i in range(random.randint(0, 4))
    ]
    random.shuffle(fields)
    schema = Schema.from_arrow(pa.schema(fields))
    merge = MergeRules.parse(properties, schema=schema, primary_key=primary_key, table="db.t")
    return TableRules(table="db.t", schema=schema, primary_key=primary_key, merge=merge)


def random_keys(random: Random, rules: TableRules, count: int) -> list[tuple[Any, ...]]:
    """Return up to `count` distinct keys."""
    types = [rules.schema.column(name, table="").type for name in rules.primary_key]
    made = [tuple(random_value(random, t) for t in types) for _ in range(count)]
    return list({identity(key): key for key in made}.values())


def random_batch(
    random: Random, rules: TableRules, keys: Sequence[tuple[Any, ...]], *, rows_max: int
) -> Batch:
    """Return changes of some of `keys`, every third batch a partial update."""
    schema = rules.schema
    columns: tuple[str, ...] | None = None
    if random.random() < 0.3:
        named = [c.name for c in schema.columns if not c.nullable or random.random() < 0.5]
        columns = tuple(named)
    changes: list[Change] = []
    for _ in range(random.randint(0, rows_max)):
        key = dict(zip(rules.primary_key, random.choice(keys), strict=True))
        row = {}
        for name in columns or schema.names:
            column = schema.column(name, table="")
            value = random_value if not column.nullable else _or_null
            row[name] = key[name] if name in key else value(random, column.type)
        changes.append(("delete" if random.random() < 0.25 else "upsert", row))
    return Batch(changes, columns)
