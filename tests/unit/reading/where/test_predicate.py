"""The predicate as data: what it reads and what may be compared with what."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from streamhouse.core.model.schema import Schema
from streamhouse.lake.files.bounds import statistics_key
from streamhouse.reading.where.parser import parse_predicate
from streamhouse.reading.where.predicate import Predicate, comparison_type

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            ("id", pa.int64()),
            ("price", pa.decimal128(9, 2)),
            ("amount", pa.float64()),
            ("raw", pa.binary()),
            ("place", pa.struct([("zone", pa.int32())])),
        ]
    )
)


def _parse(text: str) -> Predicate:
    return parse_predicate(text, SCHEMA, table="db.t")


def test_columns_are_top_level_names_once_in_order_of_appearance() -> None:
    predicate = _parse("place.zone = 1 AND (id > 2 OR PLACE.zone < 0) AND __offset >= 5")

    assert predicate.columns == ("place", "id", "__offset")


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        (pa.int8(), pa.int32(), pa.int64()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(9, 4), pa.decimal128(9, 4)),
        (pa.decimal128(5, 2), pa.int64(), pa.decimal128(22, 2)),
        (pa.decimal128(38, 20), pa.int64(), None),
        (pa.decimal128(16, 2), pa.float64(), None),
        (pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
        (pa.string(), pa.int32(), None),
        (pa.string(), pa.binary(), None),
        (pa.list_(pa.int32()), pa.list_(pa.int32()), None),
    ],
)
def test_two_columns_are_compared_in_a_type_that_holds_both(
    left: pa.DataType, right: pa.DataType, common: pa.DataType | None
) -> None:
    assert comparison_type(left, right) == common
    assert comparison_type(right, left) == common


def test_statistics_keys_tell_a_dotted_name_from_a_nested_field() -> None:
    assert statistics_key(("a", "b")) == "a.b"
    assert statistics_key(("a.b",)) == "`a.b`"


def test_evaluation_needs_neither_the_parser_nor_heavy_libraries() -> None:
    program = (
        "import sys, streamhouse.reading.where._evaluation;"
        "print(*{'sqlglot', 'pyiceberg', 'pyspark', 'pyarrow.dataset', 'pyarrow.parquet'}"
        " & set(sys.modules))"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert loaded.stdout.split() == []
