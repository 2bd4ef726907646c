"""Rows of NDJSON and CSV are those that they were made of, and a bad line refuses a body."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
    StreamhouseError,
    UnknownColumnError,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.model.values.json_values import row_to_json
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.core.text.csv_rows import divide_csv
from streamhouse.core.text.ndjson_rows import divide_ndjson
from streamhouse.core.text.rows_as_json import joined, row_texts
from streamhouse.core.text.text_rows import TextBounds
from tests.support.examples import examples
from tests.support.kv_world import random_rules, random_value

PLAIN: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("n", pa.int16()),
        pa.field("f", pa.float32()),
        pa.field("d", pa.float64()),
        pa.field("m", pa.decimal128(10, 2)),
        pa.field("s", pa.string()),
        pa.field("b", pa.binary()),
        pa.field("ok", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("ntz", pa.timestamp("us")),
    ]
)


def _table(schema: pa.Schema | Schema, primary_key: tuple[str, ...] = ()) -> TableInfo:
    schema = schema if isinstance(schema, Schema) else Schema.from_arrow(schema)
    descriptor = TableDescriptor(path=TablePath.parse("t"), schema=schema, primary_key=primary_key)
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


def _bounds(**changes: Any) -> TextBounds:
    bounds = {"what": "append to 't'", "rows_max": 1_000_000, "bytes_max": 64 << 20}
    return TextBounds(**{**bounds, "is_rejecting": False, **changes})


def _rows(checked: CheckedRows) -> list[dict[str, Any]]:
    rows = checked.rows
    return [
        {name: python_value(rows.column(name)[at]) for name in rows.schema.names}
        for at in range(rows.num_rows)
    ]


def _random_batch(random: Random, schema: Schema) -> pa.RecordBatch:
    rows = [
        {
            c.name: None if c.nullable and random.random() < 0.2 else random_value(random, c.type)
            for c in schema.columns
        }
        # More than a few are read by whole columns.
        for _ in range(random.choice([*range(1, 8), 20]))
    ]
    return pa.RecordBatch.from_pylist(rows, schema=schema.to_arrow())


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_what_is_written_as_json_is_read_as_it_was(seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    batch = _random_batch(random, rules.schema)

    texts = row_texts(batch)
    known = [row_to_json(row) for row in batch.to_pylist()]
    lines = joined(texts, separator="\n").to_pybytes()
    read = divide_ndjson(lines, _table(rules.schema), _bounds())

    assert [json.loads(text) for text in texts.to_pylist()] == json.loads(json.dumps(known))
    assert repr(_rows(read)) == repr(
        [
            {name: python_value(batch.column(name)[i]) for name in batch.schema.names}
            for i in range(len(batch))
        ]
    )


_TEXTS: Final = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(list('",\n\r\\ \x00')), max_size=8
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.none() | _TEXTS, st.none() | st.binary(max_size=5)), max_size=8))
def test_csv_has_nulls_and_empty_texts_and_any_letters(
    values: list[tuple[str | None, bytes | None]],
) -> None:
    out = io.StringIO()
    out.write("id,s,b\n")
    for at, (text, data) in enumerate(values):
        quoted = "" if text is None else '"' + text.replace('"', '""') + '"'
        out.write(f"{at},{quoted},{'' if data is None else chr(34) + data.hex() + chr(34)}\n")

    read = divide_csv(out.getvalue().encode(), _table(PLAIN), _bounds())

    assert [(row["s"], row["b"]) for row in _rows(read)] == values


def test_every_kind_of_value_of_a_csv() -> None:
    body = (
        "id,n,f,d,m,s,b,ok,day,at,ntz\n"
        '1,-3,0.5,1e300,12.34,"a,b",00ff,true,2026-01-02,2026-01-02T03:04:05.5Z,2026-01-02 03:04:05\n'  # noqa: E501
        "2,,,,,,,,,,\n"
    )

    read = divide_csv(body.encode(), _table(PLAIN), _bounds())
    lines = joined(row_texts(read.rows), separator="\n").to_pybytes()
    again = divide_ndjson(lines, _table(PLAIN), _bounds())

    assert json.loads(lines.splitlines()[0]) == {
        "id": 1, "n": -3, "f": 0.5, "d": 1e300, "m": "12.34", "s": "a,b", "b": "00ff", "ok": True,
        "day": "2026-01-02", "at": "2026-01-02T03:04:05.500000+00:00", "ntz": "2026-01-02T03:04:05",
    }  # fmt: skip
    assert _rows(again) == _rows(read)


NDJSON_REFUSED: Final = {
    b'{"id":1}\n\n{"id":2\n{"id":3}': "line 3 is no JSON",
    b'{"id":1}\n{"id":2}{"id":3}\n{"id":4}': "line 2 is no JSON",
    b'{"id":1}\n[1]': "line 2 is no JSON object",
    b'{"id":1}\n{"id":2,"oops":1}': "line 2: the table has no column 'oops'",
    b'{"id":1}\n{"id":"ten"}': "line 2, column 'id': 'ten' is no bigint",
    b'{"id":1}\n{"s":"x"}': "line 2, column 'id': null",
    b'{"id":1}\n{"id":1e400}': "line 2, column 'id'",
    b'{"id":1}\n{"id":2,"d":1e400}': "line 2, column 'd': '1E+400' is no double",
    b'{"id":1}\n{"id":2,"f":1e39}': "line 2, column 'f': '1E+39' is no float",
    b'{"id":1}\n{"id":2,"d":NaN}': 'line 2 is no JSON: NaN is none; write "NaN"',
    b'{"id":1}\n{"id":9223372036854775808}': "line 2, column 'id'",
    b'{"id":1}\n{"id":2,"n":40000}': "line 2, column 'n'",
    b'{"id":1}\n{"id":2,"s":"\xff"}': "line 2 is not UTF-8; convert",
    b'{"id":1}\n{"id":2,"s":"\\ud800"}': "line 2, column 's'",
    b'{"id":1}\n{"id":2,"b":"xyz"}': "line 2, column 'b'",
    b'{"id":1}\n{"id":2,"b":"0 0"}': "line 2, column 'b'",
    b'{"id":1}\n{"id":2,"at":"yesterday"}': "line 2, column 'at'",
    b'{"id":1}\n{"id":2,"m":1.234}': "line 2, column 'm'",
    b'{"id":' + b"[" * 100_000: "line 1",
    b"[" * 1_000_000: "line 1 is nested deeper than 64",
    b"{" + b",".join(b'"c%d":1' % i for i in range(100_000)) + b"}": "the table has no column 'c0'",
    b"\x00\x01\x02": "line 1 is no JSON",
    b'{"id":' + b"9" * 5_000 + b"}": "line 1",
}


@pytest.mark.parametrize("body", NDJSON_REFUSED, ids=lambda body: repr(body[:40]))
def test_a_line_that_is_wrong_is_named(body: bytes) -> None:
    with pytest.raises(StreamhouseError) as raised:
        divide_ndjson(body, _table(PLAIN), _bounds())

    assert NDJSON_REFUSED[body] in raised.value.message
    assert raised.value.message.startswith("append to 't': ")


CSV_REFUSED: Final = {
    b"": "the body is empty",
    b"id,oops\n1,2\n": "oops",
    b"id,id\n1,2\n": "names column 'id' twice",
    b"id,n\n1,2\n3\n": "Expected 2 columns, got 1",
    b"id,n\n1,2\n3,4,5\n": "Expected 2 columns, got 3",
    b"id,n\n1,2\n3,x\n": "line 3, column 'n': 'x' is no smallint",
    b'id,s\n1,"a\nb"\n\n2,"c"\nx,d\n': "line 6, column 'id': 'x' is no bigint",
    b'id,s\n1,"a\n': "a quote of the body is never closed",
    b"id,s\n1,\xff\n": "line 2 is not UTF-8",
    b"id,n\n1,99999999999999999999\n": "line 2, column 'n'",
    b"id,f\n1,1e39\n": "line 2, column 'f'",
    b"id,b\n1,ff\n2,fff\n": "line 3, column 'b': 'fff' is no hexadecimal digits",
    b"n,s\n1,a\n": "line 2, column 'id': null",
    b",".join(b"c%d" % i for i in range(1_000_000)) + b"\n": "more than 2100 columns",
    b"id," + b"x" * (2 << 20): "line 1, the header, has more than",
    b"id\n1" + b",2" * 1_000_000 + b"\n": "Expected 1 columns, got 1000001",
}


@pytest.mark.parametrize("body", CSV_REFUSED, ids=lambda body: repr(body[:40]))
def test_a_csv_that_is_wrong_is_refused(body: bytes) -> None:
    with pytest.raises(StreamhouseError) as raised:
        divide_csv(body, _table(PLAIN), _bounds())

    assert CSV_REFUSED[body] in raised.value.message


def test_bodies_that_grow_when_they_are_read_are_refused() -> None:
    wide = pa.schema([pa.field(f"c{i}", pa.int64()) for i in range(2_000)])

    for body in (b"{}\n" * 100_000, b"{}" * 1_000_000, b'{"c0":1}\n' * 100_000):
        with pytest.raises(StreamhouseError):
            divide_ndjson(body, _table(wide), _bounds(bytes_max=16 << 20))
    for body in (b"c0\n" + b"1\n" * 100_000,):
        with pytest.raises(StreamhouseError):
            divide_csv(body, _table(wide), _bounds(bytes_max=16 << 20))


def test_a_field_longer_than_any_row_is_refused() -> None:
    body = b'id,s\n1,"' + b"\n" * (33 << 20) + b'"\n'

    with pytest.raises(StreamhouseError, match="line 2: the row has"):
        divide_csv(body, _table(PLAIN), _bounds())


def test_a_row_longer_than_a_block_is_read() -> None:
    long = "x" * (3 << 20)
    body = f'id,s\n1,a\n2,"{long}"\n3,b\n'.encode()

    assert [row["s"] for row in _rows(divide_csv(body, _table(PLAIN), _bounds()))] == [
        "a",
        long,
        "b",
    ]
    lines = b'{"id":1}\n' + json.dumps({"id": 2, "s": long}).encode() + b'\n{"id":3}'
    assert [row["s"] for row in _rows(divide_ndjson(lines, _table(PLAIN), _bounds()))] == [
        None,
        long,
        None,
    ]


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_damaged_bodies_are_read_or_refused_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    good = {
        divide_ndjson: b'{"id": 1, "s": "a\\"b", "b": "00ff"}\n{"id": 2}\n{"m": "1.50"}\n',
        divide_csv: b'id,s,b,d\n1,"a""b",00ff,1.5\n2,,,\n3,"x,\ny",,2\n',
    }
    for divide, body in good.items():
        damaged = bytearray(body)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(damaged))
            match random.randrange(4):
                case 0:
                    damaged[at] = random.choice(b'"{}[],:\n\r\\0e\xff\x00 ')
                case 1:
                    del damaged[at]
                case 2:
                    damaged.insert(at, random.choice(b'"{}[],:\n\r\\9e\xff\x00 '))
                case _:
                    damaged += damaged[at:]
        with contextlib.suppress(InvalidRequestError, SchemaMismatchError, UnknownColumnError):
            divide(bytes(damaged), _table(PLAIN), _bounds(is_rejecting=random.random() < 0.5))


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_rejected_rows_have_their_numbers_and_the_others_their_order(size: int) -> None:
    rows = [{"id": i if i % 7 else None, "s": f"row {i}"} for i in range(size)]
    table_rows = [row["s"] for row in rows if row["id"] is not None]
    out = io.StringIO()
    writer = csv.DictWriter(out, ["id", "s"])
    writer.writeheader()
    writer.writerows(rows)
    lines = "\n".join(map(json.dumps, rows)).encode()

    for divided in (
        divide_ndjson(lines, _table(PLAIN), _bounds(is_rejecting=True)),
        divide_csv(out.getvalue().encode(), _table(PLAIN), _bounds(is_rejecting=True)),
    ):
        assert [row["s"] for row in _rows(divided)] == table_rows
        assert list(divided.misfits) == list(range(0, size, 7))
        assert [divided.original_of(at)["s"] for at in divided.misfits] == [
            f"row {at}" for at in divided.misfits
        ]


def test_changes_of_a_table_with_a_key() -> None:
    table = _table(PLAIN, ("id",))
    lines = b'{"id":1}\n{"id":2,"__change_type":"-D"}\n'
    text = b"id,__change_type\n1,\n2,-D\n"

    for divided in (divide_ndjson(lines, table, _bounds()), divide_csv(text, table, _bounds())):
        assert [(row["id"], row["__change_type"]) for row in _rows(divided)] == [
            (1, "+U"),
            (2, "-D"),
        ]


@pytest.mark.parametrize(
    "lines", [b'{"id":1\n,"s":"x"}{"id":2}', b'{"id":1}{"id":2}\n{"id":3', b'{"s":"}\n{"}{"id":1}']
)
def test_an_object_ends_where_its_line_does(lines: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="line 1 is no JSON"):
        divide_ndjson(lines, _table(PLAIN), _bounds())


def test_nulls_in_a_list_count_as_what_they_are_as_rows() -> None:
    wide = pa.list_(pa.struct([(f"c{n}", pa.int64()) for n in range(1_000)]))
    line = b'{"l":[' + b",".join([b"null"] * 20_000) + b"]}"

    with pytest.raises(RequestTooLargeError):
        divide_ndjson(line, _table(pa.schema([("l", wide)])), _bounds())


def test_texts_have_any_letters_and_nothing_of_other_rows() -> None:
    values = [None, "", "a", *map(chr, range(130)), '\\"\n\\', "ü\u2028😀"]
    empty = pa.array([[]] * len(values), pa.list_(pa.int64()))
    batch = pa.RecordBatch.from_pydict(
        {"s": values, "l": [[value, value] for value in values], "n": empty}
    )

    texts = row_texts(batch.slice(2)).to_pylist()

    assert [json.loads(text) for text in texts] == batch.slice(2).to_pylist()
