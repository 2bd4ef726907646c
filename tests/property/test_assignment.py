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

from streamhouse.connector.write._assignment import assigned, assigned_key, can_assign
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.zone import parse_zone
from tests.support.examples import examples
from tests.support.predicate_model import values

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
FLOATS = [pa.float32(), pa.float64()]
DECIMALS = [pa.decimal128(5, 2), pa.decimal128(9, 0), pa.decimal128(38, 10), pa.decimal128(38, 38)]
NUMBERS = [*INTEGERS, *FLOATS, *DECIMALS]
CONTEXT = Context(prec=400, rounding=ROUND_HALF_UP)
NOON = "2024-07-01 12:00:00"
EPOCH, MICROSECOND = datetime.datetime(1970, 1, 1), datetime.timedelta(microseconds=1)
NEW_YORK = parse_zone("America/New_York", name="zone")


def _expected(value: Any, wanted: pa.DataType) -> Any:
    """Return the value that Spark stores; raises `OverflowError` where it fails."""
    if pa.types.is_decimal(wanted) and isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = repr(value)
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
    assert can_assign(source, wanted, zone=None)
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
    assert not can_assign(moment, day, zone=None)
    assert not can_assign(moment, wall, zone=None)
    assert not can_assign(moment, pa.string(), zone=None)

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
        (pa.int64(), pa.timestamp("us", tz="UTC")),
        (pa.date32(), pa.int32()),
        (pa.string(), pa.date32()),
        (pa.string(), pa.binary()),
        (pa.list_(pa.int32()), pa.string()),
        (pa.struct([("a", pa.int32())]), pa.string()),
        (pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int32()), ("b", pa.int32())])),
        (pa.list_(pa.string()), pa.list_(pa.int32())),
    ],
)
def test_other_kinds_are_not_assigned(source: pa.DataType, wanted: pa.DataType) -> None:
    assert not can_assign(source, wanted, zone=NEW_YORK)


def _float_text(value: float, digits: str) -> str:
    """What Java 19 and later write, made of the fewest digits that lead back to the value."""
    if not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    sign = "-" if math.copysign(1, value) < 0 else ""
    shortest = Decimal(digits).copy_abs()
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = f"{shortest:f}"
        return f"{sign}{text if '.' in text else text + '.0'}"
    first, *rest = str(shortest.normalize().as_tuple().digits).strip("(,)").split(", ")
    return f"{sign}{first}.{''.join(rest) or '0'}E{shortest.adjusted()}"


@given(st.data(), st.sampled_from(FLOATS))
@settings(max_examples=examples(80))
def test_floats_are_written_with_their_fewest_digits(
    data: st.DataObject, source: pa.DataType
) -> None:
    width = source.bit_width
    near = st.builds(
        lambda digits, e: float(f"{digits}e{e}"), st.integers(1, 10**9), st.integers(-14, 14)
    )
    drawn = data.draw(st.lists(st.one_of(st.floats(width=width), near), min_size=1, max_size=9))
    array = pa.array([None, *drawn], source).slice(1)
    exact = array.to_numpy()

    found = assigned(array, pa.string(), column="c", zone=None).to_pylist()

    for value, text in zip(exact, found, strict=True):
        if 0 < abs(value) < (1e-43 if source == pa.float32() else 1e-322):
            assert text == f"{value:.1E}"
        else:
            assert text == _float_text(float(value), str(value))


@pytest.mark.parametrize(
    ("value", "t", "text"),
    [
        (1e10, pa.float64(), "1.0E10"),
        (-0.0, pa.float64(), "-0.0"),
        (9999999.0, pa.float64(), "9999999.0"),
        (1e7, pa.float32(), "1.0E7"),
        (0.001, pa.float32(), "0.001"),
        (0.00012, pa.float64(), "1.2E-4"),
        (123456789.125, pa.float64(), "1.23456789125E8"),
        (5e-324, pa.float64(), "4.9E-324"),
        (1e-45, pa.float32(), "1.4E-45"),
        (3.4028235e38, pa.float32(), "3.4028235E38"),
        (Decimal("-0.05"), pa.decimal128(5, 2), "-0.05"),
        (Decimal("1e-38"), pa.decimal128(38, 38), f"0.{'0' * 37}1"),
        (Decimal("-99999"), pa.decimal128(5, 0), "-99999"),
        (Decimal(0), pa.decimal128(38, 10), "0.0000000000"),
        (True, pa.bool_(), "true"),
        ("ü".encode(), pa.binary(), "ü"),
        (datetime.date(9, 1, 2), pa.date32(), "0009-01-02"),
        (datetime.datetime(2024, 7, 1, 12, 0, 0, 20_000), pa.timestamp("us"), f"{NOON}.02"),
        (datetime.datetime(2024, 7, 1), pa.timestamp("us", tz="UTC"), "2024-06-30 20:00:00"),
    ],
)  # fmt: skip
def test_values_are_written_as_spark_writes_them(value: Any, t: pa.DataType, text: str) -> None:
    array = pa.array([None, value, None, value], t)

    found = assigned(array, pa.string(), column="c", zone=NEW_YORK)

    assert found.to_pylist() == [None, text, None, text]
    assert assigned(array[:0], pa.string(), column="c", zone=NEW_YORK).to_pylist() == []
    assert assigned(array[2:], pa.string(), column="c", zone=NEW_YORK).to_pylist() == [None, text]


def test_days_of_every_year_are_written_with_their_sign() -> None:
    days = pa.array([0, 2_932_896, 2_932_897, None, -719_528, -719_529], pa.int32())
    moments = pa.array([253_402_300_800_100_000, None, -62_167_219_200_000_001], pa.int64())

    dates = assigned(days.view(pa.date32()), pa.string(), column="c", zone=None)
    times = assigned(moments.view(pa.timestamp("us")), pa.string(), column="c", zone=None)

    assert dates.to_pylist() == [
        "1970-01-01",
        "9999-12-31",
        "+10000-01-01",
        None,
        "0000-01-01",
        "-0001-12-31",
    ]
    assert times.to_pylist() == ["+10000-01-01 00:00:00.1", None, "-0001-12-31 23:59:59.999999"]


def test_bytes_that_are_no_text_name_their_row() -> None:
    with pytest.raises(
        SchemaMismatchError, match=r"column 'c': row 1 has b'\\xff', which does not"
    ):
        assigned(pa.array([b"a", b"\xff"]), pa.string(), column="c", zone=None)


@given(
    st.sampled_from(["America/New_York", "Pacific/Apia", "Asia/Kolkata", "+05:45", "UTC"]),
    st.lists(st.none() | st.datetimes(datetime.datetime(1800, 1, 1)), min_size=1, max_size=8),
)
@settings(max_examples=examples(60))
def test_moments_become_what_the_zone_s_clock_shows(
    zone_id: str, drawn: list[datetime.datetime | None]
) -> None:
    zone = parse_zone(zone_id, name="zone")
    array = pa.array(drawn, pa.timestamp("us", tz="UTC"))
    shown = [
        None
        if at is None
        else at + datetime.timedelta(microseconds=zone.offset_at((at - EPOCH) // MICROSECOND))
        for at in drawn
    ]

    walls = assigned(array, pa.timestamp("us"), column="c", zone=zone)
    dates = assigned(array, pa.date32(), column="c", zone=zone)
    texts = assigned(array, pa.string(), column="c", zone=zone)

    assert walls.to_pylist() == shown
    assert dates.to_pylist() == [wall and wall.date() for wall in shown]
    assert texts.to_pylist() == assigned(walls, pa.string(), column="c", zone=None).to_pylist()


def test_types_are_named_as_in_spark() -> None:
    nested = pa.struct([("a", pa.large_list(pa.int64())), ("m", pa.map_(pa.string(), pa.int8()))])

    assert type_name(nested) == "struct<a:array<bigint>,m:map<string,tinyint>>"
    assert [type_name(t) for t in (pa.int16(), pa.null(), pa.decimal128(5, 2))] == [
        "smallint",
        "void",
        "decimal(5,2)",
    ]


KEYS = [
    *(*INTEGERS, *FLOATS, *DECIMALS, pa.bool_(), pa.string(), pa.date32()),
    *(pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
]


def test_a_time_that_python_does_not_have_is_refused_in_a_sentence() -> None:
    least = pa.array([-(2**63)], pa.timestamp("us"))

    with pytest.raises(SchemaMismatchError, match="row 0 has -290308-12-22 00:55:07"):
        assigned_key(least, pa.timestamp("us", tz="UTC"), column="c", zone=NEW_YORK)


@given(st.sampled_from(KEYS), st.sampled_from(KEYS), st.data())
@settings(max_examples=examples(300))
def test_no_two_values_become_one_key(
    source: pa.DataType, wanted: pa.DataType, data: st.DataObject
) -> None:
    if not can_assign(source, wanted, zone=NEW_YORK):
        return
    drawn = data.draw(st.lists(values(source), min_size=1, max_size=6))
    array = pa.array(drawn, source)
    keys: dict[Any, Any] = {}
    for row in range(len(array)):
        one = array.slice(row, 1)
        try:
            (key,) = _whole(assigned_key(one, wanted, column="c", zone=NEW_YORK))
        except SchemaMismatchError:
            continue
        (value,) = _whole(one)
        assert keys.setdefault(key, value) == value or value != value
        # What is taken is what INSERT INTO assigns.
        # As texts, for NaN is no NaN.
        assert str([key]) == str(_whole(assigned(one, wanted, column="c", zone=NEW_YORK)))


def _whole(array: pa.Array) -> list[Any]:
    """Return the values; times as whole numbers, as Python has not all of them."""
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if pa.types.is_date32(array.type) else pa.int64())
    return list(array.to_pylist())


@pytest.mark.parametrize(
    ("given_type", "kept", "lost", "wanted"),
    [
        (pa.float64(), 1.0, 1.5, pa.int64()),
        (pa.decimal128(9, 2), Decimal("7.00"), Decimal("7.01"), pa.int32()),
        (pa.decimal128(9, 4), Decimal("0.2500"), Decimal("0.2501"), pa.decimal128(9, 2)),
        (pa.timestamp("us"), datetime.datetime(2024, 7, 1), datetime.datetime(2024, 7, 1, 12),
         pa.date32()),
        # Noon of that day is no midnight in New York, and the hour before 06:00 UTC is there twice.
        (pa.timestamp("us", tz="UTC"), datetime.datetime(2024, 7, 1, 4), datetime.datetime(
            2024, 7, 1, 12), pa.date32()),
        (pa.timestamp("us", tz="UTC"), datetime.datetime(2024, 11, 3, 5, 30), datetime.datetime(
            2024, 11, 3, 6, 30), pa.string()),
    ],
)  # fmt: skip
def test_a_key_that_would_be_another_names_its_row(
    given_type: pa.DataType, kept: Any, lost: Any, wanted: pa.DataType
) -> None:
    fine = pa.array([kept, None], given_type)
    assert assigned_key(fine, wanted, column="c", zone=NEW_YORK).null_count == 1
    with pytest.raises(SchemaMismatchError, match=r"column 'c': row 1 has .* without loss"):
        assigned_key(pa.array([kept, lost], given_type), wanted, column="c", zone=NEW_YORK)
