"""One row as JSON is what the general way answers, and its bucket is the one its row has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import mmh3
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.model.bucketing import buckets_for_rows, encode_key
from streamhouse.core.model.merge_engine import MergeRules
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.values.calendar import arrow_value
from streamhouse.core.model.values.json_values import row_to_json
from streamhouse.core.types.registry import type_of
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.rows.single_row import SingleRows
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.storage_service.server.data._json_row import JsonRows
from tests.support.examples import examples
from tests.support.kv_world import random_batch, random_keys, random_rules


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_a_row_is_written_as_json_dumps_writes_it(seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    codec = RowCodec(rules.schema, schema_id=0, table="t")
    rows = SingleRows(rules, codec)
    batch = random_batch(random, rules, random_keys(random, rules, 4), rows_max=5)
    whole = [row for _, row in batch.changes if batch.columns is None]
    schema = rules.schema.to_arrow()
    given_rows = pa.RecordBatch.from_pylist(whole, schema=schema)
    as_json = JsonRows(_info(rules.schema, rules.primary_key))

    for value, row in zip(codec.encode(given_rows), given_rows.to_pylist(), strict=True):
        text = as_json.text(rows.decode_values(value.as_py()))
        assert text.decode() == json.dumps(row_to_json(row))


def _info(schema: Schema, primary_key: Sequence[str]) -> TableInfo:
    descriptor = TableDescriptor(
        path=TablePath.parse("t"), schema=schema, primary_key=tuple(primary_key)
    )
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_the_bucket_of_a_key_is_that_of_its_row(seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    names = random.sample(rules.primary_key, random.randint(1, len(rules.primary_key)))
    schema = rules.schema.select(rules.primary_key, table="t").to_arrow()
    keys = [dict(zip(rules.primary_key, k, strict=True)) for k in random_keys(random, rules, 20)]
    rows = pa.RecordBatch.from_pylist(keys, schema=schema)
    single = SingleRows(rules, RowCodec(rules.schema, schema_id=0, table="t"))
    count = random.randint(2, 50)

    expected = buckets_for_rows(rows, names, count).tolist()

    to_hash = type_of(schema.field(names[0]).type).hashed_bytes if len(names) == 1 else None

    def bytes_of(key: dict[str, Any]) -> bytes:
        return single.encode_columns(key, names) if to_hash is None else to_hash(key[names[0]])

    assert [(mmh3.hash(bytes_of(key)) & 0x7FFFFFFF) % count for key in keys] == expected
    encoded = encode_key([rows.column(name) for name in names]).to_pylist()
    assert [single.encode_columns(key, names) for key in keys] == encoded


@pytest.mark.parametrize(
    ("data", "expected"),
    # From Iceberg's specification, appendix B: 34 as a long, "iceberg", bytes 0..3.
    [
        ((34).to_bytes(8, "little"), 2017239379),
        (b"iceberg", 1210000089),
        (b"\x00\x01\x02\x03", -188683207),
    ],
)
def test_published_hashes(data: bytes, expected: int) -> None:
    assert mmh3.hash(data) == expected


_DAYS = st.integers(-(2**31), 2**31 - 1)
_MICROSECONDS = st.integers(-(2**63), 2**63 - 1)
_DIGITS = st.integers(1 - 10**38, 10**38 - 1)


@settings(max_examples=examples(60), deadline=None)
@given(_DAYS, _MICROSECONDS, _MICROSECONDS, _DIGITS)
def test_keys_and_rows_of_every_year_and_all_digits(
    days: int, utc: int, local: int, digits: int
) -> None:
    raw = pa.py_buffer(digits.to_bytes(16, "little", signed=True))
    columns = {
        "d": pa.array([days], pa.int32()).view(pa.date32()),
        "u": pa.array([utc], pa.int64()).view(pa.timestamp("us", tz="UTC")),
        "l": pa.array([local], pa.int64()).view(pa.timestamp("us")),
        "n": pa.Array.from_buffers(pa.decimal128(38, 7), 1, [None, raw]),
    }
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
    schema = Schema.from_arrow(batch.schema)
    rules = TableRules(
        table="t",
        schema=schema,
        primary_key=tuple(columns),
        merge=MergeRules.parse({}, schema=schema, primary_key=tuple(columns), table="t"),
    )
    codec = RowCodec(schema, schema_id=0, table="t")
    rows = SingleRows(rules, codec)

    values = rows.decode_values(codec.encode(batch)[0].as_py())
    key = dict(zip(columns, values, strict=True))

    assert rows.encode_key(key) == encode_key(batch.columns)[0].as_py()
    texts = json.loads(json.dumps(row_to_json(key)))
    as_json = JsonRows(_info(schema, tuple(columns)))
    assert json.loads(as_json.text(values)) == texts
    assert as_json.key_of(list(texts.values())) == key
    for name, value in key.items():
        to_hash = type_of(columns[name].type).hashed_bytes
        assert to_hash is not None
        bucket = (mmh3.hash(to_hash(value)) & 0x7FFFFFFF) % 1_000
        assert [bucket] == buckets_for_rows(batch, [name], 1_000).tolist()
        assert arrow_value(value, columns[name].type).equals(columns[name])
