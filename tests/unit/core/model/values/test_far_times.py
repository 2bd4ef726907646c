"""Dates and timestamps of any year as Python values, as texts and back, alone and inside others."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.values.calendar import (
    FarDate,
    FarTimestamp,
    arrow_value,
    as_days,
    as_microseconds,
    date_of,
    date_of_text,
    python_value,
    timestamp_of,
    timestamp_of_text,
)

FAR_DAY = 2**31 - 1


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_date_is_read_back_from_its_text(days: int) -> None:
    value = date_of(days)

    assert date_of_text(value.isoformat()) == value
    assert as_days(value) == days
    assert arrow_value(value, pa.date32()).view(pa.int32()).to_pylist() == [days]


@given(st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_a_timestamp_is_read_back_from_its_text(microseconds: int, is_utc: bool) -> None:
    value = timestamp_of(microseconds, is_utc=is_utc)
    t = pa.timestamp("us", tz="UTC" if is_utc else None)

    assert timestamp_of_text(value.isoformat(), is_utc=is_utc) == value
    assert as_microseconds(value, is_utc=is_utc) == microseconds
    assert arrow_value(value, t).view(pa.int64()).to_pylist() == [microseconds]


@given(st.integers(-719_162, 2_932_896))
def test_inside_of_pythons_years_values_are_pythons(days: int) -> None:
    assert date_of(days) == dt.date(1970, 1, 1) + dt.timedelta(days=days)
    assert isinstance(timestamp_of(days * 86_400_000_000, is_utc=True), dt.datetime)


@pytest.mark.parametrize(
    "text", ["", "12000", "+12000-02-30", "+12000-1-1", "+12000-01-01T", "+9999999-01-01", "x"]
)
def test_what_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        date_of_text(text)


@pytest.mark.parametrize(
    "text", ["+12000-01-01T25:00", "+12000-01-01 soon", "+999999-01-01T00:00:00", "+12000-01-01X"]
)
def test_what_is_no_timestamp_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        timestamp_of_text(text, is_utc=True)


def test_zones_are_taken_off_or_refused() -> None:
    text = "+12000-01-01T02:00:00+02:00"

    assert timestamp_of_text(text, is_utc=True).isoformat() == "+12000-01-01T00:00:00+00:00"
    assert timestamp_of_text("+12000-01-01", is_utc=True) == timestamp_of_text(text, is_utc=True)
    with pytest.raises(ValueError, match=r"."):
        timestamp_of_text(text, is_utc=False)


def test_only_times_of_the_same_kind_are_taken() -> None:
    for wrong in (dt.datetime(2000, 1, 1), "2000-01-01", 5, FarTimestamp(0, True)):
        with pytest.raises(TypeError):
            as_days(wrong)
    for naive in (dt.datetime(2000, 1, 1), dt.date(2000, 1, 1), FarDate(0), FarTimestamp(0, False)):
        with pytest.raises(TypeError):
            as_microseconds(naive, is_utc=True)


def test_nested_values_have_them_inside() -> None:
    far = pa.array([FAR_DAY, 0, None], pa.int32()).view(pa.date32())
    offsets = pa.array([0, 3], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, far)
    maps = pa.MapArray.from_arrays(offsets, pa.array(["a", "b", "c"]), far)
    structs = pa.StructArray.from_arrays([far, lists.take(pa.array([0, 0, 0]))], ["d", "l"])
    values = [FarDate(FAR_DAY), dt.date(1970, 1, 1), None]

    assert python_value(lists[0]) == values
    assert python_value(maps[0]) == list(zip("abc", values, strict=True))
    assert python_value(structs[0]) == {"d": values[0], "l": values}
    assert python_value(structs[1]) == {"d": values[1], "l": values}
