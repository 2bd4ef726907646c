"""Random values over all that their types can hold are found in both tiers, by every condition.

One example is a table's life: appends, rounds and a rewrite, under a random lake partitioning and
batch layout. Whatever cannot be in the lake is refused by the rule that the service refuses it by.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.lake.limits import LakeLimits
from streamhouse.core.model.values.calendar import date_text, timestamp_text
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where.parser import parse_predicate
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.maintain._maintenance_policy import Claim, MaintenancePolicy
from tests.support.examples import examples
from tests.support.extreme_values import decimals, extreme_rows, same_rows
from tests.support.union_world import UnionWorld

UTC = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("day", pa.date32()),
        pa.field("at", UTC),
        pa.field("number", pa.int32()),
        pa.field("big", pa.int64()),
        pa.field("price", pa.decimal128(5, 2)),
        pa.field("huge", pa.decimal128(38, 10)),
        pa.field("amount", pa.float64()),
        pa.field("name", pa.string()),
        pa.field("raw", pa.binary()),
    ]
)
TRANSFORMS = {
    "day": ("day", "year(day)", "month(day)", "day(day)", "bucket(3, day)"),
    "at": ("at", "year(at)", "month(at)", "day(at)", "hour(at)", "bucket(3, at)"),
    "number": ("number", "truncate(10, number)", "truncate(2147483647, number)"),
    "big": ("big", "truncate(7, big)", "bucket(3, big)"),
    "price": ("price", "truncate(7, price)", "bucket(3, price)"),
    "huge": ("huge", "truncate(10, huge)", "bucket(3, huge)"),
    "name": ("name", "truncate(2, name)", "bucket(3, name)"),
    "raw": ("raw", "truncate(2, raw)", "bucket(3, raw)"),
}


def _whole(bits: int) -> st.SearchStrategy[int]:
    half = 1 << (bits - 1)
    ends = st.sampled_from([-half, half - 1])
    return st.one_of(ends, st.integers(-half, 9 - half), st.integers(-half, half - 1))


def _digits(precision: int) -> st.SearchStrategy[int]:
    most = 10**precision - 1
    return st.one_of(st.sampled_from([-most, most, 0]), st.integers(-most, most))


def _unscaled(t: pa.DataType, values: list[int | None]) -> pa.Array:
    array = decimals(t, *(value or 0 for value in values))
    return pa.array([v if n is not None else None for v, n in zip(array, values, strict=True)], t)


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    count = draw(st.integers(1, 4))

    def some(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(st.none() | values, min_size=count, max_size=count))

    days, moments = some(_whole(32)), some(_whole(64))
    columns = [
        pa.array(range(count), pa.int64()),
        pa.array(days, pa.int32()).view(pa.date32()),
        pa.array(moments, pa.int64()).view(UTC),
        pa.array(some(_whole(32)), pa.int32()),
        pa.array(some(_whole(64)), pa.int64()),
        _unscaled(SCHEMA.field("price").type, some(_digits(5))),
        _unscaled(SCHEMA.field("huge").type, some(_digits(38))),
        pa.array(some(st.floats()), pa.float64()),
        pa.array(some(st.text(max_size=20)), pa.string()),
        pa.array(some(st.binary(max_size=20)), pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@st.composite
def conditions(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(["day", "at", "number", "big", "price", "huge"]))
    operator = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="]))
    match column:
        case "day":
            literal = f"DATE '{date_text(draw(_whole(32)))}'"
        case "at":
            literal = f"TIMESTAMP '{timestamp_text(draw(_whole(64)))}'"
        case "number" | "big":
            literal = str(draw(_whole(32 if column == "number" else 64)))
        case "price":
            literal = f"{draw(_digits(5))}BD"
        case _:
            literal = f"{draw(_digits(28))}BD"
    return f"{column} {operator} {literal}"


fields = st.lists(
    st.sampled_from(sorted(TRANSFORMS)).flatmap(lambda c: st.sampled_from(TRANSFORMS[c])),
    max_size=2,
    unique_by=lambda field: field.strip(")").rpartition(" ")[2].rpartition("(")[2],
)
sorts = st.sampled_from(["", "day", "at, huge", "zorder(day, at, name, amount)", "name, raw"])


@given(
    partitioned_by=fields,
    layout=fields,
    sort=sorts,
    parts=st.lists(batches(), min_size=1, max_size=3),
    wheres=st.lists(conditions(), min_size=1, max_size=6),
)
@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_taken_is_found(
    partitioned_by: list[str],
    layout: list[str],
    sort: str,
    parts: list[pa.RecordBatch],
    wheres: list[str],
) -> None:
    properties = {
        "table.datalake.batch-layout.partition": ", ".join(layout),
        "table.datalake.batch-layout.sort": sort,
    }
    given_properties = {key: value for key, value in properties.items() if value}
    with tempfile.TemporaryDirectory() as folder, UnionWorld(Path(folder)) as world:
        info = world.tiering.create_table(
            "db.t", SCHEMA, partitioned_by=partitioned_by, properties=given_properties
        )
        limits = LakeLimits.of(info.descriptor)
        written = [SCHEMA.empty_table()]
        for part in parts:
            # Rows of the past may be there that are refused today: they are tiered all the same.
            _judge_refusals(limits, part)
            start = sum(table.num_rows for table in written)
            ids = pa.array(range(start, start + part.num_rows), pa.int64())
            rows = part.set_column(0, SCHEMA.field("id"), ids)
            written.append(pa.Table.from_batches([rows]))
            world.tiering.service.append("db.t", 0, rows)
            world.tiering.tier("db.t")
        expected = pa.concat_tables(written)
        _check(world, expected, wheres)
        _rewrite(world)
        _check(world, expected, wheres)


def _judge_refusals(limits: LakeLimits, part: pa.RecordBatch) -> None:
    """Raise unless the rule refuses a batch by a row that it refuses alone, or has none such."""
    refused = [n for n in range(part.num_rows) if _refusal(limits, part.slice(n, 1))]
    sentence = _refusal(limits, part)

    assert bool(sentence) == bool(refused)
    assert not sentence or any(f"of row {n} has" in sentence for n in refused)


def _refusal(limits: LakeLimits, rows: pa.RecordBatch) -> str:
    try:
        limits.check(rows, table="db.t")
    except SchemaMismatchError as error:
        return error.message
    return ""


def _check(world: UnionWorld, expected: pa.Table, wheres: list[str]) -> None:
    same_rows(world.read(), expected)
    same_rows(world.tiering.lake_table("db.t").scan().to_arrow(), expected)
    assert world.read("db.t$files").num_rows
    (batch,) = expected.combine_chunks().to_batches() or [None]
    schema = world.state().table.schema
    for where in wheres:
        predicate = parse_predicate(where, schema, table="db.t")
        kept = pa.Table.from_batches([filter_batch(predicate, batch)])
        same_rows(world.read(where=where), kept)
        for found in world.read_layouts(where=where):
            same_rows(found, kept)


def _rewrite(world: UnionWorld) -> None:
    state = world.state()
    lake = state.lake
    maintainer = Maintainer(
        pins=world.tiering.service,
        runner=world.tiering.runner,
        filesystem=LakeFilesystem(world.tiering.catalog.properties),
    )
    claim = Claim(epoch=lake.tiering_epoch, snapshot_id=lake.snapshot_id, check=lambda: None)
    opened = world.tiering.lake().open_or_create(state.table, lake)
    policy = MaintenancePolicy.of(state.table).on_demand()
    maintainer.maintain(opened, state.table, claim, policy=policy)


def test_rows_of_every_extreme_have_a_partition_in_each_transform() -> None:
    """All transforms of one table at once: what is refused today is tiered too."""
    rows = extreme_rows(*TRANSFORMS).combine_chunks()
    every = [field for found in TRANSFORMS.values() for field in found if "2147483647" not in field]
    with tempfile.TemporaryDirectory() as folder, UnionWorld(Path(folder)) as world:
        world.tiering.create_table("db.t", rows.schema, partitioned_by=every)
        world.tiering.service.append("db.t", 0, rows.to_batches()[0])
        world.tiering.tier("db.t")
        same_rows(world.read(), rows)
        same_rows(world.tiering.lake_table("db.t").scan().to_arrow(), rows)
        for name in rows.column_names[1:]:
            missing = rows.filter(rows[name].is_null())
            same_rows(world.read(where=f"{name} IS NULL"), missing)
