"""What Python people typically get wrong gives one sentence that says what, where and what to do.

Each mistake is made against a real service, and nothing of it is written.
"""

from __future__ import annotations

import datetime
import decimal
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import Producer
from streamhouse.core.errors import InvalidNameError, StreamhouseError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

Mistake = Callable[[StreamhouseClient], object]

KEYED: Final = (
    "id BIGINT NOT NULL, name STRING, n INT, price DECIMAL(5,2), at TIMESTAMP, local TIMESTAMP_NTZ,"
    " day DATE, raw BINARY, flag BOOLEAN, tags ARRAY<STRING>, place STRUCT<x: DOUBLE, y: DOUBLE>"
)
LOG: Final = KEYED + ", ratio FLOAT"
Point = namedtuple("Point", ["id", "name"])
NOON: Final = datetime.datetime(2026, 1, 31, 12)


@dataclass
class Row:
    id: int
    name: str


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("mistakes")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        opened.create_table("keyed", KEYED, primary_key="id", bucket_count=2)
        opened.create_table("events", LOG, bucket_count=2)
        opened.create_table("numbers", "id BIGINT NOT NULL, n INT")
        opened.create_table("times", "id BIGINT, at TIMESTAMP")
        yield opened


def _append(**row: Any) -> Mistake:
    return lambda client: client.append("events", {"id": 1, **row})


def _appending(data: Any) -> Mistake:
    return lambda client: client.append("events", data)


def _framed(table: str, columns: dict[str, Any]) -> Mistake:
    return lambda client: client.append(table, pd.DataFrame(columns))


def _upserting(data: Any) -> Mistake:
    return lambda client: client.upsert("keyed", data)


def _creating(schema: Any, **given: Any) -> Mistake:
    return lambda client: client.create_table("fresh", schema, **given)


def _closed_producer(client: StreamhouseClient) -> object:
    producer = Producer(client, "events")
    producer.close()
    return producer.send({"id": 1})


def _in_producer(data: Any) -> Mistake:
    def make(client: StreamhouseClient) -> object:
        with Producer(client, "events") as producer:
            return producer.send(data)

    return make


def _in_transaction(data: Any) -> Mistake:
    def make(client: StreamhouseClient) -> object:
        with client.begin_transaction("events") as transaction:
            return transaction.stage(data)

    return make


def _half_broken() -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"id": [1]})
        raise OSError("the disk is gone")

    return pa.RecordBatchReader.from_batches(pa.schema([("id", pa.int64())]), batches())


# What is wrong -> what is done, and words of the sentence.
MISTAKES: Final[dict[str, tuple[Mistake, str]]] = {
    # Rows that are none.
    "a text": (_appending('[{"id": 1}]'), "json.loads"),
    "a path": (_appending(Path("rows.parquet")), "not a pathlib.PosixPath"),
    "a generator": (_appending({"id": n} for n in range(3)), "make it a list of dicts"),
    "a set": (_appending({1, 2}), "not a set; make it a list"),
    "a list of tuples": (_appending([(1, "a")]), "row 0 is a tuple; give each row as"),
    "a list with None": (_appending([{"id": 1}, None]), "row 1 is None"),
    "a namedtuple": (_appending([Point(1, "a")]), "call its _asdict()"),
    "a dataclass": (_appending(Row(1, "a")), "use dataclasses.asdict"),
    "a numpy array": (_appending(np.zeros((2, 2))), "not a numpy.ndarray"),
    "a series": (_appending(pd.Series([1], name="id")), "pandas.Series"),
    "an Arrow array": (_appending(pa.array([1])), "pyarrow.Int64Array"),
    "a class": (_appending(dict), "append takes rows as"),
    "a stream that breaks": (_appending(_half_broken()), "the disk is gone"),
    # Columns.
    "a column too many": (_append(nam="x"), "did you mean 'name'"),
    "a column in capitals": (_append(ID=1), "no column 'ID'"),
    "a number as a column's name": (_appending({1: "a"}), "names a column 1"),
    "rows under their keys": (_appending({"1": {"id": 1}}), "give many as a list"),
    "a dict of columns": (_appending({"id": [1, 2]}), "pa.table({...})"),
    "the key forgotten": (_appending({"name": "a"}), "'id' must not be null"),
    "an upsert of some columns": (
        _upserting({"id": 1, "name": "a"}),
        "columns=['id', 'name'] leaves the others as they are",
    ),
    "ragged upserts": (_upserting([{"id": 1, "n": 1}, {"id": 2}]), "row 1 has no column 'n'"),
    "the index of pandas": (
        _upserting(pd.DataFrame({"id": [1], "name": ["a"]}).set_index("id")),
        "column 'id' is missing",
    ),
    "a column of pandas with mixed values": (
        _appending(pd.DataFrame({"id": [1, 2], "name": ["a", 2]})),
        "Arrow cannot read the pandas.DataFrame",
    ),
    "two columns of one name": (
        _appending(pd.DataFrame([[1, 2]], columns=["id", "id"])),
        "Duplicate column names",
    ),
    # Values.
    "a text for a number": (_append(n="5"), "row 0, column 'n': '5' is a str, no int; convert"),
    "NaN for a number": (_append(n=float("nan")), "give None where there is no value"),
    "NaN for the key": (
        _framed("numbers", {"id": [1.0, float("nan")], "n": [1, 1]}),
        "'id' must not be null, but row 1 is",
    ),
    "a number too large": (_append(n=2**40), "does not fit int; widen the column"),
    "a number too large for numpy's": (_append(n=np.int64(2**40)), "does not fit int"),
    "a boolean for a number": (_append(n=True), "True is a bool, no int"),
    "a number for a boolean": (_append(flag=1), "give True or False"),
    "bytes for a text": (_append(name=b"a"), "b'a' is a bytes, no string; decode it first"),
    "a number for a text": (_append(name=7), "convert it with str()"),
    "half a surrogate pair": (_append(name="\ud800"), "half of a surrogate pair"),
    "a text for bytes": (_append(raw="a"), "no binary; encode it first"),
    "a float for a decimal": (_append(price=1.1), "give Decimal('1.1')"),
    "a decimal with more digits": (_append(price=decimal.Decimal("1.234")), "'1.234' does not fit"),
    "NaN for a decimal": (_append(price=decimal.Decimal("NaN")), "NaN is no decimal(5,2)"),
    "a naive datetime": (_append(at=NOON), "has no time zone"),
    "an aware datetime": (_append(local=NOON.replace(tzinfo=datetime.UTC)), "has a time zone"),
    "a text for a datetime": (_append(at="2026-01-31"), "give a datetime.datetime"),
    "seconds for a datetime": (_append(at=1769860800), "give a datetime.datetime"),
    "a datetime for a date": (_append(day=NOON), "give its .date()"),
    "parts of a microsecond": (
        _append(local=np.datetime64("2026-01-31T12:00:00.000000001")),
        "parts of a microsecond",
    ),
    "a text for a list": (_append(tags="abc"), "give a list"),
    "a strange field": (_append(place={"x": 1.0, "z": 2.0}), "has no field 'z' (fields: x, y)"),
    "a large float": (_append(ratio=1e300), "does not fit float; use a double"),
    "a frame's large number": (
        _framed("numbers", {"id": [1, 2], "n": [1, 2**40]}),
        "row 1 has 1099511627776, which is no int without a loss",
    ),
    "a frame without a nullable column": (
        lambda c: c.append("times", pa.table({"id": [1]})),
        "column 'at' is missing from the data (given: id); a table or a frame names every column,"
        " dicts may leave out nullable ones",
    ),
    "a read of another table": (
        lambda c: c.read("events", table="keyed"),
        "'table' is no option of a read",
    ),
    "a query of another service": (
        lambda c: c.query("SELECT * FROM events", endpoint="http://127.0.0.1:1"),
        "'endpoint' is no option of a read",
    ),
    "a delete by more than the key": (
        lambda c: c.delete("keyed", {"id": 1, "name": "a"}),
        "delete takes the key (id) alone, not column 'name'",
    ),
    "a frame's naive datetimes": (
        _framed("times", {"id": [1], "at": [pd.Timestamp(NOON)]}),
        "give the times a zone, as pandas' dt.tz_localize('UTC') does",
    ),
    # Keys.
    "a bare key": (lambda c: c.lookup("keyed", 5), "lookup takes rows as"),
    "a key of another column": (lambda c: c.lookup("keyed", {"key": 5}), "no column 'key'"),
    "a key of another type": (lambda c: c.lookup("keyed", {"id": "5"}), "'5' is a str, no bigint"),
    "a key of a log table": (lambda c: c.lookup("events", {"id": 5}), "has no primary key"),
    "lookup_one of another column": (lambda c: c.lookup_one("keyed", key=5), "key columns (id)"),
    "lookup_one of a text": (lambda c: c.lookup_one("keyed", id="5"), "column 'id'"),
    "deleting by another column": (
        lambda c: c.delete("keyed", {"name": "a"}),
        "table 'default.keyed'",
    ),
    "appending to a key table": (lambda c: c.append("keyed", {"id": 1}), "primary key"),
    "upserting into a log": (lambda c: c.upsert("events", {"id": 1}), "has no primary key"),
    # Other arguments.
    "no such table": (lambda c: c.append("event", {"id": 1}), "default.event"),
    "None for a path": (lambda c: c.append(None, {"id": 1}), "path is a text"),
    "bytes for a path": (lambda c: c.count(b"events"), "path is a text"),
    "a path of files": (lambda c: c.count("data/events"), "is not valid"),
    "a path of three parts": (lambda c: c.count("a.b.c"), "write 'database.table'"),
    "arguments the wrong way round": (lambda c: c.append({"id": 1}, "events"), "path is a text"),
    "columns that are none": (lambda c: c.lookup("keyed", {"id": 1}, columns=[5]), "list of names"),
    "a column to read that is none": (lambda c: c.read("events", columns="nam"), "column 'nam'"),
    "columns to scan that are none": (lambda c: c.scan("events", columns=5), "list of names"),
    "a column to follow that is none": (
        lambda c: c.subscribe("events", start="full", columns="nam").poll(timeout_s=30),
        "column 'nam'",
    ),
    "a bucket as a text": (lambda c: c.fetch("events", "zero", 0), "bucket"),
    "positions as a list": (
        lambda c: c.subscribe("events", start=[0, 0]),
        "start must be full, earliest, latest, committed",
    ),
    "positions of strange buckets": (
        lambda c: c.subscribe("events", start={"zero": 0}),
        "a bucket is a whole number",
    ),
    "positions that are texts": (
        lambda c: c.subscribe("events", start={"0": "5"}),
        "the offset of bucket 0 is a whole number",
    ),
    "an unknown start": (
        lambda c: c.subscribe("events", start="first"),
        "earliest",
    ),
    "an unknown operation": (
        lambda c: c.begin_transaction("events", operation="insert"),
        "operation is one of append",
    ),
    "an unknown operation of a producer": (
        lambda c: Producer(c, "events", operation="insert"),
        "operation is one of append",
    ),
    "an unknown on_error": (
        lambda c: c.append("events", {"id": 1}, on_error="ignore"),
        "not one of refuse, reject",
    ),
    "a version as a text": (
        lambda c: c.begin_transaction("events", app_id="a", version="3"),
        "version",
    ),
    "a closed producer": (_closed_producer, "closed"),
    "a text to a producer": (_in_producer("x"), "send takes rows as"),
    "a fraction to a producer": (_in_producer({"id": 1.5}), "without a loss"),
    "a text to a transaction": (_in_transaction("x"), "stage takes rows as"),
    "a fraction to a transaction": (_in_transaction([{"id": 1.5}]), "without a loss"),
    # Tables.
    "no schema": (_creating(None), "a schema is an Arrow schema"),
    "a schema of names": (_creating(["id"]), "which is no (name, type)"),
    "a schema of Python's types": (_creating({"id": int}), "its type must be Arrow's"),
    "an unknown type": (_creating("id BIGNUM"), "unknown type"),
    "DDL that ends early": (_creating("id BIGINT, tags ARRAY<STRING"), "'>' must be at character"),
    "an unsupported type": (_creating([("t", pa.time64("us"))]), "store bigint microseconds"),
    "a key that is no column": (_creating("id BIGINT", primary_key="idd"), "did you mean 'id'"),
    "a key of numbers": (_creating("id BIGINT", primary_key=[0]), "list of names"),
    "buckets as a text": (_creating("id BIGINT", bucket_count="4"), "bucket_count is a whole"),
    "no buckets": (_creating("id BIGINT", bucket_count=0), "from 1 on"),
    "an unknown property": (
        _creating("id BIGINT", properties={"ttl": "7d"}),
        "unknown property 'ttl'",
    ),
    "properties as a text": (_creating("id BIGINT", properties="ttl"), "property -> value"),
    "an unknown transform": (_creating("id BIGINT", partitioned_by="hours(id)"), "hour(id)"),
    "a column's type as a class": (
        lambda c: c.add_column("events", "more", int),
        "its type must be Arrow's",
    ),
    "an endpoint without http": (lambda _: StreamhouseClient("localhost:8765"), "http"),
    "a port as an endpoint": (lambda _: StreamhouseClient(8765), "endpoint"),
    "a timeout as a text": (
        lambda c: StreamhouseClient(c.endpoint, timeout_s="30"),
        "timeout_s",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_sentence_and_writes_nothing(
    client: StreamhouseClient, mistake: str
) -> None:
    make, words = MISTAKES[mistake]

    with pytest.raises(StreamhouseError) as refused:
        list(made) if isinstance(made := make(client), Iterator) else made

    assert words in refused.value.message
    assert "Traceback" not in refused.value.message
    assert len(refused.value.message) < 1_000
    for table in ("events", "keyed", "numbers", "times"):
        assert all(p.high_watermark == 0 for p in client.positions(table).values())


def test_a_second_table_may_not_differ_in_case_alone(client: StreamhouseClient) -> None:
    client.create_table("twins.orders", "id bigint")

    for name in ("twins.ORDERS", "Twins.orders", "TWINS.Orders"):
        with pytest.raises(InvalidNameError, match="in case alone"):
            client.create_table(name, "id bigint", if_not_exists=True)
    with pytest.raises(StreamhouseError, match=r"did you mean 'twins\.orders'"):
        client.drop_table("twins.order")


def test_there_are_as_many_mistakes_as_people_made() -> None:
    assert len(MISTAKES) >= 64
