"""Times, zones, types and names of columns are what they are in Spark."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSourceRegistration

import streamhouse
from integration.spark_world import SparkWorld, last_line, world

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# `spark_session` is in New York: midnight there is 5 hours after midnight in UTC.
MIDNIGHT = datetime.datetime(2024, 1, 1, 5, tzinfo=datetime.UTC)
TIMES = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


def test_epoch_microseconds_reach_the_last_write(world: SparkWorld) -> None:
    path = world.table(rows=20)
    addressed = world.load(path, includeMetadata="true")
    last = addressed.agg(F.expr("unix_micros(max(__timestamp))")).first()

    assert last is not None
    assert world.load(path, asOfTimestamp=last[0]).count() == 20
    assert world.load(path, asOfTimestamp=last[0] - 1).count() == 0
    assert world.load(path, startingTimestamp=last[0]).count() == 20
    assert world.load(path, asOfTimestamp=last[0] // 1_000 + 1).count() == 20
    with pytest.raises(Exception, match=r"has 10 digits, .* multiply seconds by 1000"):
        world.load(path, asOfTimestamp=last[0] // 1_000_000).count()


def test_where_keeps_the_rows_of_filter_in_the_session_s_zone(world: SparkWorld) -> None:
    path = "default.times"
    world.client.create_table(path, TIMES)
    hours = [MIDNIGHT + datetime.timedelta(hours=hour) for hour in range(-8, 8)]
    world.client.append(path, pa.table({"id": range(16), "at": hours}, schema=TIMES))
    new_year = "at >= '2024-01-01'"

    for where in (new_year, "date(at) = '2023-12-31'", "year(at) = 2024"):
        expected = world.ids(world.load(path).filter(where))
        assert world.ids(world.load(path, where=where)) == expected
        assert len(expected) == 8
    assert world.ids(world.load(path, where=new_year, timeZone="UTC")) == list(range(3, 16))

    streamhouse.attach(world.spark, path, "times", endpoint=world.endpoint, where=new_year)
    assert world.ids(world.spark.table("times")) == list(range(8, 16))
    stream = world.stream(path, where=new_year).writeStream.format("memory").queryName("times_seen")
    query = stream.trigger(availableNow=True).start()
    query.awaitTermination()
    assert world.ids(world.spark.table("times_seen")) == list(range(8, 16))


def test_a_time_without_a_zone_is_in_the_session_s(world: SparkWorld) -> None:
    path = world.table(rows=5)
    written = world.load(path, includeMetadata="true").agg(
        F.expr("date_format(max(__timestamp), 'yyyy-MM-dd HH:mm:ss.SSSSSS')")
    )
    (text,) = written.collect()[0]

    assert world.load(path, asOfTimestamp=text).count() == 5
    assert world.load(path, endingTimestamp=text).count() == 0


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("parse_json('{\"a\": 1}')", "VARIANT"),
        ("struct(array(parse_json('1')) AS list)", "VARIANT"),
        ("INTERVAL 3 DAYS", "INTERVAL DAY"),
        ("INTERVAL 3 MONTHS", "INTERVAL MONTH"),
        ("'a' COLLATE UTF8_LCASE", "STRING COLLATE UTF8_LCASE"),
        ("NULL", "VOID"),
    ],
)
def test_types_that_tables_lack_are_refused_by_name(
    world: SparkWorld, expression: str, name: str
) -> None:
    frame = world.spark.sql(f"SELECT 1L AS id, {expression} AS other")

    with pytest.raises(Exception, match="column 'other") as refused:
        world.write(frame, "default.no_such_types")

    line = last_line(refused.value)
    assert f"is {name}" in line
    assert "Traceback" not in str(refused.value)
    assert not any(t.endswith("no_such_types") for t in world.client.list_tables("default"))


def test_values_are_assigned_as_insert_into_assigns_them(world: SparkWorld) -> None:
    wanted = (
        "small smallint, number int, big bigint, price decimal(7,2), ratio float, text string,"
        " at timestamp, local timestamp_ntz, place struct<zone:int, price:decimal(5,1)>"
    )
    given = (
        "9L AS small, 7.9D AS number, CAST(3 AS tinyint) AS big, 1.125BD AS price, 2L AS ratio,"
        " 42 AS text, DATE '2024-07-01' AS at, DATE '2024-07-01' AS local,"
        " named_struct('PRICE', 3, 'Zone', 4L) AS place"
    )
    spark = world.spark
    spark.sql(f"CREATE TABLE assigned ({wanted}) USING parquet")
    inserted = f"INSERT INTO assigned SELECT {given.replace('named_struct(', 'struct_by_name(')}"
    inserted = inserted.replace(
        "struct_by_name('PRICE', 3, 'Zone', 4L)", "named_struct('zone', 4L, 'price', 3)"
    )
    world.write(spark.table("assigned"), "default.assigned")

    spark.sql(inserted)
    world.write(spark.sql(f"SELECT {given}"), "default.assigned")

    found = world.load("default.assigned").collect()
    assert found == spark.table("assigned").collect()
    assert [row.place.zone for row in found] == [4]
    spark.sql("DROP TABLE assigned")


def test_a_value_that_does_not_fit_names_column_and_row(world: SparkWorld) -> None:
    path = world.table()
    numbers = world.spark.sql("SELECT id, IF(id = 7, 300, 1) AS small FROM range(10)")
    whole = numbers.selectExpr(
        "id", "'eu' AS region", "small", "1.5BD AS price", "current_timestamp() AS at",
        "array('a') AS tags", "named_struct('zone', 1S, 'name', 'n') AS place",
    ).coalesce(1)  # fmt: skip

    with pytest.raises(Exception, match="'small': row 7 has 300, which does not fit tinyint"):
        world.write(whole, path)
    with pytest.raises(Exception, match="'small' is tinyint, and string is not assigned to it"):
        world.write(whole.withColumn("small", F.lit("1")), path)

    assert world.load(path).count() == 0
    world.write(whole.filter("id < 7"), path)
    assert world.load(path).count() == 7


def test_names_of_columns_have_no_case(world: SparkWorld) -> None:
    spark = world.spark
    path = "default.cased"
    first = spark.sql("SELECT 1L AS Id, 'a' AS Name, 1L AS Version")
    world.write(first, path, **{"primary.key": "ID", "sequence.column": "VERSION"})

    change = spark.sql("SELECT 'b' AS NAME, 1L AS ID, 2L AS version, 5 AS Extra")
    world.write(change, path, mergeSchema="true", **{"sequence.column": "VERSION"})

    table = world.load(path)
    assert table.columns == ["Id", "Name", "Version", "Extra"]
    assert [tuple(row) for row in table.collect()] == [(1, "b", 2, 5)]
    assert world.load(path, columns="NAME,id").columns == ["Name", "Id"]
    named = world.reader().schema("NAME string, iD bigint").load(path)
    assert [row.asDict() for row in named.collect()] == [{"NAME": "b", "iD": 1}]
    world.write(spark.sql("SELECT 1L AS ID"), path, **{"write.mode": "delete"})
    assert world.load(path).count() == 0


def test_registering_again_registers_nothing(
    world: SparkWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would warn each time, at the start of each micro-batch that calls `write_batch`."""

    def fail(*_: object) -> None:
        pytest.fail("registered again")

    monkeypatch.setattr(DataSourceRegistration, "register", fail)

    streamhouse.register(world.spark)

    assert world.load(world.table(rows=3)).count() == 3


def test_decimals_of_all_widths_are_the_ones_that_were_written(world: SparkWorld) -> None:
    """Those of up to 18 digits reach Spark as bigints, and are decimals in every statement."""
    kinds = {
        f"d{precision}_{scale}": pa.decimal128(precision, scale)
        for precision, scale in ((1, 0), (9, 9), (15, 2), (18, 0), (18, 18), (19, 2), (38, 10))
    }
    fields = [pa.field(name, kind) for name, kind in kinds.items()]
    schema = pa.schema([("id", pa.int64()), *fields, pa.field("must", kinds["d15_2"], False)])

    def made(ids: range) -> pa.Table:
        columns = {
            name: [None if i % 7 == 0 else _repeated((9, -9, 0, 1, -1)[i % 5], kind) for i in ids]
            for name, kind in kinds.items()
        }
        must = [decimal.Decimal(i).scaleb(-2) for i in ids]
        return pa.table({"id": ids, **columns, "must": must}, schema=schema)

    path = "default.decimals"
    world.client.create_table(path, schema)
    world.client.append(path, made(range(30)))
    world.tier(path)
    world.client.append(path, made(range(30, 50)))
    wanted = {row["id"]: row for row in made(range(50)).to_pylist()}
    frame = world.load(path)

    assert {row.id: row.asDict() for row in frame.collect()} == wanted
    assert {name: frame.schema[name].dataType.simpleString() for name in kinds} == {
        name: f"decimal({kind.precision},{kind.scale})" for name, kind in kinds.items()
    }
    assert not frame.schema["must"].nullable
    assert not any(field.metadata for field in frame.schema)
    for name in kinds:
        for row in (wanted[5], wanted[8]):
            equal = {i for i, other in wanted.items() if other[name] == row[name]}
            literal = F.lit(row[name]).cast(frame.schema[name].dataType)
            assert set(world.ids(frame.filter(frame[name] == literal))) == equal
        nulls = [i for i, row in wanted.items() if row[name] is None]
        assert world.ids(frame.filter(f"{name} IS NULL")) == nulls
    assert frame.agg(F.sum("must")).first()[0] == sum(row["must"] for row in wanted.values())
    joined = frame.alias("a").join(frame.alias("b"), F.col("a.must") == F.col("b.must"))
    assert joined.count() == 50
    own = world.reader().schema("must decimal(15,2)").load(path)
    assert own.filter("must >= 0.40").count() == 10
    query = "SELECT max(d15_2) AS most FROM default.decimals WHERE d15_2 < 0.5 AND must < 10"
    answer = streamhouse.sql(world.spark, query, endpoint=world.endpoint).first()
    assert answer[0] == max(
        r["d15_2"] for r in wanted.values() if r["d15_2"] is not None and r["d15_2"] < 0.5
    )


def _repeated(digit: int, kind: pa.Decimal128Type) -> decimal.Decimal:
    """Return the number of a type that has this digit in all its places."""
    number = digit * int("1" * kind.precision)
    return decimal.Decimal(number).scaleb(-kind.scale, decimal.Context(prec=38))
