"""Rows written as records and read again are the same rows, whatever the table and the format."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from streamhouse.core.errors import (
    NotFoundError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.core.model.changelog import (
    DELETE,
    INSERT,
    OPERATION_DELETE,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, Schema
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.rows.checked_rows import CheckedRows
from streamhouse.core.text.base64_columns import from_base64, to_base64
from streamhouse.storage_service.kafka.avro_schema import avro_text_of
from streamhouse.storage_service.kafka.values import records_of, rows_of
from tests.support.examples import examples
from tests.support.kafka_records import columns_of, read_alone_and_among_many, record_table
from tests.support.kv_world import random_rules, random_value

BYTES_MAX: Final = 64 << 20
EXAMPLES: Final = 100


def _rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return [
        {name: python_value(batch.column(name)[at]) for name in batch.schema.names}
        for at in range(batch.num_rows)
    ]


def _random_batch(random: Random, schema: Schema, count: int) -> pa.RecordBatch:
    rows = [
        {
            c.name: None if c.nullable and random.random() < 0.2 else random_value(random, c.type)
            for c in schema.columns
        }
        for _ in range(count + 1)
    ]
    # A slice, as rows of a log often are.
    return pa.RecordBatch.from_pylist(rows, schema=schema.to_arrow()).slice(1)


def _again(batch: pa.RecordBatch, info: TableInfo) -> CheckedRows:
    records = records_of(batch, info, commit_ms=5).columns
    found = read_alone_and_among_many(records, info, bytes_max=BYTES_MAX)
    assert not found.misfits
    return found


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(st.integers(min_value=0, max_value=2**32), st.booleans())
def test_rows_of_a_log_table_are_what_they_were(seed: int, has_key: bool) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    properties = {"key_columns": ", ".join(rules.primary_key)} if has_key else {}
    info = record_table(rules.schema, value_format="json", **properties)
    batch = _random_batch(random, rules.schema, random.randint(0, 8))

    found = _again(batch, info)

    assert repr(_rows_of(found.rows)) == repr(_rows_of(batch))
    assert found.rows.schema.equals(info.schema.to_arrow())


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(
    st.integers(min_value=0, max_value=2**32),
    st.sampled_from(["upsert", "debezium-json"]),
)
def test_changes_of_a_table_with_a_key_are_what_they_were(seed: int, changes: str) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    value = "debezium-json" if changes == "debezium-json" else "json"
    info = record_table(rules.schema, rules.primary_key, changes_format=changes, value_format=value)
    codes: list[int] = []
    for _ in range(random.randint(0, 5)):
        codes += random.choice([[INSERT], [UPDATE_BEFORE, UPDATE_AFTER], [DELETE], [UPDATE_AFTER]])
    batch = _with_keys_of_updates(
        _random_batch(random, rules.schema, len(codes)), codes, rules.primary_key
    )
    log = batch.append_column(CHANGE_TYPE_COLUMN, pa.array(codes, pa.int8()))

    found = _again(log, info)

    kept = [at for at, code in enumerate(codes) if code != UPDATE_BEFORE]
    before = _rows_of(batch.take(pa.array(kept, pa.int64())))
    assert found.operations is not None
    deletes = (found.operations == OPERATION_DELETE).tolist()
    assert deletes == [codes[at] == DELETE for at in kept]
    for own, known, is_delete in zip(_rows_of(found.rows), before, deletes, strict=True):
        names = rules.primary_key if is_delete and changes == "upsert" else rules.schema.names
        assert repr([own[name] for name in names]) == repr([known[name] for name in names])


def _with_keys_of_updates(
    batch: pa.RecordBatch, codes: list[int], key: Sequence[str]
) -> pa.RecordBatch:
    """Both rows of an update have one key, as in any changelog."""
    places = [
        at - 1 if code == UPDATE_AFTER and codes[at - 1 : at] == [UPDATE_BEFORE] else at
        for at, code in enumerate(codes)
    ]
    for name in key:
        at = batch.schema.get_field_index(name)
        column = batch.column(at).take(pa.array(places, pa.int64()))
        batch = batch.set_column(at, batch.schema.field(at), column)
    return batch


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(st.integers(min_value=0, max_value=2**32), st.booleans())
def test_raw_rows_are_what_they_were(seed: int, is_text: bool) -> None:
    random = Random(seed)
    schema = RAW_TOPIC
    if is_text:
        schema = schema.set(0, pa.field("key", pa.string())).set(1, pa.field("value", pa.string()))
    info = record_table(schema)
    count = random.randint(0, 8)
    batch = _random_batch(random, info.schema, count)
    at = batch.schema.get_field_index("timestamp")
    ms = [None if random.random() < 0.2 else random.randrange(10**13) * 1_000 for _ in range(count)]
    batch = batch.set_column(at, "timestamp", pa.array(ms, schema.field("timestamp").type))

    found = _again(batch, info)

    for own, known in zip(_rows_of(found.rows), _rows_of(batch), strict=True):
        # A record says neither whether its headers are none or no list, nor a header of no name.
        headers = [
            {"key": "" if h is None else h["key"] or "", "value": None if h is None else h["value"]}
            for h in known["headers"] or ()
        ]
        assert own == {**known, "headers": headers or None}


_JSON_PIECES: Final = st.sampled_from(
    [
        *(b'{"id":1}', b'{"id":2,"s":"x"}', b'{"s":"', b'"}', b'"id"', b"null", b"1", b" \n"),
        *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\xff"),
    ]
)
_PLAIN: Final = pa.schema([("id", pa.int64()), ("s", pa.string())])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.lists(_JSON_PIECES, max_size=5).map(b"".join), max_size=6))
def test_a_record_is_judged_alone(values: list[bytes]) -> None:
    info = record_table(_PLAIN)

    # Enough to be read by whole columns, if all of them are plain.
    more = [b'{"id":7}'] * 20
    together = rows_of(columns_of(values + more), info, bytes_max=BYTES_MAX)

    rows = dict(zip(together.positions.tolist(), together.rows.to_pylist(), strict=True))
    bad = set(together.misfits)
    assert rows.keys() | bad == set(range(len(values + more)))
    assert not rows.keys() & bad
    for at, value in enumerate(values):
        alone = rows_of(columns_of([value]), info, bytes_max=BYTES_MAX)
        assert alone.rows.to_pylist() == ([rows[at]] if at in rows else [])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.none() | st.binary(max_size=7)), st.integers(0, 2))
def test_bytes_are_base64_and_back(values: list[bytes | None], skipped: int) -> None:
    array = pa.array(values, pa.binary())[skipped:]

    texts = to_base64(array)

    known = [None if v is None else base64.b64encode(v).decode() for v in array.to_pylist()]
    assert texts.to_pylist() == known
    assert from_base64(texts).equals(array)


_BASE64: Final = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==|[A-Za-z0-9+/]=))?")


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.text("Aa0+/=-", max_size=9), min_size=1, max_size=3))
def test_a_text_that_is_no_base64_is_refused(texts: list[str]) -> None:
    known = [base64.b64decode(t) if _BASE64.fullmatch(t) else None for t in texts]
    if None in known:
        with pytest.raises(SchemaMismatchError):
            from_base64(pa.array(texts))
    else:
        assert from_base64(pa.array(texts)).to_pylist() == known


_AVRO: Final = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "s", "type": ["null", "string"]},
        {"name": "b", "type": "bytes"},
        {"name": "l", "type": {"type": "array", "items": ["null", "double"]}},
        {"name": "m", "type": {"type": "map", "values": "int"}},
        {"name": "e", "type": {"type": "enum", "name": "e", "symbols": ["A", "B"]}},
        {"name": "d", "type": {"type": "int", "logicalType": "date"}},
    ],
}
_AVRO_COLUMNS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("s", pa.string()),
        pa.field("b", pa.binary(), nullable=False),
        pa.field("l", pa.list_(pa.float64()), nullable=False),
        pa.field("m", pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False))),
        pa.field("e", pa.string()),
        pa.field("d", pa.date32(), nullable=False),
    ]
)


class _OneSchema:
    def __init__(self, text: str) -> None:
        self._text = text

    def schema(self, schema_id: int, /) -> str:
        if schema_id != 1:
            raise NotFoundError(f"there is no schema {schema_id}")
        return self._text

    def table_schema(self, schema_id: int, /) -> int | None:
        return 0

    def latest(self, _path: TablePath, _part: str, /) -> tuple[int, str]:
        return 1, self._text


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_rows_of_avro_are_what_they_were(seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    info = record_table(rules.schema, value_format="avro")
    batch = _random_batch(random, rules.schema, random.randint(0, 8))
    try:
        source = _OneSchema(avro_text_of(list(info.schema.to_arrow()), name="t"))
    except UnsupportedError:
        # Keys of a map that are no texts.
        reject()

    records = records_of(batch, info, commit_ms=5, schemas=source).columns
    found = rows_of(records, info, bytes_max=BYTES_MAX, schemas=source)

    assert not found.misfits
    assert repr(_rows_of(found.rows)) == repr(_rows_of(batch))


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_damaged_avro_is_a_bad_record_or_a_row(seed: int) -> None:
    random = Random(seed)
    info = record_table(_AVRO_COLUMNS, value_format="avro")
    rows = _random_batch(random, info.schema, 6)
    full = [
        {**row, "m": [(k, v or 0) for k, v in row["m"] or ()], "e": random.choice("AB")}
        for row in rows.to_pylist()
    ]
    rows = pa.RecordBatch.from_pylist(full, schema=info.schema.to_arrow())
    source = _OneSchema(json.dumps(_AVRO))

    records = records_of(rows, info, commit_ms=5, schemas=source).columns
    again = rows_of(records, info, bytes_max=BYTES_MAX, schemas=source)
    damaged = [_damaged(random, value) for value in records.values.to_pylist()]
    mixed = [*damaged, *records.values.to_pylist()]
    found = rows_of(columns_of(mixed), info, bytes_max=BYTES_MAX, schemas=source)

    assert repr(_rows_of(again.rows)) == repr(_rows_of(rows))
    bad = set(found.misfits)
    assert bad | set(found.positions.tolist()) == set(range(12))
    assert not bad & set(range(6, 12))
    assert repr(_rows_of(found.rows)[-6:]) == repr(_rows_of(rows))


def _damaged(random: Random, value: bytes) -> bytes:
    data = bytearray(value)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data)) if data else 0
        match random.randrange(4):
            case 0:
                data[at : at + 1] = random.randbytes(1)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = b"\xff" * random.randint(1, 9)
            case 3:
                data[at:at] = random.randbytes(random.randint(1, 9))
    return bytes(data)
