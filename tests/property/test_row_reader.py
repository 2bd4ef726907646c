"""One row as JSON is what the general way answers, and its bucket is the one its row has."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.storage_service.kv.row_codec import RowCodec
from streamhouse.storage_service.kv.single_row import SingleRows
from streamhouse.storage_service.model.bucket_of_one import bytes_to_hash, murmur3
from streamhouse.storage_service.model.bucketing import buckets_for_rows, encode_key
from streamhouse.storage_service.server.json_row import json_writers, row_to_json
from tests.support.kv_rows import random_batch, random_keys, random_rules


@settings(max_examples=200, deadline=None)
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
    writers = json_writers(rules.schema)

    for value, row in zip(codec.encode(given_rows), given_rows.to_pylist(), strict=True):
        values = rows.decode_values(value.as_py())
        texts = [name + write(v) for (name, write), v in zip(writers, values, strict=True)]
        assert f"{{{', '.join(texts)}}}" == json.dumps(row_to_json(row))


@settings(max_examples=200, deadline=None)
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

    to_hash = bytes_to_hash(schema.field(names[0]).type) if len(names) == 1 else None

    def bytes_of(key: dict[str, Any]) -> bytes:
        return single.encode_columns(key, names) if to_hash is None else to_hash(key[names[0]])

    assert [(murmur3(bytes_of(key)) & 0x7FFFFFFF) % count for key in keys] == expected
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
    assert murmur3(data) == expected & 0xFFFFFFFF
