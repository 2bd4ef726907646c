"""`where` keeps the rows that Spark itself keeps: every expression is run through both."""

from __future__ import annotations

import datetime
import math
import os
import re
import sys
from collections.abc import Iterator
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streamhouse.core.model.schema import Schema
from streamhouse.core.model.values.zone import parse_zone
from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where.parser import parse_predicate

pytestmark = pytest.mark.spark

NAN, INF = math.nan, math.inf
UTC = datetime.UTC
TINY = Decimal("0.0000000001")
SCHEMA = pa.schema(
    [
        ("row", pa.int32()),
        ("tiny", pa.int8()),
        ("number", pa.int32()),
        ("big", pa.int64()),
        ("price", pa.decimal128(5, 2)),
        ("wide", pa.decimal128(38, 10)),
        ("ratio", pa.float32()),
        ("amount", pa.float64()),
        ("name", pa.string()),
        ("flag", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("raw", pa.binary()),
        ("place", pa.struct([("zone", pa.int32()), ("Inner", pa.struct([("x", pa.string())]))])),
    ]
)


def _rows() -> list[dict[str, object]]:
    names: list[object] = [
        "", "a", "b", "ab", "a%b", "a_b", "a\\b", "A", "é", "z", "\U0001f600", "\uffff", "a\nb",
        "it's", "its", "3", "aab", None,
    ]  # fmt: skip
    doubles = [0.0, -0.0, 1.0, 0.1, -1.5, 3.5, NAN, INF, -INF, 2.0**53, None, 16777217.0, 5e-324]
    ratios = [0.0, -0.0, 1.0, 0.1, -1.5, 3.5, NAN, INF, -INF, None, 16777216.0, 3.4e38, 1e-45]
    bigs = [0, 1, -1, 3, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), None, 4]
    numbers = [0, 1, -1, 3, 4, 2**31 - 1, -(2**31), None]
    prices = ["0.00", "0.10", "1.00", "-1.50", "3.50", "999.99", "-999.99", None]
    wides = [Decimal(0), TINY, -TINY, Decimal("0.1"), Decimal(10) ** 27, None, Decimal("3.5")]
    days = [
        "1969-12-31",
        "1970-01-01",
        "2024-01-01",
        "2024-02-29",
        "2024-12-31",
        "0001-01-01",
        None,
    ]
    times = [0, -1, 1, 1_704_067_200_000_000, 1_704_067_199_999_999, 1_735_689_599_999_999, None]
    epoch = datetime.datetime(1970, 1, 1)
    rows: list[dict[str, object]] = []
    for i in range(40):
        day = days[i % len(days)]
        micros = times[i % len(times)]
        price = prices[i % len(prices)]
        moment = None if micros is None else epoch + datetime.timedelta(microseconds=micros)
        zones = [{"zone": 1, "Inner": {"x": "a"}}, None, {"zone": None, "Inner": None}]
        rows.append(
            {
                "row": i,
                "tiny": [0, 1, -128, 127, None, 3][i % 6],
                "number": numbers[i % len(numbers)],
                "big": bigs[i % len(bigs)],
                "price": None if price is None else Decimal(price),
                "wide": wides[i % len(wides)],
                "ratio": ratios[i % len(ratios)],
                "amount": doubles[i % len(doubles)],
                "name": names[i % len(names)],
                "flag": [True, False, None][i % 3],
                "day": None if day is None else datetime.date.fromisoformat(day),
                "at": None if moment is None else moment.replace(tzinfo=UTC),
                "local": moment,
                "raw": [b"", b"a", b"\xff", b"\x7f", None][i % 5],
                "place": zones[i % 3],
            }
        )
    return rows


WHERES = r"""
number = 3
number = 3.5
number < 3.5
number >= 3.5
number != 3.5
number > -0.5
number <=> 3.5
number <=> null
not (number <=> 3)
number = null
number = '3'
number in (1, 2.5, 3)
number not in (1, 3)
number not in (1, null)
number in (null)
number in (1, 1e0)
number between 0 and 3
number not between 0.5 and 3.5
number < 1.5D
number > 2147483646.5D
number < 99999999999
number > -99999999999
tiny = 200
tiny != 200
tiny >= -128
tiny < '300'
big = 9007199254740993
big = 9007199254740992D
big > 9007199254740992D
big >= 9007199254740993D
big < 9223372036854775807
big < 9223372036854775807D
big <= 9223372036854775808D
big in (9007199254740993, 1e0)
big > double('NaN')
big < double('NaN')
big > double('-inf')
big = 3L
big = 3.0F
price = 0.1
price = 0.10
price = 0.1D
price = '0.1'
price = 0.1F
price > 0.105
price <= 0.105
price < 1000
price > -1000
price in (0.1, 3.50, 7)
price != 3.555
wide = 0.1
wide = 1e-10
wide = 0.0000000001
wide > 0
wide < 1e27
wide <= 1e27
wide = 1000000000000000000000000000
wide = '0.1'
ratio = 0.1
ratio = 0.1F
ratio > 0.1
ratio >= 0.1
ratio < 0.1
ratio <= 0.1
ratio != 0.1
ratio = 1
ratio = '0.1'
ratio = cast('NaN' as float)
ratio > 3.4e38
ratio < 1e300D
ratio > -1e300D
ratio >= 1e300D
ratio in (0.0, 3.5, 0.1)
ratio = 16777217
ratio > 1e-46D
amount = 0.0
amount = -0.0
amount = 'NaN'
amount = 'inf'
amount > 'inf'
amount >= double('NaN')
amount > double('NaN')
amount < double('NaN')
amount <= double('NaN')
amount != double('NaN')
amount > 3
amount < 3
not amount > 3
amount in (0, 1)
amount in (0.0D, double('NaN'))
amount not in (double('NaN'), 1)
amount between -2 and 2
amount = 9007199254740993
amount = 0.1
amount <=> double('NaN')
isnan(amount)
not isnan(amount)
isnan(ratio)
name = 'a'
name > 'a'
name < 'é'
name > '\uffff'
name >= 'z'
name = ''
name = 'it''s'
name = 'it\'s'
name = 'it' 's'
name = "it's"
name = "a"
name = r'a\b'
name = 'a\\b'
name = 'a\nb'
name = '\U0001F600'
name = '\ud83d\ude00'
name = '\141'
name like 'a%'
name like '%b'
name like 'a_b'
name like 'a\_b'
name like 'a\%b'
name like '%\\%'
name like 'a\\\\b'
name like r'a\\b'
name like 'a/%b' escape '/'
name like 'a%b'
name like '_'
name like '%'
name like ''
name like '__'
name like '%a%'
name like 'a' escape '%'
name not like 'a%'
name like null
name in ('a', 'é', null)
name not in ('a', 'b')
startswith(name, 'a')
endswith(name, 'b')
contains(name, '%')
contains(name, '')
startswith(name, null)
name is null
name is not null
isnull(name) or isnotnull(name)
flag
not flag
!flag
flag = false
flag = 'true'
flag is true
flag is not true
flag is false
flag is unknown
flag < true
flag or number = 3
flag and number = 3
not (flag and number = 3)
not (flag or number is null)
flag <=> null
flag is distinct from true
flag is not distinct from false
day = '2024-01-01'
day = '2024'
day > '2024-2-1 foo'
day >= DATE '2024-02-29'
day < TIMESTAMP '2024-01-01 00:00:01'
day = TIMESTAMP '2024-01-01 00:00:01'
day != TIMESTAMP '2024-01-01 00:00:01'
day between '1970' and date'2024-01-01'
day in ('1970-01-01', '2024-12-31')
year(day) = 2024
year(day) < 1970
at = '1970-01-01'
at > '1970-01-01T00:00:00Z'
at >= '2024-01-01 01:00:00 +01:00'
at < TIMESTAMP '1970-01-01 00:00:00.000001'
at < TIMESTAMP_NTZ '1970-01-01 00:00:00.000001'
at = DATE '2024-01-01'
at <= '2024-12-31 23:59:59.9999999'
date(at) = '2024-01-01'
cast(at as date) > '2023-12-31'
to_date(at) in ('1969-12-31', '2024-12-31')
date(at) between '2023-12-31' and '2024-01-01'
year(at) = 2024
year(at) != 2024
year(at) >= 2023.5
year(at) in (1969, 2023)
year(local) = '2023'
local = '1970-01-01'
local > TIMESTAMP '1970-01-01 00:00:00'
local < TIMESTAMP_NTZ '1970-01-01 00:00:00'
at = cast('2024-01-01' as timestamp)
at = to_timestamp('2024-01-01')
raw = X'61'
raw > X'7F'
raw = 'a'
raw >= ''
place.zone = 1
place.inner.x = 'a'
PLACE.Zone is null
place is null
place.inner is not null
number = tiny
number < big
number <=> tiny
not (number <=> tiny)
big = amount
amount = ratio
amount < ratio
amount >= ratio
amount != ratio
amount <= ratio
amount > ratio
price = number
price < wide
price = amount
price > ratio
day = at
day < local
at = local
name = name
flag = flag
number = 3 or number = 4 and flag
not number = 3 and flag
1 = 1
'a' > 'b'
true
number = 3 -- comment
Number = 3 /* comment */ AND `flag`
3 < number
'a' = name
number == 3 and number <> 4
number = -1
number = - 1
number = +1
number = 1S
number = 3.
number > .5
number = 1e0
number = int('3')
number = cast('3' as bigint)
price = cast(0.1 as decimal(3, 2))
price = 0.1BD
""".strip().splitlines()


@pytest.fixture(scope="module")
def frame() -> Iterator[DataFrame]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        # Spark prunes cached batches by bounds that leave NaN out, and so loses rows that are NaN.
        .config("spark.sql.inMemoryColumnarStorage.partitionPruning", "false")
        .getOrCreate()
    )
    yield session.createDataFrame(pa.Table.from_pylist(_rows(), SCHEMA)).cache()
    session.stop()


def test_every_expression_keeps_the_rows_that_spark_keeps(frame: DataFrame) -> None:
    batch = pa.RecordBatch.from_pylist(_rows(), SCHEMA)
    schema = Schema.from_arrow(SCHEMA)
    wrong = []

    # One test for all: a Spark job takes a tenth of a second, and the report names each culprit.
    for where in WHERES:
        ours = filter_batch(parse_predicate(where, schema, table="db.t"), batch)["row"].to_pylist()
        sparks = [row.row for row in frame.filter(where).select("row").collect()]
        if ours != sparks:
            wrong.append(f"{where}: ours {ours}, Spark's {sparks}")

    assert not wrong, "\n".join(wrong)


# What a session's zone decides, around the times at which the zones of the test change clocks.
ZONED_WHERES = r"""
at = '2024-03-10 02:30:00'
at >= '2024-03-10 02:30:00'
at < '2024-11-03 01:30'
at > TIMESTAMP '2024-11-03 01:00:00'
at <= TIMESTAMP_NTZ '2024-11-03 01:30:00'
at >= DATE '2017-10-15'
at = DATE '2017-10-15'
at > '2024-11-03 01:30:00 +00:00'
at between '2024-03-10' and '2024-11-03'
at in ('2024-03-10 03:30', '2024-11-03 01:30')
at = cast(DATE '2017-10-15' as timestamp)
date(at) = '2006-10-29'
date(at) < '2006-10-29'
date(at) >= '2006-10-29'
date(at) > DATE '2006-10-28'
date(at) in ('2006-10-28', '2024-03-10')
date(at) between '2006-10-29' and '2017-10-14'
year(at) = 1969
year(at) >= 2024
year(at) != 1970
local >= TIMESTAMP '2024-03-10 03:00:00'
local = TIMESTAMP '2024-03-10 03:30:00'
local < TIMESTAMP '2024-11-03 01:30:00'
local > TIMESTAMP '2024-03-10 02:30:00'
local != TIMESTAMP '2006-10-29 00:00:30'
local = '2024-03-10 02:30:00'
local <= TIMESTAMP_NTZ '2024-03-10 02:30:00'
local >= DATE '2017-10-15'
date(local) = '2006-10-29'
year(local) = 2024
day = TIMESTAMP '2017-10-15 00:00:00'
day = TIMESTAMP '2017-10-15 01:00:00'
day < TIMESTAMP '2024-03-10 00:00:01'
day >= TIMESTAMP_NTZ '2024-03-10 00:00:01'
day <= '2024-03-10'
at = local
at < local
local >= at
at = day
day > at
day <= local
at <=> local
not (at = local)
""".strip().splitlines()


def _moments() -> list[datetime.datetime]:
    changes = ["2006-10-29 02:31", "2017-10-15 03:00", "2024-03-10 07:00", "2024-11-03 06:00"]
    changes += ["1970-01-01 00:00", "1883-11-18 17:00", "2011-12-30 10:00", "2100-07-01 12:00"]
    steps = [0, -1, 1, 30 * 60, -30 * 60, 3600, -3600, 86_400, -86_400, 5 * 3600, -9 * 3600, 12_345]
    starts = [datetime.datetime.fromisoformat(text) for text in changes]
    return [start + datetime.timedelta(seconds=step) for start in starts for step in steps]


@pytest.mark.parametrize(
    "zone",
    [
        "America/New_York",
        "America/St_Johns",
        "America/Sao_Paulo",
        "Pacific/Apia",
        "Asia/Kolkata",
        "GMT+8",
        "-03:30",
        "PST",
        "Z",
    ],
)
def test_every_expression_keeps_the_rows_that_spark_keeps_in_the_session_s_zone(
    frame: DataFrame, zone: str
) -> None:
    moments = _moments()
    walls = [moments[(7 * i + 3) % len(moments)] for i in range(len(moments))]
    # Rows whose wall clock shows in this zone what the row's moment is.
    reader = parse_zone(zone, name="zone")
    shown = [m + datetime.timedelta(microseconds=reader.offset_at(_micros(m))) for m in moments]
    table = pa.table(
        {
            "row": pa.array(range(2 * len(moments)), pa.int32()),
            "at": pa.array([m.replace(tzinfo=UTC) for m in moments * 2], SCHEMA.field("at").type),
            "local": pa.array([*walls, *shown], pa.timestamp("us")),
            "day": pa.array([w.date() for w in [*shown, *walls]], pa.date32()),
        }
    )
    spark = frame.sparkSession
    times = {"at", "local", "day"}
    wheres = ZONED_WHERES + [w for w in WHERES if _columns(w) and _columns(w) <= times]

    # Without its type named, a column of wall clock times would become one of moments.
    given = spark.createDataFrame(table, "row int, at timestamp, local timestamp_ntz, day date")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        truths = given.select("row", *[F.expr(w).alias(str(i)) for i, w in enumerate(wheres)])
        found = truths.toArrow().sort_by("row")
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")

    (batch,) = table.combine_chunks().to_batches()
    schema = Schema.from_arrow(table.schema)
    wrong = []
    for i, where in enumerate(wheres):
        predicate = parse_predicate(where, schema, table="db.t", zone=reader)
        ours = filter_batch(predicate, batch)["row"].to_pylist()
        sparks = [row for row, truth in enumerate(found[str(i)].to_pylist()) if truth]
        if ours != sparks:
            rows = sorted(set(ours) ^ set(sparks))[:3]
            wrong.append(f"{where}: differs at {table.take(rows).to_pylist()}")
    assert not wrong, "\n".join(wrong)


def _micros(moment: datetime.datetime) -> int:
    return (moment - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)


def _columns(where: str) -> set[str]:
    return set(re.findall(r"[a-z]+", where)) & set(SCHEMA.names)
