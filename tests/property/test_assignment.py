"""Values are assigned to columns of other types as Spark's INSERT INTO assigns them."""

from __future__ import annotations

import datetime
import math
from decimal import ROUND_HALF_UP, Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.connector.write.assignment import assigned, can_assign
from streamhouse.storage_service.errors import SchemaMismatchError
from streamhouse.storage_service.model.schema import type_name
from streamhouse.storage_service.model.values.zone import parse_zone
from tests.support.examples import examples
from tests.support.predicate_model import values

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
FLOATS = [pa.float32(), pa.float64()]
DECIMALS = [pa.decimal128(5, 2), pa.decimal128(9, 0), pa.decimal128(38, 10), pa.decimal128(38, 38)]
NUMBERS = [*INTEGERS, *FLOATS, *DECIMALS]
CONTEXT = Context(prec=200, rounding=ROUND_HALF_UP)
NEW_YORK = parse_zone("America/New_York", name="zone")


def _expected(value: Any, wanted: pa.DataType) -> Any:
    """Return the value that Spark stores; raises `OverflowError` where it fails."""
    if pa.types.is_floating(wanted):
        with np.errstate(over="ignore"):
            found = float(value) if isinstance(value, float) else float(Fraction(value))
            return float(np.float32(found)) if pa.types.is_float32(wanted) else found
    if pa.types.is_signed_integer(wanted):
        if not math.isfinite(value):
            raise OverflowError
        whole = math.trunc(value)
        if not -(1 << wanted.bit_width - 1) <= whole < 1 << wanted.bit_width - 1:
            raise OverflowError
        return whole
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-wanted.scale), context=CONTEXT)
    if rounded.copy_abs() >= Decimal(10) ** (wanted.precision - wanted.scale):
        raise OverflowError
    return rounded


@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.data())
@settings(max_examples=examples(300))
def test_numbers_become_numbers_or_name_their_row(
    source: pa.DataType, wanted: pa.DataType, data: st.DataObject
) -> None:
    given_values = data.draw(st.lists(st.one_of(st.none(), values(source)), min_size=1, max_size=6))
    is_refused = pa.types.is_floating(source) and pa.types.is_decimal(wanted)
    assert can_assign(source, wanted, zone=None) is not is_refused
    if is_refused:
        return
    array = pa.array([None, *given_values], source).slice(1)
    expected, bad = [], None
    for row, value in enumerate(array.to_pylist()):
        try:
            expected.append(None if value is None else _expected(value, wanted))
        except OverflowError:
            bad = row
            break

    if bad is not None:
        with pytest.raises(SchemaMismatchError, match=f"column 'c': row {bad} has .* does not fit"):
            assigned(array, wanted, column="c", zone=None)
        return
    found = assigned(array, wanted, column="c", zone=None)

    assert found.type == wanted
    if pa.types.is_floating(wanted):
        # From decimals and integers to float32 Spark rounds once, and the model twice.
        np.testing.assert_allclose(
            found.to_numpy(zero_copy_only=False).astype(float),
            np.array([math.nan if v is None else v for v in expected]),
            rtol=1e-6 if pa.types.is_float32(wanted) else 0,
            atol=1e-44,
        )
    else:
        assert found.to_pylist() == expected


def test_halves_are_rounded_up_and_away_from_zero() -> None:
    halves = pa.array([Decimal("1.125"), Decimal("-1.125"), Decimal("1.135")], pa.decimal128(9, 3))

    found = assigned(halves, pa.decimal128(5, 2), column="c", zone=None)

    assert found.to_pylist() == [Decimal("1.13"), Decimal("-1.13"), Decimal("1.14")]


def test_nested_values_are_assigned_by_name_without_case() -> None:
    source = pa.struct([("N", pa.int64()), ("items", pa.list_(pa.map_(pa.string(), pa.int16())))])
    wanted = pa.struct(
        [
            pa.field("items", pa.list_(pa.map_(pa.string(), pa.decimal128(7, 2)))),
            pa.field("n", pa.int16()),
        ]
    )
    rows = [
        {"N": 9, "items": None},
        {"N": 1, "items": [[("a", 2)], None]},
        None,
        {"N": None, "items": []},
        {"N": 5, "items": [[("b", 3), ("c", None)], []]},
    ]
    array = pa.array(rows, source).slice(1)
    assert can_assign(source, wanted, zone=None)

    found = assigned(array, wanted, column="c", zone=None)

    found.validate(full=True)
    assert found.type == wanted
    assert found.to_pylist() == [
        {"items": [[("a", Decimal("2.00"))], None], "n": 1},
        None,
        {"items": [], "n": None},
        {"items": [[("b", Decimal("3.00")), ("c", None)], []], "n": 5},
    ]
    with pytest.raises(SchemaMismatchError, match=r"column 'c': row 1 has .*does not fit struct<"):
        assigned(
            pa.array([None, {"N": 70_000, "items": None}], source), wanted, column="c", zone=None
        )


def test_dates_and_wall_clocks_become_moments_of_the_session() -> None:
    day, moment, wall = pa.date32(), pa.timestamp("us", tz="UTC"), pa.timestamp("us")
    days = pa.array([None, datetime.date(2024, 7, 1), datetime.date(1969, 12, 31)], day)
    walls = pa.array([datetime.datetime(2024, 7, 1, 12), datetime.datetime(1969, 12, 31, 23)], wall)
    assert not can_assign(day, moment, zone=None)
    assert not can_assign(moment, day, zone=NEW_YORK)

    found = assigned(days, moment, column="c", zone=NEW_YORK).cast(wall).to_pylist()
    shown = assigned(walls, moment, column="c", zone=NEW_YORK).cast(wall).to_pylist()

    assert found == [None, datetime.datetime(2024, 7, 1, 4), datetime.datetime(1969, 12, 31, 5)]
    assert shown == [datetime.datetime(2024, 7, 1, 16), datetime.datetime(1970, 1, 1, 4)]
    assert assigned(walls, day, column="c", zone=None).to_pylist() == [
        datetime.date(2024, 7, 1),
        datetime.date(1969, 12, 31),
    ]
    assert assigned(days, wall, column="c", zone=None).to_pylist()[2] == datetime.datetime(
        1969, 12, 31
    )


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (pa.string(), pa.int32()),
        (pa.bool_(), pa.int32()),
        (pa.int32(), pa.bool_()),
        (pa.float64(), pa.string()),
        (pa.int64(), pa.timestamp("us", tz="UTC")),
        (pa.string(), pa.date32()),
        (pa.binary(), pa.string()),
        (pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int32()), ("b", pa.int32())])),
        (pa.list_(pa.string()), pa.list_(pa.int32())),
    ],
)
def test_other_kinds_are_not_assigned(source: pa.DataType, wanted: pa.DataType) -> None:
    assert not can_assign(source, wanted, zone=NEW_YORK)


def test_types_are_named_as_in_spark() -> None:
    nested = pa.struct([("a", pa.large_list(pa.int64())), ("m", pa.map_(pa.string(), pa.int8()))])

    assert type_name(nested) == "struct<a:array<bigint>,m:map<string,tinyint>>"
    assert [type_name(t) for t in (pa.int16(), pa.null(), pa.decimal128(5, 2))] == [
        "smallint",
        "void",
        "decimal(5,2)",
    ]
