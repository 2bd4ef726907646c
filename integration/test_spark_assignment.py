"""Every type assigned to every other one: Spark's own INSERT INTO a parquet table is the judge."""

from __future__ import annotations

import math
import random
import struct
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest

from integration.spark_world import SparkWorld, world
from streamhouse.connector.write._assignment import assigned, can_assign
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.values.zone import parse_zone

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]

TYPES: Final[dict[str, tuple[str, pa.DataType]]] = {
    "flag": ("boolean", pa.bool_()),
    "tiny": ("tinyint", pa.int8()),
    "small": ("smallint", pa.int16()),
    "number": ("int", pa.int32()),
    "big": ("bigint", pa.int64()),
    "ratio": ("float", pa.float32()),
    "amount": ("double", pa.float64()),
    "price": ("decimal(9,2)", pa.decimal128(9, 2)),
    "wide": ("decimal(38,10)", pa.decimal128(38, 10)),
    "fine": ("decimal(38,38)", pa.decimal128(38, 38)),
    "text": ("string", pa.string()),
    "raw": ("binary", pa.binary()),
    "day": ("date", pa.date32()),
    "at": ("timestamp", pa.timestamp("us", tz="UTC")),
    "local": ("timestamp_ntz", pa.timestamp("us")),
}
FLOATING: Final = ("ratio", "amount")
ROWS: Final = 400
ZONE: Final = parse_zone("America/New_York", name="zone")
# Moments at which New York put its clocks forward and back, its first rule, and the year 1.
MOMENTS: Final = [1_710_054_000, 1_730_613_600, -2_717_650_800, -62_135_596_800, 253_402_300_799]
FLOATS: Final = [
    *(0.0, -0.0, 0.1, 1e-3, 9.999e-4, 1e7, 9999999.0, 1e10, 2.5, -2.5, 1.005, 0.125, 1e-39, 6e-39),
    *(127.9, 128.0, -128.9, 32768.0, 2147483648.0, 9.3e18, 9.99e37, 1.1e38, 123456789.125),
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        5e-324,
        1.4e-45,
        3.4028234663852886e38,
        1.7976931348623157e308,
    ),
]


def _value(name: str, t: pa.DataType, row: int, draw: random.Random) -> Any:
    """Some value of a type: its edges first, then any."""
    if pa.types.is_boolean(t):
        return row % 2 == 0
    if pa.types.is_integer(t):
        end = 1 << t.bit_width - 1
        return draw.choice([-end, end - 1, 0, draw.randrange(-end, end), draw.randrange(-99, 99)])
    if pa.types.is_floating(t):
        bits = struct.unpack("<d", draw.randbytes(8))[0]
        near = draw.randrange(-(10**9), 10**9) / 10 ** draw.randrange(12)
        value = FLOATS[row] if row < len(FLOATS) else draw.choice([bits, near, near])
        return value
    if pa.types.is_decimal(t):
        digits = draw.randrange(1, t.precision + 1)
        return Decimal(draw.randrange(-(10**digits) + 1, 10**digits)).scaleb(-t.scale)
    if pa.types.is_string(t):
        return f"ü{row}"
    if pa.types.is_binary(t):
        return f"ü{row}".encode()
    if pa.types.is_date32(t):
        return draw.choice([draw.randrange(-800_000, 3_000_000), draw.randrange(0, 20_000)])
    seconds = MOMENTS[row] if row < len(MOMENTS) else draw.randrange(-(6 * 10**10), 26 * 10**10)
    fraction = draw.choice([0, 500_000, 1, 120, draw.randrange(10**6)])
    return draw.choice([seconds, seconds, draw.randrange(2 * 10**9)]) * 1_000_000 + fraction


def _column(name: str, t: pa.DataType) -> pa.Array:
    draw = random.Random(name)
    values = [None if row % 11 == 7 else _value(name, t, row, draw) for row in range(ROWS)]
    if pa.types.is_date32(t):
        return pa.array(values, pa.int32()).view(t)
    if pa.types.is_timestamp(t):
        return pa.array(values, pa.int64()).view(t)
    return pa.array(values, t)


def _pairs() -> list[tuple[str, str]]:
    return [
        (given, wanted)
        for given, (_, source) in TYPES.items()
        for wanted, (_, target) in TYPES.items()
        if can_assign(source, target, zone=ZONE)
    ]


def _finite(given: str, wanted: str) -> str:
    """Say in SQL whether a value is finite, where it becomes a decimal: else Spark has it null."""
    if given not in FLOATING or not TYPES[wanted][0].startswith("decimal"):
        return "true"
    return f"abs({given}) < double('Infinity')"


def _differences(ours: pa.ChunkedArray, theirs: pa.ChunkedArray, given: pa.Array) -> list[str]:
    """Name the first values that are not the same; their texts say so of every type."""
    assert ours.type == theirs.type
    rows = zip(ours.cast(pa.string()), theirs.cast(pa.string()), given, strict=True)
    wrong = [
        f"{our} is not {their}"
        for our, their, value in rows
        if our != their and not _is_of_older_java(our.as_py(), their.as_py(), value, ours.type)
    ]
    return wrong[:2]


def _is_of_older_java(our: str, their: str, given: pa.Scalar, wanted: pa.DataType) -> bool:
    """Whether a float has a digit more than it needs, as Java before 19 writes it now and then."""
    if not pa.types.is_floating(given.type) or None in (our, their):
        return False
    if pa.types.is_string(wanted):
        ours, theirs = pa.array([our, their]).cast(given.type)
        return bool(ours == theirs) and len(our) < len(their)
    is_near = abs(Decimal(our) - Decimal(their)) <= Decimal(math.ulp(given.as_py()))
    return pa.types.is_decimal(wanted) and is_near


def test_the_same_types_are_assigned_as_in_spark(world: SparkWorld) -> None:
    catalyst = world.spark._jvm.org.apache.spark.sql  # type: ignore[union-attr]
    cast = catalyst.catalyst.expressions.Cast
    parse = catalyst.types.DataType.fromDDL

    for given, source in TYPES.values():
        for wanted, target in TYPES.values():
            by_spark = cast.canANSIStoreAssign(parse(given), parse(wanted))
            assert can_assign(source, target, zone=ZONE) == by_spark, (given, wanted)


def test_every_value_is_what_insert_into_makes_of_it(world: SparkWorld) -> None:
    spark = world.spark
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    columns = {name: _column(name, t) for name, (_, t) in TYPES.items()}
    source = spark.createDataFrame(pa.table({"id": pa.array(range(ROWS)), **columns}))
    source.createOrReplaceTempView("every_value")
    pairs = _pairs()
    fits = [
        f"IF(try_cast({given} AS {TYPES[wanted][0]}) IS NULL AND {_finite(given, wanted)}, NULL,"
        f" {given}) AS {given}_{wanted}"
        for given, wanted in pairs
    ]
    rows = spark.sql(f"SELECT id, {', '.join(fits)} FROM every_value ORDER BY id").cache()
    ddl = ", ".join(["id bigint", *(f"{a}_{b} {TYPES[b][0]}" for a, b in pairs)])
    spark.sql(f"CREATE TABLE every_pair ({ddl}) USING parquet")
    rows.createOrReplaceTempView("fitting_values")
    spark.sql("INSERT INTO every_pair SELECT * FROM fitting_values")
    world.write(spark.table("every_pair").limit(0), "default.every_pair")

    world.write(rows, "default.every_pair")

    expected = spark.table("every_pair").orderBy("id").toArrow()
    found = world.load("default.every_pair").orderBy("id").toArrow()
    differences = [
        f"{given} as {wanted}: {difference}"
        for given, wanted in pairs
        for difference in _differences(
            found[f"{given}_{wanted}"], expected[f"{given}_{wanted}"], columns[given]
        )
    ]
    assert not differences

    given_rows = rows.toArrow()
    for given, wanted in pairs:
        fitting = given_rows[f"{given}_{wanted}"].combine_chunks()
        left = columns[given].filter(fitting.is_null()).drop_null()
        for value in left[:20]:
            with pytest.raises(SchemaMismatchError, match="row 0 has"):
                assigned(pa.array([value], left.type), TYPES[wanted][1], column=given, zone=ZONE)
    spark.sql("DROP TABLE every_pair")
