"""A row out of JSON is the row that Arrow gives, value by value and type by type; keys likewise."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from random import Random
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.client._json_rows import JsonRows
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.model.values.json_values import row_to_json
from streamhouse.core.types.logical_type import OutsideOfPythonError
from streamhouse.storage_service.server.data import _json_row as json_row
from tests.support.examples import examples
from tests.support.extreme_values import EXTREMES
from tests.support.kv_world import random_keys, random_rules, random_value


def _table(schema: Schema, primary_key: Sequence[str]) -> TableInfo:
    descriptor = TableDescriptor(
        path=TablePath.parse("t"), schema=schema, primary_key=tuple(primary_key)
    )
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


def _exact(value: Any) -> Any:
    """Return a value in a form that is equal for the same values of the same types only."""
    if isinstance(value, dict):
        return "dict", [(name, _exact(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [_exact(item) for item in value]
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else value.hex()
    if isinstance(value, Decimal):
        return "Decimal", value.as_tuple()
    if isinstance(value, datetime.datetime):
        return "datetime", value.isoformat(), repr(value.tzinfo)
    return type(value).__name__, value


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_any_row_is_what_arrow_makes_of_it(seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    row = {
        c.name: None if c.nullable and random.random() < 0.2 else random_value(random, c.type)
        for c in rules.schema.columns
    }
    (expected,) = pa.RecordBatch.from_pylist([row], rules.schema.to_arrow()).to_pylist()
    sent = json.dumps(row_to_json(expected)).encode()

    found = JsonRows(_table(rules.schema, rules.primary_key)).row(sent)

    assert _exact(found) == _exact(expected)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_what_arrow_makes_of_them_or_none_in_both(name: str) -> None:
    values = EXTREMES[name]
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field(name, values.type)])
    reader = JsonRows(_table(Schema.from_arrow(schema), ["id"]))
    for value in values:
        row = {"id": 1, name: python_value(value)}
        sent = json.dumps(row_to_json(row)).encode()
        try:
            expected = value.as_py()
        except (OverflowError, ValueError):
            with pytest.raises(OutsideOfPythonError):
                reader.row(sent)
        else:
            assert _exact(reader.row(sent)) == _exact({"id": 1, name: expected})


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_any_key_is_read_from_the_url_as_it_was_given(seed: int) -> None:
    random = Random(seed)
    rules = random_rules(random, {})
    table = _table(rules.schema, rules.primary_key)
    service, client = json_row.JsonRows(table), JsonRows(table)
    schema = rules.schema.select(rules.primary_key, table="t").to_arrow()
    for values in random_keys(random, rules, 10):
        key = dict(zip(rules.primary_key, values, strict=True))
        keys = pa.RecordBatch.from_pylist([key], schema)

        for part in (client.url_part(key), client.url_part_of_plain(keys)):
            if part is not None:
                read = service.key_of(part.split("/"))
                assert pa.RecordBatch.from_pylist([read], schema).equals(keys)


_NOON: Final = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(0, 5)))


@pytest.mark.parametrize(
    ("t", "value"),
    [
        (pa.int8(), 128),
        (pa.int32(), True),
        (pa.int64(), np.int64(7)),
        (pa.int64(), 1 << 63),
        (pa.int64(), "7"),
        (pa.bool_(), 1),
        (pa.string(), b"a"),
        (pa.string(), "\ud800"),
        (pa.string(), "a/b"),
        (pa.string(), "100%"),
        (pa.string(), ""),
        (pa.string(), ".."),
        (pa.string(), "\n"),
        (pa.string(), "x" * 501),
        (pa.string(), None),
        (pa.binary(), "ab"),
        (pa.decimal128(5, 2), Decimal("1.555")),
        (pa.decimal128(5, 2), Decimal("1.5")),
        (pa.decimal128(5, 2), Decimal("12345.00")),
        (pa.decimal128(5, 2), Decimal("NaN")),
        (pa.decimal128(5, 2), 1),
        (pa.date32(), _NOON),
        (pa.timestamp("us", tz="UTC"), _NOON),
        (pa.timestamp("us", tz="UTC"), _NOON.replace(tzinfo=None)),
        (pa.timestamp("us"), _NOON),
        (pa.timestamp("us"), datetime.date(2024, 5, 1)),
    ],
    ids=repr,
)
def test_what_is_not_plainly_a_key_is_left_to_arrow(t: pa.DataType, value: Any) -> None:
    schema = Schema.from_arrow(pa.schema([pa.field("k", t, nullable=False)]))

    assert JsonRows(_table(schema, ["k"])).url_part({"k": value}) is None


@pytest.mark.parametrize(
    "sent", [b"", b"[]", b"{}", b'{"k":1}', b'{"k":1,"w":"x"}', b'{"k":1,"v":2}']
)
def test_what_is_no_row_is_refused(sent: bytes) -> None:
    schema = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.binary())])

    with pytest.raises((ValueError, TypeError)):
        JsonRows(_table(Schema.from_arrow(schema), ["k"])).row(sent)
