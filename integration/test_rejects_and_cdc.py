"""Bad rows of Spark's writes are kept; Debezium's envelopes and SCD type 2, in real Spark."""

from __future__ import annotations

import base64
import datetime
import json
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import streamhouse
from integration.spark_world import SparkWorld, last_line, world
from streamhouse.core.errors import InvalidRequestError, UnknownColumnError
from streamhouse.core.model.records.unavailable_value import UNAVAILABLE_VALUE

__all__ = ["world"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SIZES = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("size", pa.int32()), ("day", pa.date32())]
)
MIXED = """
    SELECT * FROM VALUES (1L, '10', '2026-01-01'), (2L, 'ten', '2026-01-02'), (NULL, '30', NULL),
      (4L, '40', 'soon'), (5L, '3000000000', NULL), (6L, NULL, NULL) AS t(id, size, day)
"""


def _made(world: SparkWorld, name: str, **options: Any) -> str:
    world.client.create_table(f"default.{name}", SIZES, **options)
    return f"default.{name}"


def _ids(world: SparkWorld, path: str) -> list[int]:
    return sorted(world.client.read(path)["id"].to_pylist())


def _kept(world: SparkWorld, path: str) -> list[Any]:
    rows = world.load(f"{path}$rejected").select("row").collect()
    return sorted((json.loads(row.row)["id"] for row in rows), key=lambda value: value or 0)


@pytest.mark.parametrize("key", [(), ("id",)])
def test_a_batch_keeps_what_does_not_fit(world: SparkWorld, key: tuple[str, ...]) -> None:
    path = _made(world, f"sieved_{len(key)}", primary_key=key, bucket_count=2)
    frame = world.spark.sql(MIXED).repartition(3)

    for _ in range(2):
        world.write(frame, path, **{"on.error": "reject", "app.id": "load", "app.version": "1"})

    assert _ids(world, path) == [1, 6]
    assert _kept(world, path) == [None, 2, 4, 5]
    reasons = {row.column: row for row in world.load(f"{path}$rejected").collect()}
    assert "must not be null" in reasons["id"].reason
    assert reasons["day"].source.startswith("task ")
    assert "'soon' is no date, or" in reasons["day"].reason
    result = world.client.replay_rejected(path, fix=lambda row: row | {"size": 1, "day": None})
    assert (result.moved, result.left) == (3, 1)
    assert _ids(world, path) == [1, 2, 4, 5, 6]


def test_without_the_option_the_job_fails_and_nothing_is_written(world: SparkWorld) -> None:
    path = _made(world, "refusing")

    with pytest.raises(PySparkException):
        world.write(world.spark.sql(MIXED), path)

    assert _ids(world, path) == []
    assert f"{path}__rejected" not in world.client.list_tables()


def test_a_stream_keeps_what_does_not_fit_once(world: SparkWorld, tmp_path: Path) -> None:
    path = _made(world, "sieved_stream")
    (tmp_path / "in").mkdir()
    world.spark.sql(MIXED).coalesce(1).write.mode("append").json(str(tmp_path / "in"))
    changes = world.spark.readStream.schema("id BIGINT, size STRING, day STRING").json(
        str(tmp_path / "in")
    )

    def run() -> None:
        query = (
            changes.writeStream.format("streamhouse")
            .options(endpoint=world.endpoint, **{"on.error": "reject"})
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(path)
        )
        query.awaitTermination()

    run()
    # As after a crash between our commit and Spark's: the micro-batch runs again.
    for name in (tmp_path / "checkpoint" / "commits").iterdir():
        name.unlink()
    run()

    assert _ids(world, path) == [1, 6]
    assert _kept(world, path) == [None, 2, 4, 5]


def _broken(world: SparkWorld, path: str) -> tuple[int, int]:
    """Return the refused and the rejected rows of a table's only constraint."""
    tables = world.client.status()["tables"]
    (constraint,) = next(table["constraints"] for table in tables if table["table"] == path)
    return constraint["refused_rows"], constraint["rejected_rows"]


@pytest.mark.parametrize("key", [(), ("id",)])
def test_a_stream_that_breaks_a_constraint_fails_until_it_rejects(
    world: SparkWorld, tmp_path: Path, key: tuple[str, ...]
) -> None:
    check = {"table.check.small": "size <= 100"}
    path = _made(world, f"held_stream_{len(key)}", primary_key=key, properties=check)
    rows = world.spark.createDataFrame([(1, 5), (2, 101), (3, None)], "id bigint, size int")
    rows.coalesce(1).write.json(str(tmp_path / "in"))
    changes = world.spark.readStream.schema(rows.schema).json(str(tmp_path / "in"))

    def run(**options: str) -> None:
        query = (
            changes.selectExpr("*", "CAST(NULL AS DATE) AS day")
            .writeStream.format("streamhouse")
            .options(endpoint=world.endpoint, **options)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(path)
        )
        query.awaitTermination()

    # A restart meets the same rows.
    for _ in range(2):
        with pytest.raises(PySparkException, match=r"breaks constraint 'small'.*size = 101"):
            run()
        assert _ids(world, path) == []
    refused, rejected = _broken(world, path)
    assert (refused >= 2, rejected) == (True, 0)

    run(**{"on.error": "reject"})
    # As after a crash between our commit and Spark's: the micro-batch runs again.
    for name in (tmp_path / "checkpoint" / "commits").iterdir():
        name.unlink()
    run(**{"on.error": "reject"})

    assert _ids(world, path) == [1, 3]
    assert _kept(world, path) == [2]
    assert _broken(world, path) == (refused, 1)


def test_what_contradicts_is_said_in_one_sentence(world: SparkWorld) -> None:
    path = _made(world, "contradicting", primary_key=("id",))
    for options, said in (
        ({"on.error": "reject", "write.mode": "partial"}, "write.mode = 'partial'"),
        ({"on.error": "reject", "write.transactional": "false"}, "write.transactional = 'false'"),
        ({"on.error": "skip"}, "is not one of refuse, reject"),
    ):
        with pytest.raises(PySparkException) as failure:
            world.write(world.spark.sql(MIXED), path, **options)
        assert said in last_line(failure.value)


# -- Debezium ----------------------------------------------------------------------------------

ROW = "id BIGINT, name STRING, price DECIMAL(8,2), day DATE, at TIMESTAMP, local TIMESTAMP_NTZ"


def _event(op: str, lsn: int, before: Any, after: Any) -> str:
    return json.dumps(
        {"op": op, "before": before, "after": after, "source": {"lsn": lsn, "ts_ms": lsn}}
    )


FULL = {
    "id": 1,
    "name": "a",
    "price": "12.50",
    "day": 20_454,
    "at": "2026-01-01T10:00:00.5Z",
    "local": 1_767_261_600_500_000,
}


def test_envelopes_become_changes(world: SparkWorld) -> None:
    events = [
        ('{"id": 1}', _event("c", 10, None, FULL)),
        ('{"id": 1}', f'{{"schema": {{}}, "payload": {_event("u", 11, None, FULL)}}}'),
        ('{"id": 2}', _event("r", 12, None, {"id": 2})),
        ('{"schema": {}, "payload": {"id": 3}}', _event("d", 13, None, None)),
        ('{"id": 1}', _event("d", 14, {"id": 1}, None)),
        ('{"id": 1}', None),
    ]
    frame = world.spark.createDataFrame(events, "key STRING, value STRING")

    found = streamhouse.cdc.debezium(frame, ROW).orderBy("__source_order").collect()

    assert [(row.id, row["__change_type"], row["__source_order"]) for row in found] == [
        (1, "+I", 10),
        (1, "+U", 11),
        (2, "+I", 12),
        (3, "-D", 13),
        (1, "-D", 14),
    ]
    first = found[0]
    assert (first.name, str(first.price), first.day) == ("a", "12.50", datetime.date(2026, 1, 1))
    assert first.local == datetime.datetime(2026, 1, 1, 10, 0, 0, 500_000)
    seconds = frame.sparkSession.sql("SELECT timestamp'2026-01-01T10:00:00.5Z' AS at").collect()
    assert first.at == seconds[0].at


def test_a_parsed_struct_and_columns_of_its_own_are_envelopes_too(world: SparkWorld) -> None:
    frame = world.spark.createDataFrame([(_event("u", 5, {"id": 1}, {"id": 1}),)], "value STRING")
    parsed = frame.selectExpr(
        "from_json(value, 'op STRING, before STRUCT<id: BIGINT>, after STRUCT<id: BIGINT>,"
        " source STRUCT<lsn: BIGINT>') AS value"
    )
    for form in (parsed, parsed.select("value.*")):
        row = streamhouse.cdc.debezium(form).collect()[0]
        assert (row.id, row["__change_type"], row["__source_order"]) == (1, "+U", 5)


def test_mysql_positions_are_in_order(world: SparkWorld) -> None:
    places = [("bin.000009", 900, 0), ("bin.000009", 900, 1), ("bin.000010", 4, 0)]
    events = [
        (json.dumps({"op": "c", "after": {"id": n}, "source": {"file": f, "pos": p, "row": r}}),)
        for n, (f, p, r) in enumerate(places)
    ]
    frame = world.spark.createDataFrame(events, "value STRING")

    found = streamhouse.cdc.debezium(frame, "id BIGINT").orderBy("__source_order").collect()

    assert [row.id for row in found] == [0, 1, 2]
    assert len({row["__source_order"] for row in found}) == 3


def test_what_is_no_change_fails_or_is_skipped(world: SparkWorld) -> None:
    events = [(_event("t", 1, None, None),), ("not json",), (_event("c", 2, None, {"id": 7}),)]
    frame = world.spark.createDataFrame(events, "value STRING")

    skipping = streamhouse.cdc.debezium(frame, "id BIGINT", truncates="skip", malformed="skip")
    assert [row.id for row in skipping.collect()] == [7]
    with pytest.raises(PySparkException, match="was truncated"):
        streamhouse.cdc.debezium(frame, "id BIGINT", malformed="skip").collect()
    with pytest.raises(PySparkException, match="no envelope: not json"):
        streamhouse.cdc.debezium(frame, "id BIGINT", truncates="skip").collect()
    with pytest.raises(InvalidRequestError, match="needs the table's columns"):
        streamhouse.cdc.debezium(frame)
    with pytest.raises(UnknownColumnError, match="nor 'op' and 'after'"):
        streamhouse.cdc.debezium(frame.select("value").withColumnRenamed("value", "v"))


FITTING = """id INT, price DECIMAL(4,2), flag BOOLEAN, tiny TINYINT, raw BINARY,
    place STRUCT<zone: INT, of: MAP<STRING, DECIMAL(4,2)>>, prices ARRAY<DECIMAL(4,2)>,
    days ARRAY<DATE>, day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, Name STRING"""
MISFITS = [
    *[{"id": 1, "price": price} for price in ("BOI=", "12345.67", "", {}, "1.505", 1.505)],
    *[{"id": 1, "price": price} for price in ("1.2e-2", "1.001000", True)],
    *[{"id": 1, "prices": prices} for prices in (["1.505"], ["x"], "y")],
    {"id": 1, "place": {"zone": 1, "of": {"a": "1.505"}}},
    {"id": 1, "days": ["soon"]},
    *[{"id": number} for number in (3_000_000_000, "5", 5.5, "one", True, [1])],
    *[{"id": 1, "flag": flag} for flag in ("true", 1)],
    *[{"id": 1, "tiny": tiny} for tiny in (200, 40_000, "1")],
    {"id": 1, "raw": "no base64"},
    *[{"id": 1, "place": place} for place in ("here", "{}", {"zone": "x"})],
    *[{"id": 1, "day": day} for day in ("soon", 99_999_999_999, {})],
    *[{"id": 1, "at": at} for at in ("soon", {})],
    *[{"id": 1, "local": local} for local in ("soon", 1 << 62)],
    {"ID": 3_000_000_000},
]
FITTING_ROWS = [
    {"id": 1, "price": "12.50", "flag": True, "tiny": -128, "raw": "AP8=", "place": {"zone": 7}},
    {"id": None, "unknown": {"id": "x"}},
    {"ID": 2, "PRICE": 2.5, "Flag": None, "nAmE": 'a "ID": b', "Place": {"zone": 8}, "DAY": 1},
    # What has the very name is meant.
    {"id": 3, "ID": 4, "name": "c"},
    *[{"id": 4, "price": price} for price in ("1.2500", 1.25, "125e-2", "0.0125e2")],
    {"id": 4, "price": "1.25", "prices": ["1.5", None, 2], "days": [0, "1970-01-02"]},
    {"id": 4, "price": "1.25", "place": {"of": {"a": "1.500", "b": None}}},
]


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_no_value_becomes_null_because_it_does_not_fit(world: SparkWorld, ansi: str) -> None:
    rows = [*MISFITS, *FITTING_ROWS]
    bare = [_event("c", n, None, row) for n, row in enumerate(rows)]
    beside = [f'{{"schema": {{"name": "x"}}, "payload": {event}}}' for event in bare]
    keys = [
        '{"id": 5}',
        '{"ID": 6}',
        '{"payload": {"Id": 7}}',
        '{"id": "x"}',
        '{"payload": {"id": ""}}',
    ]
    events = [("{}", event) for event in bare + beside]
    events += [(key, _event("d", 100, None, None)) for key in keys]
    world.spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = world.spark.createDataFrame(events, "key STRING, value STRING").cache()
        skipping = streamhouse.cdc.debezium(frame, FITTING, malformed="skip")
        found = [row.asDict(recursive=True) for row in skipping.collect()]
        failing = streamhouse.cdc.debezium(frame.where("value LIKE '%12345.67%'"), FITTING)
        with pytest.raises(
            PySparkException, match="a value does not fit its column price, in"
        ) as e:
            failing.collect()
        bad_key = streamhouse.cdc.debezium(frame.where("""key = '{"id": "x"}'"""), FITTING)
        with pytest.raises(PySparkException, match="a value does not fit its column id, in"):
            bad_key.collect()
    finally:
        world.spark.conf.unset("spark.sql.ansi.enabled")

    assert "12345.67" in last_line(e.value)
    one_pass = [1, None, 2, 3, *[4] * 6]
    assert [row["id"] for row in found] == [*one_pass, *one_pass, 5, 6, 7]
    assert {row["price"] for row in found if row["id"] == 4} == {Decimal("1.25")}
    assert found[8]["prices"] == [Decimal("1.50"), None, Decimal("2.00")]
    assert found[8]["days"] == [datetime.date(1970, 1, 1), datetime.date(1970, 1, 2)]
    assert found[9]["place"]["of"] == {"a": Decimal("1.50"), "b": None}
    assert {**found[0], "place": None}.items() >= {
        "price": Decimal("12.50"),
        "flag": True,
        "tiny": -128,
        "raw": b"\x00\xff",
    }.items()
    for row in (found[2], found[12]):
        assert (row["price"], row["Name"], row["place"]) == (
            Decimal("2.50"),
            'a "ID": b',
            {"zone": 8, "of": None},
        )
        assert row["day"] == datetime.date(1970, 1, 2)
    assert (found[3]["Name"], found[0]["place"]) == ("c", {"zone": 7, "of": None})


_RAW = UNAVAILABLE_VALUE.encode()
PLACEHOLDERS = [
    ("STRING", UNAVAILABLE_VALUE),
    ("STRING", json.dumps({UNAVAILABLE_VALUE: UNAVAILABLE_VALUE}, separators=(",", ":"))),
    ("BINARY", base64.b64encode(_RAW).decode()),
    ("MAP<STRING, STRING>", {UNAVAILABLE_VALUE: UNAVAILABLE_VALUE}),
    ("ARRAY<STRING>", [UNAVAILABLE_VALUE]),
    ("ARRAY<BINARY>", [base64.b64encode(_RAW).decode()]),
    ("ARRAY<INT>", list(_RAW)),
    ("ARRAY<DATE>", list(_RAW)),
    ("DECIMAL(30,2)", UNAVAILABLE_VALUE),
]


def test_debeziums_placeholder_is_no_value(world: SparkWorld) -> None:
    names = [f"c{at}" for at in range(len(PLACEHOLDERS))]
    schema = ", ".join(
        ["id INT", *(f"{n} {k}" for n, (k, _) in zip(names, PLACEHOLDERS, strict=True))]
    )
    rows = [{"id": 1}, *({"id": 2, n: v} for n, (_, v) in zip(names, PLACEHOLDERS, strict=True))]
    events = [(_event("u", n, None, row),) for n, row in enumerate(rows)]
    frame = world.spark.createDataFrame(events, "value STRING").coalesce(1)

    skipping = streamhouse.cdc.debezium(frame, schema, malformed="skip").collect()
    failing = streamhouse.cdc.debezium(frame, schema)
    row = "STRUCT<id: INT, c0: STRING, c4: ARRAY<STRING>>"
    struct = f"op STRING, before {row}, after {row}"
    parsed = frame.selectExpr(f"from_json(value, '{struct}') AS value")
    of_struct = streamhouse.cdc.debezium(parsed, malformed="skip").collect()
    other = streamhouse.cdc.debezium(frame, schema, malformed="skip", unavailable="n/a").collect()

    assert [row.id for row in skipping] == [1]
    assert [row.id for row in of_struct] == [1, *[2] * 7]
    assert len(other) > len(skipping)
    with pytest.raises(PySparkException, match="column c0: the update left the value alone"):
        failing.collect()


def test_an_update_of_the_key_deletes_the_old_row(world: SparkWorld) -> None:
    events = [
        ('{"id": 1}', _event("c", 1, None, {"id": 1, "name": "a"})),
        ('{"id": 2}', _event("u", 2, {"id": 1, "name": "a"}, {"id": 2, "name": "b"})),
        ('{"id": 2}', _event("u", 3, {"id": 2, "name": "b"}, {"id": 2, "name": "c"})),
        ('{"id": 3}', _event("u", 4, {"name": "x"}, {"id": 3, "name": "d"})),
    ]
    frame = world.spark.createDataFrame(events, "key STRING, value STRING").coalesce(1)
    expected = [(1, "+I"), (1, "-D"), (2, "+U"), (2, "+U"), (3, "+U")]

    for changes in (
        streamhouse.cdc.debezium(frame, "id BIGINT, name STRING"),
        streamhouse.cdc.debezium(frame.drop("key"), "id BIGINT, name STRING", keys="id"),
    ):
        assert [(row.id, row["__change_type"]) for row in changes.collect()] == expected
    unnamed = streamhouse.cdc.debezium(frame, "id BIGINT, name STRING", keys=["name"]).collect()
    assert [row["__change_type"] for row in unnamed].count("-D") == 3
    with pytest.raises(UnknownColumnError, match="keys has 'no'"):
        streamhouse.cdc.debezium(frame, "id BIGINT", keys=["no"])


def test_a_tables_stream_and_binary_records_are_sources(world: SparkWorld, tmp_path: Path) -> None:
    path = "default.records"
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
    world.client.create_table(path, schema)
    records = [
        (b'{"id": 1}', _event("c", 1, None, {"id": 1, "name": "a"}).encode()),
        (b'{"id": 2}', _event("c", 2, None, {"id": 2, "name": "b"}).encode()),
        (b'{"id": 2}', _event("d", 3, None, None).encode()),
        (b'{"id": 2}', None),
    ]
    keys, values = zip(*records, strict=True)
    world.client.append(path, pa.table({"key": keys, "value": values}, schema=schema))

    query = (
        streamhouse.cdc.debezium(world.stream(path), "id BIGINT, name STRING")
        .drop("__source_order")
        .writeStream.format("streamhouse")
        .options(endpoint=world.endpoint, **{"primary.key": "id"})
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start("default.from_records")
    )
    query.awaitTermination()

    assert world.client.read("default.from_records").to_pylist() == [{"id": 1, "name": "a"}]


def test_a_stream_of_envelopes_keeps_a_table_as_its_source_is(
    world: SparkWorld, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    state: dict[int, str] = {}
    random = Random(5)
    for batch in range(2):
        lines = []
        for step in range(60):
            number, name = random.randrange(12), f"{batch}-{step}"
            before = {"id": number}
            if number in state and random.random() < 0.4:
                del state[number]
                lines.append(_event("d", step, before, None))
            else:
                op = "u" if number in state else "c"
                state[number] = name
                lines.append(_event(op, step, before, {"id": number, "name": name}))
        (tmp_path / "in" / f"{batch}.txt").write_text("\n".join(lines))
        envelopes = world.spark.readStream.text(str(tmp_path / "in"))
        query = (
            streamhouse.cdc.debezium(envelopes, "id BIGINT, name STRING")
            .drop("__source_order")
            .writeStream.format("streamhouse")
            .options(endpoint=world.endpoint, **{"primary.key": "id"})
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start("default.copied")
        )
        query.awaitTermination()

    found = world.client.read("default.copied").to_pylist()
    assert {row["id"]: row["name"] for row in found} == state


# -- SCD type 2 --------------------------------------------------------------------------------


def test_the_history_of_rows_is_what_was_written(world: SparkWorld) -> None:
    """Against a model that keeps the table after each write, with the write's time."""
    path = "default.history"
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    world.client.create_table(path, schema, primary_key=("id",), bucket_count=3)
    random = Random(11)
    tables: list[dict[int, str]] = [{}]
    ends = 0
    for write in range(25):
        state: dict[int, str] = dict(tables[-1])
        changes: list[tuple[int, str | None, str]] = []
        for step in range(random.randrange(1, 6)):
            number = random.randrange(6)
            if random.random() < 0.3:
                state.pop(number, None)
                changes.append((number, None, "-D"))
            else:
                state[number] = f"{write}-{step}"
                changes.append((number, state[number], "+U"))
        ids, names, types = zip(*changes, strict=True)
        rows = pa.table({"id": list(ids), "name": pa.array(names, pa.string())})
        transaction = world.client.begin_transaction(path, operation="upsert")
        part = transaction.stage(rows.append_column("__change_type", pa.array(types)))
        transaction.commit([part])
        # A write that changed nothing has no time.
        before, ends = ends, sum(p.high_watermark for p in world.client.positions(path).values())
        if ends > before:
            tables.append(state)
    changelog = world.load(f"{path}$changelog")
    times = sorted({row["__timestamp"] for row in changelog.collect()})

    found = streamhouse.cdc.scd2(changelog, "id").collect()

    for number, at in enumerate(times, 1):
        valid = {
            row.id: row.name
            for row in found
            if row.valid_from <= at and (row.valid_to is None or at < row.valid_to)
        }
        assert valid == tables[number]
    current = [row for row in found if row.is_current]
    assert {row.id: row.name for row in current} == tables[-1]
    assert len(current) == len(tables[-1])
    assert all(row.valid_to is None or row.valid_from < row.valid_to for row in found)


def test_a_history_of_what_is_no_changelog_is_refused(world: SparkWorld) -> None:
    frame = world.spark.range(3)
    with pytest.raises(UnknownColumnError, match="column '__change_type' is missing"):
        streamhouse.cdc.scd2(frame, "id")
