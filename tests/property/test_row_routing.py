"""Few rows are routed by another way than many: with the same buckets, and the same refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.bucketing import (
    FEW_ROWS,
    buckets_for_rows,
    buckets_of_few,
    encode_key,
    split_by_bucket,
)
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.server.data.row_routing import RowsRequest, routed_writes
from tests.support.examples import examples
from tests.support.in_process_service import append_body

BUCKETS: Final = 4
KEY: Final = pa.field("id", pa.int64(), nullable=False)
NAME: Final = pa.field("name", pa.string(), nullable=False)
ROWS: Final = pa.schema([KEY, NAME])
TABLES: Final = [
    TableInfo(
        descriptor=TableDescriptor(
            path=TablePath.parse("t"),
            schema=Schema.from_arrow(ROWS),
            primary_key=key,
            bucket_count=BUCKETS,
            bucket_key=bucket_key,
        ),
        table_id=1,
        created_at_us=0,
    )
    for key, bucket_key in ((("id",), ()), (("name", "id"), ()), (("name", "id"), ("name",)))
]


def _rows(ids: Sequence[int | None], key: pa.Field) -> pa.RecordBatch:
    columns = [pa.array(ids, key.type), pa.array([f"n{id_}" for id_ in ids], pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([key, NAME]))


def _values(t: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_integer(t):
        return st.integers(-(1 << (t.bit_width - 1)), (1 << (t.bit_width - 1)) - 1)
    return st.binary(max_size=20) if pa.types.is_binary(t) else st.text(max_size=20)


TYPES: Final = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", tz="UTC"),
)


def _key_column(data: st.DataObject, t: pa.DataType, size: int) -> pa.Array:
    if pa.types.is_temporal(t):
        return _key_column(data, pa.int32() if t.bit_width == 32 else pa.int64(), size).view(t)
    return pa.array(data.draw(st.lists(st.none() | _values(t), min_size=size, max_size=size)), t)


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_few_rows_have_the_buckets_and_keys_that_they_have_among_many(data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3))
    count = data.draw(st.integers(2, 4_096))
    size = data.draw(st.integers(1, FEW_ROWS))
    first = data.draw(st.integers(0, size - 1))
    whole = [_key_column(data, t, size) for t in types]
    columns = [column.slice(first) for column in whole]

    buckets, keys = buckets_of_few(columns, count), encode_key(columns).to_pylist()

    many = [pa.concat_arrays([c, pa.nulls(FEW_ROWS + 1, c.type)]) for c in whole]
    assert buckets_of_few(many, count) is None
    assert keys == encode_key(many).to_pylist()[first:size]
    names = [str(i) for i in range(len(types))]
    rows = pa.RecordBatch.from_arrays(many, names=names)
    assert buckets == buckets_for_rows(rows, names, count).tolist()[first:size]


def _outcome(table: TableInfo, parts: list[tuple[int | None, int, pa.RecordBatch]]) -> Any:
    """Return the rows of each bucket with their numbers, or the sentence that refuses them."""
    config = ServiceConfig(data_dir=Path("none"))
    request = RowsRequest(table=table, verb="upsert", config=config, schema_id=table.schema_id)
    body = append_body(parts[0][2].schema, parts)
    try:
        return {write.bucket: _in_words(write) for write in routed_writes(body, request)}
    except StreamhouseError as error:
        return error.code, error.message


def _in_words(write: KeyWrite) -> list[tuple[int, Any]]:
    numbers = range(write.rows.num_rows) if write.row_numbers is None else write.row_numbers
    return [(int(n), row) for n, row in zip(numbers, write.rows.to_pylist(), strict=True)]


@pytest.mark.parametrize("table", TABLES, ids=["one column", "two columns", "one of two"])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_few_rows_go_where_they_go_with_many_others(table: TableInfo, data: st.DataObject) -> None:
    """The others come last and are for bucket 1: they change nothing for those before them."""
    bucket_key = table.descriptor.effective_bucket_key
    many_rows = split_by_bucket(_rows(list(range(1_000)), KEY), bucket_key, BUCKETS)[1]
    assert many_rows.num_rows > FEW_ROWS
    names_buckets = data.draw(st.booleans())
    key = data.draw(st.sampled_from([KEY, KEY, KEY.with_nullable(True), KEY.with_type(pa.int16())]))
    parts: list[tuple[int | None, int, pa.RecordBatch]] = []
    for ids in data.draw(st.lists(st.lists(st.integers(0, 999), max_size=8), min_size=1)):
        rows = _rows(ids, key)
        if not names_buckets:
            parts.append((None, 0, rows))
            continue
        for bucket, own in split_by_bucket(rows, bucket_key, BUCKETS).items():
            parts.append((bucket, 0, own))
    if names_buckets and parts and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(parts) - 1))
        wrong = data.draw(st.integers(0, 999) | (st.none() if key.nullable else st.nothing()))
        parts.insert(at, (data.draw(st.integers(0, BUCKETS)), 0, _rows([1, wrong], key)))
    if not parts:
        return
    others = (1 if names_buckets else None, 0, many_rows.cast(pa.schema([key, NAME])))

    few = _outcome(table, parts)
    many = _outcome(table, [*parts, others])

    if isinstance(few, tuple):
        assert few == many
        return
    for bucket, rows in many.items():
        rest = many_rows.num_rows if bucket == 1 else 0
        assert [row for _, row in few.get(bucket, [])] == [row for _, row in rows][: -rest or None]
        if not names_buckets:
            assert few.get(bucket, []) == rows[: -rest or None]
    assert set(few) <= set(many)
