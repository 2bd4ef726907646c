"""Rows are made to fit where nothing is lost, and refused by name and row where they do not."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.schema import Schema

SCHEMA = Schema.from_arrow(
    pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.string()),
            pa.field("price", pa.decimal128(12, 4)),
        ]
    )
)
PRICES = pa.array([Decimal("1.50")], pa.decimal128(5, 2))


def test_columns_are_reordered_widened_and_made_plain() -> None:
    batch = pa.record_batch(
        {
            "price": PRICES,
            "name": pa.array(["x"]).dictionary_encode(),
            "id": pa.array([3], pa.int16()),
        }
    )

    fitted = conform(batch, SCHEMA, table="a.b")

    assert fitted.schema.equals(SCHEMA.to_arrow())
    assert fitted.to_pylist() == [{"id": 3, "name": "x", "price": Decimal("1.5000")}]


def test_an_all_null_column_fits_any_nullable_one() -> None:
    batch = pa.record_batch({"id": [1], "name": pa.nulls(1), "price": pa.nulls(1)})

    assert conform(batch, SCHEMA, table="a.b").to_pylist() == [
        {"id": 1, "name": None, "price": None}
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": [1], "name": ["x"]}, "column 'price' is missing from the data"),
        (
            {"id": ["1"], "name": ["x"], "price": PRICES},
            "column 'id' is bigint, but the data has string",
        ),
        ({"id": [1.5], "name": ["x"], "price": PRICES}, "'id' is bigint, but the data has double"),
        (
            {"id": pa.array([1], pa.uint64()), "name": ["x"], "price": PRICES},
            "but the data has uint64; use decimal(20,0)",
        ),
        (
            {"id": [1], "name": ["x"], "price": pa.array([Decimal("1.23456")])},
            "'price' is decimal(12,4), but the data has decimal(6,5)",
        ),
    ],
)
def test_misfits_are_refused_by_column(columns: dict[str, pa.Array], message: str) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        conform(pa.record_batch(columns), SCHEMA, table="a.b")

    assert message in refused.value.message
    assert "table 'a.b'" in refused.value.message


def test_an_extra_column_is_refused_with_a_suggestion() -> None:
    batch = pa.record_batch({"id": [1], "nam": ["x"], "price": PRICES})

    with pytest.raises(UnknownColumnError, match=r"has no column 'nam'; did you mean 'name'\?"):
        conform(batch, SCHEMA, table="a.b")


def test_a_null_in_a_required_column_is_refused_by_row() -> None:
    batch = pa.record_batch(
        {
            "id": pa.array([1, 2, None]),
            "name": ["x"] * 3,
            "price": pa.nulls(3, pa.decimal128(12, 4)),
        }
    )

    with pytest.raises(SchemaMismatchError, match="column 'id' must not be null, but row 2 is"):
        conform(batch, SCHEMA, table="a.b")


def test_nulls_inside_required_nested_values_are_refused() -> None:
    inner = pa.struct([pa.field("k", pa.int32(), nullable=False)])
    wanted = Schema.from_arrow(pa.schema([pa.field("s", pa.list_(inner))]))
    loose = pa.list_(pa.struct([pa.field("k", pa.int32())]))

    present = pa.record_batch({"s": pa.array([[{"k": 1}], None, [None]], loose)})
    missing = pa.record_batch({"s": pa.array([[{"k": 1}, {"k": None}]], loose)})

    assert conform(present, wanted, table="a.b").num_rows == 3
    with pytest.raises(SchemaMismatchError, match=r"table 'a.b', column 's': field 'k'.*has nulls"):
        conform(missing, wanted, table="a.b")


def test_data_that_breaks_its_own_nested_schema_is_refused() -> None:
    """Bytes from the wire may claim a required field and still hold nulls in it."""
    inner = pa.struct([pa.field("k", pa.int32(), nullable=False)])
    wanted = Schema.from_arrow(pa.schema([pa.field("s", inner)]))
    broken = pa.StructArray.from_arrays(
        [pa.array([1, None], pa.int32())], fields=[pa.field("k", pa.int32(), nullable=False)]
    )

    with pytest.raises(SchemaMismatchError, match=r"'s.k' must not be null"):
        conform(pa.record_batch([broken], schema=wanted.to_arrow()), wanted, table="a.b")
