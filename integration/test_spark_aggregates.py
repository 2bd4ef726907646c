"""What `min`, `max` and `count` of an aggregation table make of NaN and null, against Spark's."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pyarrow as pa
import pytest

from integration.spark_world import SparkWorld, world

__all__ = ["world"]

pytestmark = pytest.mark.spark

SCHEMA = pa.schema(
    [
        pa.field("k", pa.int64(), nullable=False),
        *(pa.field(name, pa.float64()) for name in ("least", "most", "total")),
        *(pa.field(name, pa.float32()) for name in ("least_float", "most_float")),
        pa.field("least_text", pa.string()),
        pa.field("n", pa.int64()),
    ]
)
FUNCTIONS = {
    "least": "min", "most": "max", "total": "sum", "least_float": "min", "most_float": "max",
    "least_text": "min", "n": "count",
}  # fmt: skip
NUMBERS = [None, math.nan, math.inf, -math.inf, 0.0, 1.5, -2.0, 5e-324]


def _rows(draw: random.Random, count: int) -> pa.Table:
    """Rows of a few keys; some keys have nulls alone, or NaN and nulls."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for _ in range(count):
        key = draw.randrange(24)
        numbers = NUMBERS[:1] if key < 4 else NUMBERS[:2] if key < 8 else NUMBERS
        columns["k"].append(key)
        for name in FUNCTIONS:
            value = draw.choice(numbers)
            if name == "n":
                value = None if value is None else 7
            elif name == "least_text":
                value = None if value is None else str(value)
            columns[name].append(value)
    return pa.table(columns, schema=SCHEMA)


def _same(value: Any) -> Any:
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value + 0.0)
    return value


@pytest.mark.end_to_end
def test_aggregates_are_sparks(world: SparkWorld) -> None:
    path = "default.aggregated"
    properties = {f"fields.{name}.agg": function for name, function in FUNCTIONS.items()}
    world.client.create_table(
        path,
        SCHEMA,
        primary_key=["k"],
        bucket_count=2,
        properties={"table.merge-engine": "aggregation", **properties},
    )
    draw = random.Random(29)
    rows = _rows(draw, 300)
    # One request of many rows, and many of one: each row meets a stored state, or one of its own.
    world.client.upsert(path, rows.slice(0, 200))
    for place in range(200, 300):
        world.client.upsert(path, rows.slice(place, 1))

    ours = world.load(path).select(*SCHEMA.names).orderBy("k").collect()
    world.spark.createDataFrame(rows).createOrReplaceTempView("given_rows")
    shown = ", ".join(f"{function}({name}) AS {name}" for name, function in FUNCTIONS.items())
    theirs = world.spark.sql(f"SELECT k, {shown} FROM given_rows GROUP BY k ORDER BY k").collect()

    assert len(ours) == len(theirs) == 24
    for our, their in zip(ours, theirs, strict=True):
        for name in SCHEMA.names:
            if name == "total" and not math.isnan(their[name] or 0.0):
                assert our[name] == pytest.approx(their[name])
            else:
                assert _same(our[name]) == _same(their[name]), (our.k, name)
