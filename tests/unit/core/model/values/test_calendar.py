"""Days and moments of any year: where Python has them as Python says, elsewhere as numpy does."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.core.model.values.calendar import date_text, days_of, timestamp_text

EPOCH = dt.date(1970, 1, 1)


@given(st.dates())
def test_dates_that_python_has_are_written_as_python_does(day: dt.date) -> None:
    days = (day - EPOCH).days

    assert date_text(days) == day.isoformat()
    assert days_of(day.year, day.month, day.day) == days


@given(st.datetimes())
def test_moments_that_python_has_are_written_as_python_does(moment: dt.datetime) -> None:
    us = (moment - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)

    assert timestamp_text(us) == moment.isoformat()


@given(st.integers(-(2**31), 2**31 - 1))
def test_any_day_of_32_bits_is_that_of_numpy(days: int) -> None:
    text = date_text(days)
    sign = -1 if text.startswith("-") else 1
    year, month, day = (int(part) for part in text.lstrip("+-").split("-"))
    months = int(np.datetime64(days, "D").astype("M8[M]").astype(np.int64))

    assert (sign * year, month) == (1970 + months // 12, 1 + months % 12)
    assert days_of(sign * year, month, day) == days


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (-(2**63), "-290308-12-21T19:59:05.224192"),
        (2**63 - 1, "+294247-01-10T04:00:54.775807"),
        (253_402_300_800_000_000, "+10000-01-01T00:00:00"),
        (-62_167_219_200_000_001, "-0001-12-31T23:59:59.999999"),
    ],
)
def test_moments_outside_of_pythons_years_have_a_sign(us: int, text: str) -> None:
    assert timestamp_text(us) == text


def test_what_is_no_date_is_refused() -> None:
    with pytest.raises(ValueError, match="day"):
        days_of(12_001, 2, 29)
