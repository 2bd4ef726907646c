"""Rows that are the same in whatever form they come are stored as the same rows.

The forms are those that people have; each is written to a log table, to a primary key table and
through a producer and a transaction, and read back. The model is the list of dicts itself.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import duckdb
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamhouse.api.client import StreamhouseClient
from streamhouse.client import AppendWriter, Producer
from streamhouse.core.errors import SchemaMismatchError
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

Row = dict[str, Any]

DDL: Final = (
    "id BIGINT NOT NULL, small TINYINT, n INT, ratio FLOAT, x DOUBLE, price DECIMAL(7,2),"
    " name STRING, raw BINARY, day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, flag BOOLEAN,"
    " tags ARRAY<STRING>, place STRUCT<a: INT, b: STRING>"
)
# Wider types than the table's, in which its values may come.
WIDE: Final = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int64()),
        ("n", pa.float64()),
        ("ratio", pa.float64()),
        ("x", pa.float64()),
        ("price", pa.decimal128(20, 6)),
        ("name", pa.dictionary(pa.int32(), pa.string())),
        ("raw", pa.large_binary()),
        ("day", pa.timestamp("s")),
        ("at", pa.timestamp("ns", tz="Europe/Berlin")),
        ("local", pa.timestamp("ns")),
        ("flag", pa.bool_()),
        ("tags", pa.large_list(pa.large_string())),
        ("place", pa.struct([("b", pa.large_string()), ("a", pa.int64())])),
    ]
)
EXACT: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("small", pa.int8()),
        ("n", pa.int32()),
        ("ratio", pa.float32()),
        ("x", pa.float64()),
        ("price", pa.decimal128(7, 2)),
        ("name", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("flag", pa.bool_()),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("a", pa.int32()), ("b", pa.string())])),
    ]
)

_TIMES: Final = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))
_TEXTS: Final = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
_ROW: Final = st.fixed_dictionaries(
    {
        "small": st.none() | st.integers(-128, 127),
        "n": st.none() | st.integers(-(2**31), 2**31 - 1),
        "ratio": st.none() | st.floats(width=32, allow_nan=False),
        "x": st.none() | st.floats(allow_nan=False),
        "price": st.none() | st.decimals(-99999, 99999, places=2),
        "name": st.none() | _TEXTS,
        "raw": st.none() | st.binary(),
        "day": st.none() | st.dates(datetime.date(1700, 1, 1), datetime.date(2200, 1, 1)),
        "at": st.none() | _TIMES.map(lambda at: at.replace(tzinfo=datetime.UTC)),
        "local": st.none() | _TIMES,
        "flag": st.none() | st.booleans(),
        "tags": st.none() | st.lists(st.none() | _TEXTS, max_size=3),
        "place": st.none()
        | st.fixed_dictionaries({"a": st.none() | st.integers(-9, 9), "b": st.none() | _TEXTS}),
    }
)


def _rows(values: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [{"id": number, **value} for number, value in enumerate(values)]


def _exact(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=EXACT)


def _wide(rows: list[Row]) -> pa.Table:
    columns = []
    for field in WIDE:
        exact = _exact(rows).column(field.name)
        if pa.types.is_struct(field.type):
            columns.append(pa.array([row[field.name] for row in rows], field.type))
        else:
            columns.append(exact.cast(field.type))
    return pa.table(columns, schema=WIDE)


class Lent:
    """What says no more of itself than that it lends its columns."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def _polars(table: pa.Table) -> object:
    polars = pytest.importorskip("polars")
    return polars.from_arrow(table)


def _pandas(rows: list[Row]) -> pd.DataFrame:
    return _exact(rows).to_pandas(types_mapper=pd.ArrowDtype).set_index(pd.Index(range(len(rows))))


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    yield from table.to_batches(max_chunksize=2)


FORMS: Final[dict[str, Callable[[list[Row]], Any]]] = {
    "dicts": lambda rows: rows,
    "a tuple of dicts": tuple,
    "a table": _exact,
    "record batches": lambda rows: _exact(rows).to_batches(max_chunksize=1),
    "a record batch": lambda rows: _exact(rows).combine_chunks().to_batches()[0],
    "a reader": lambda rows: pa.RecordBatchReader.from_batches(EXACT, _batches(_exact(rows))),
    "wider types": _wide,
    "a reader of wider types": lambda rows: _wide(rows).to_reader(max_chunksize=2),
    "views": lambda rows: _exact(rows).set_column(
        6, "name", pa.chunked_array([pa.array([row["name"] for row in rows], pa.string_view())])
    ),
    "columns the other way round": lambda rows: _exact(rows).select(EXACT.names[::-1]),
    "what lends": lambda rows: Lent(_exact(rows)),
    "pandas": _pandas,
    "DuckDB": lambda rows: duckdb.connect().from_arrow(_exact(rows)),
    "polars": lambda rows: _polars(_exact(rows)),
    "a polars frame of categories": lambda rows: _polars(_wide(rows)),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamhouseClient]:
    with (
        ServiceProcess(tmp_path_factory.mktemp("forms")) as service,
        StreamhouseClient(service.endpoint) as opened,
    ):
        opened.create_table("log", DDL)
        opened.create_table("keyed", DDL, primary_key="id")
        yield opened


def _stored(client: StreamhouseClient, start: int, end: int) -> list[Row]:
    return [
        row for batch in client.read_range("log", 0, start, end) for row in batch.data.to_pylist()
    ]


def _append(client: StreamhouseClient, data: Any) -> dict[int, tuple[int, int]]:
    return client.append("log", data)


def _append_leniently(client: StreamhouseClient, data: Any) -> dict[int, tuple[int, int]]:
    return client.append("log", data, on_error="reject")


def _send(client: StreamhouseClient, data: Any) -> dict[int, tuple[int, int]]:
    with Producer(client, "log", linger_ms=0) as producer:
        return producer.send(data).result()


def _commit(client: StreamhouseClient, data: Any) -> dict[int, tuple[int, int]]:
    with client.begin_transaction("log") as transaction:
        return dict(transaction.commit([transaction.stage(data)]).ranges)


WRITERS: Final = {
    "append": _append,
    "append that rejects": _append_leniently,
    "a producer": _send,
    "a transaction": _commit,
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    values=st.lists(_ROW, min_size=1, max_size=5),
    writer=st.sampled_from(sorted(WRITERS)),
)
def test_a_form_of_rows_is_stored_as_these_rows(
    client: StreamhouseClient, form: str, values: list[Row], writer: str
) -> None:
    rows = _rows(values)

    ranges = WRITERS[writer](client, FORMS[form](rows))

    assert _stored(client, *ranges[0]) == rows


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_keys_finds_and_deletes_its_rows(client: StreamhouseClient, form: str) -> None:
    empty = dict.fromkeys(EXACT.names)
    rows = [{**empty, "id": n, "n": n} for n in range(5)]
    client.upsert("keyed", FORMS[form](rows))
    keys = pa.table({"id": pa.array([3, 4], pa.float64())})

    found = client.lookup("keyed", keys).to_pylist()
    client.delete("keyed", keys)

    assert [row["n"] for row in found] == [3, 4]
    left = client.lookup("keyed", [{"id": n} for n in range(5)])
    assert left["__found"].to_pylist() == [True] * 3 + [False] * 2
    client.delete("keyed", [{"id": n} for n in range(5)])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_value_that_would_be_another_one_is_refused(
    client: StreamhouseClient, data: st.DataObject
) -> None:
    """Of a column in wider types all rows are stored as they are, or none."""
    name = data.draw(st.sampled_from(["small", "n", "ratio", "price", "at", "day"]))
    values: Any = {
        "small": st.floats(-200, 200) | st.integers(-200, 200).map(float),
        "n": st.floats(),
        "ratio": st.floats(),
        "price": st.decimals(-(10**6), 10**6, places=3, allow_nan=False, allow_infinity=False),
        "at": st.integers(-(2**60), 2**60),
        "day": st.integers(-(10**9), 10**9),
    }[name]
    given_values = data.draw(st.lists(st.none() | values, min_size=1, max_size=3))
    array = pa.array(given_values, WIDE.field(name).type if name != "small" else pa.float64())
    columns = {**dict.fromkeys(EXACT.names, pa.nulls(len(array)))}
    table = pa.table({**columns, "id": range(len(array)), name: array})

    try:
        ranges = client.append("log", table)
    except SchemaMismatchError:
        return

    (stored,) = (
        pa.chunked_array([batch.data.column(name)])
        for batch in client.read_range("log", 0, *ranges[0])
    )
    assert _same(stored.cast(array.type).to_pylist(), array.to_pylist())


def _same(left: list[Any], right: list[Any]) -> bool:
    return all(
        a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(left, right, strict=True)
    )


def test_a_stream_is_exactly_what_is_repeated_under_its_writer(client: StreamhouseClient) -> None:
    """A call whose outcome is not known may be made again with the same stream."""
    client.create_table("streamed", "id BIGINT, n INT", bucket_count=2)
    schema = pa.schema([("id", pa.int64()), ("n", pa.int64())])

    def reader() -> pa.RecordBatchReader:
        parts = [pa.record_batch([range(i, i + 40_000)] * 2, schema=schema) for i in range(5)]
        return pa.RecordBatchReader.from_batches(schema, parts)

    first = client.append("streamed", reader(), writer=AppendWriter(7))
    again = client.append("streamed", reader(), writer=AppendWriter(7))

    assert first == again
    ends = [p.high_watermark for p in client.positions("streamed").values()]
    assert sum(ends) == 200_000


def test_a_stream_that_is_refused_later_on_says_what_is_written(client: StreamhouseClient) -> None:
    client.create_table("partly", "n INT")
    parts = [pa.record_batch({"n": [i * 2**20] * 65_536}) for i in range(2_000, 2_100, 48)]
    reader = pa.RecordBatchReader.from_batches(parts[0].schema, parts)

    with pytest.raises(SchemaMismatchError, match="begins with row 65536 of the stream; all rows"):
        client.append("partly", reader)

    assert client.positions("partly")[0].high_watermark == 65_536


def test_dicts_that_do_not_fit_are_kept_as_rejected_rows(client: StreamhouseClient) -> None:
    client.create_table("sieved", "id BIGINT NOT NULL, price DECIMAL(5,2), at TIMESTAMP")
    rows = [
        {"id": 1, "price": Decimal("1.50")},
        {"id": "2", "price": "2.5", "at": "2026-01-31T12:00:00Z"},
        {"id": "three", "price": None},
    ]

    ranges = client.append("sieved", rows, on_error="reject")

    assert ranges == {0: (0, 2)}
    assert [p.high_watermark for p in client.positions("sieved$rejected").values()] == [1]


def test_a_long_stream_is_written_in_bounded_memory(client: StreamhouseClient) -> None:
    """As much as one request and what is on its way is held, of a stream of 400 MB."""
    client.create_table("long", "id BIGINT, text STRING")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    text = pa.array(["x" * 1_000] * 4_000)
    before, most = pa.total_allocated_bytes(), 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for _ in range(100):
            most = max(most, pa.total_allocated_bytes() - before)
            ids = pa.array(range(4_000), pa.int64())
            yield pa.record_batch([ids, pa.concat_arrays([text])], schema=schema)

    client.append("long", pa.RecordBatchReader.from_batches(schema, batches()))

    assert client.positions("long")[0].high_watermark == 400_000
    assert most < 64 << 20
