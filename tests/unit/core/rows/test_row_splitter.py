"""A batch divided by whole columns is what one divided row by row is."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.table import TableDescriptor, TableInfo, TablePath
from streamhouse.core.rows import row_splitter
from streamhouse.core.rows._row_text import column_of, row_of
from streamhouse.core.rows.row_splitter import RowSplitter, castable
from streamhouse.storage_service.kv.plan import write_input
from tests.support.held_step import lower

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int16()),
        pa.field("price", pa.decimal128(5, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("ratio", pa.float64()),
        pa.field("flag", pa.bool_()),
    ]
)
TEXTS = (
    st.sampled_from(
        [
            "1",
            " 7 ",
            "-3",
            "40000",
            "1.5",
            "x",
            "",
            "2026-01-01",
            "2026-01-01 10:00:00",
            "true",
            "nan",
        ]
    )
    | st.none()
)


def _table(schema: pa.Schema = SCHEMA, key: tuple[str, ...] = ("id",)) -> TableInfo:
    descriptor = TableDescriptor(
        path=TablePath("default", "t"), schema=Schema.from_arrow(schema), primary_key=key
    )
    return TableInfo(descriptor=descriptor, table_id=1, created_at_us=0)


@given(rows=st.lists(st.tuples(*[TEXTS] * len(SCHEMA)), max_size=12))
def test_each_row_fits_or_not_by_itself(rows: list[tuple[Any, ...]]) -> None:
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    batch = pa.record_batch([pa.array(c, pa.string()) for c in columns], names=SCHEMA.names)
    splitter = RowSplitter(_table())

    checked = splitter.split(batch)

    alone = [splitter.split(batch.slice(at, 1)) for at in range(batch.num_rows)]
    assert checked.misfits == {at: one.misfits[0] for at, one in enumerate(alone) if one.misfits}
    assert list(checked.misfits) == sorted(checked.misfits)
    assert checked.rows.to_pylist() == [row for one in alone for row in one.rows.to_pylist()]
    assert checked.rows.schema.types == SCHEMA.types
    assert checked.rows["id"].null_count == 0
    for at in checked.misfits:
        assert tuple(checked.original_of(at).values()) == rows[at]


def test_numbers_that_do_not_fit_a_narrower_type_are_bad() -> None:
    batch = pa.record_batch(
        {
            "id": pa.array([1, 2, 3, 4]),
            "small": pa.array([1, 40_000, -40_000, None], pa.int64()),
            "price": pa.array(
                [Decimal("1.00"), Decimal("1.23"), Decimal("1.00"), Decimal("12345.67")],
                pa.decimal128(20, 2),
            ),
        }
    )

    checked = RowSplitter(_table()).split(batch)
    good, bad = checked.rows, list(checked.misfits.items())

    assert good["id"].to_pylist() == [1]
    assert [(at, misfit.column) for at, misfit in bad] == [
        (1, "small"),
        (2, "small"),
        (3, "price"),
    ]


def test_nulls_inside_of_values_and_large_rows_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    items = pa.list_(pa.field("element", pa.int32(), nullable=False))
    table = _table(pa.schema([pa.field("a", items), pa.field("b", pa.string())]), ())
    lower(monkeypatch, "log-row-bytes", 10_000)
    batch = pa.record_batch(
        [pa.array([[1], [None], [], [2]], pa.list_(pa.int32())), ["x", "x", "y" * 20_000, "z"]],
        names=["a", "b"],
    )

    checked = RowSplitter(table).split(batch)
    good, bad = checked.rows, list(checked.misfits.items())

    assert good["b"].to_pylist() == ["x", "z"]
    assert "must not be null" in bad[0][1].reason
    assert "at most 10000" in bad[1][1].reason


def test_long_keys_are_bad() -> None:
    table = _table(pa.schema([pa.field("k", pa.string(), nullable=False)]), ("k",))
    batch = pa.record_batch({"k": ["a", "b" * 20_000, "c"]})

    checked = RowSplitter(table).split(batch)
    good, bad = checked.rows, list(checked.misfits.items())

    assert good["k"].to_pylist() == ["a", "c"]
    assert "the key (k) has" in bad[0][1].reason


def test_a_delete_needs_its_key_alone() -> None:
    schema = pa.schema([pa.field(n, pa.int64(), nullable=False) for n in ("id", "v")])
    batch = pa.record_batch(
        {
            "id": pa.array([1, 2, None, 4]),
            "v": pa.array([None, None, None, 4], pa.int64()),
            "__change_type": ["-D", "+I", "-D", "what"],
        }
    )

    checked = RowSplitter(_table(schema)).split(batch)
    good, bad = checked.rows, list(checked.misfits.items())

    assert good["id"].to_pylist() == [1]
    assert [misfit.column for _, misfit in bad] == ["v", "id", None]


def test_the_limits_are_those_that_the_service_refuses_by() -> None:
    assert row_splitter.KEY_BYTES_MAX == write_input.KEY_BYTES_MAX
    assert row_splitter.ROW_BYTES_MAX == write_input.ROW_BYTES_MAX


def test_texts_are_tried_and_other_types_are_not() -> None:
    table = _table()
    texts = pa.schema([pa.field(name, pa.string()) for name in SCHEMA.names])
    check_schema(castable(texts, table), table.schema, table="t")
    assert (
        castable(texts.set(1, pa.field("small", pa.binary())), table).field(1).type == pa.binary()
    )


def test_numbers_without_a_cast_are_refused_as_a_column() -> None:
    # Arrow casts no half float to a decimal, and says so by another error than for a value.
    def tried(t: pa.DataType) -> pa.DataType:
        return castable(pa.schema([pa.field("price", t)]), _table()).field("price").type

    assert tried(pa.float16()) == pa.float16()
    assert tried(pa.float32()) == pa.decimal128(5, 2)


def test_a_row_survives_its_way_through_json() -> None:
    values = {
        "id": 1,
        "small": None,
        "price": Decimal("1.50"),
        "day": datetime.date(2026, 1, 1),
        "at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        "ratio": float("inf"),
        "flag": True,
    }
    json_values = row_of(values)
    for field in SCHEMA:
        array, wrong = column_of([json_values[field.name]], field.type)
        assert (array.to_pylist(), wrong) == ([values[field.name]], {})


def test_what_is_no_value_says_so() -> None:
    array, wrong = column_of(["1", "x", None, "99999999999"], pa.int32())
    assert array.to_pylist() == [1, None, None, None]
    assert set(wrong) == {1, 3}
