"""Dates and timestamps of every year within 32 bits of days or 64 bits of microseconds.

Python's types end at the years 1 and 9999. A value inside of these years is a `datetime.date` or
`datetime.datetime`, as from Arrow's `as_py`. A value outside is a `FarDate` or `FarTimestamp`,
because `as_py` fails. Both kinds have `isoformat`, and both are read back from their `isoformat`.

The calendar repeats every 400 years, so any day maps to a day within Python's years. Years outside
0 to 9999 have a sign, as in ISO 8601, Java and Spark: `+12000-01-01`, `-0044-03-15`.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

__all__ = [
    "DAYS",
    "DAY_US",
    "MICROSECONDS",
    "FarDate",
    "FarTimestamp",
    "arrow_value",
    "as_days",
    "as_microseconds",
    "date_of",
    "date_of_text",
    "date_text",
    "days_of",
    "python_value",
    "timestamp_of",
    "timestamp_of_text",
    "timestamp_text",
]

DAY_US: Final = 86_400_000_000
DAYS: Final = (-719_162, 2_932_896)
"""The first and last day of the years 1 to 9999: what Spark, Iceberg and Python can all show."""
MICROSECONDS: Final = (DAYS[0] * DAY_US, (DAYS[1] + 1) * DAY_US - 1)
"""The first and the last microsecond of these years."""
_CYCLE_YEARS: Final = 400
_CYCLE_DAYS: Final = 146_097
_EPOCH_DATE: Final = datetime.date(1970, 1, 1)
_EPOCH_UTC: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH: Final = _EPOCH_UTC.replace(tzinfo=None)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_YEAR: Final = re.compile(r"([+-]?\d{4,7})-(\d\d)-(\d\d)((?:[T ].*)?)", re.ASCII | re.DOTALL)
_YEAR_LAST_UNSIGNED: Final = 9999


def date_text(days: int) -> str:
    """Return a day, counted from 1970-01-01, as ISO 8601."""
    cycle, day = divmod(days, _CYCLE_DAYS)
    mapped_date = _EPOCH_DATE + datetime.timedelta(days=day)
    year = mapped_date.year + cycle * _CYCLE_YEARS
    sign = "-" if year < 0 else "+" if year > _YEAR_LAST_UNSIGNED else ""
    return f"{sign}{abs(year):04}-{mapped_date.month:02}-{mapped_date.day:02}"


def days_of(year: int, month: int, day: int) -> int:
    """Return the days from 1970-01-01 to a date; raises `ValueError` for no date."""
    cycle, year_of_cycle = divmod(year, _CYCLE_YEARS)
    mapped_date = datetime.date(_CYCLE_YEARS + year_of_cycle, month, day)
    return mapped_date.toordinal() - _EPOCH_DATE.toordinal() + (cycle - 1) * _CYCLE_DAYS


def timestamp_text(microseconds: int, *, separator: str = "T") -> str:
    """Return a moment, counted from 1970-01-01T00:00:00, in the form of `datetime.isoformat`."""
    days, time_of_day = divmod(microseconds, DAY_US)
    clock = (_EPOCH + datetime.timedelta(microseconds=time_of_day)).time()
    return f"{date_text(days)}{separator}{clock.isoformat()}"


@dataclass(frozen=True, slots=True)
class FarDate:
    """A date outside of the years 1 to 9999, in days from 1970-01-01."""

    days: int

    def isoformat(self) -> str:
        """Return the date as ISO 8601, with a sign before the year."""
        return date_text(self.days)

    def __str__(self) -> str:
        return self.isoformat()


@dataclass(frozen=True, slots=True)
class FarTimestamp:
    """A timestamp outside of the years 1 to 9999, in microseconds from 1970."""

    microseconds: int
    is_utc: bool

    def isoformat(self) -> str:
        """Return the timestamp as ISO 8601, with a sign before the year."""
        return self._text("T")

    def __str__(self) -> str:
        return self._text(" ")

    def _text(self, separator: str) -> str:
        zone = "+00:00" if self.is_utc else ""
        return timestamp_text(self.microseconds, separator=separator) + zone


def date_of(days: int) -> datetime.date | FarDate:
    """Return the date of a number of days from 1970-01-01."""
    try:
        return _EPOCH_DATE + datetime.timedelta(days=days)
    except OverflowError:
        return FarDate(days)


def timestamp_of(microseconds: int, *, is_utc: bool) -> datetime.datetime | FarTimestamp:
    """Return the timestamp of a number of microseconds from 1970."""
    try:
        epoch = _EPOCH_UTC if is_utc else _EPOCH
        return epoch + datetime.timedelta(microseconds=microseconds)
    except OverflowError:
        return FarTimestamp(microseconds, is_utc)


def as_days(value: Any) -> int:
    """Return a date as days from 1970-01-01; raises `TypeError` for anything else."""
    if isinstance(value, FarDate):
        return value.days
    if isinstance(value, datetime.datetime) or not isinstance(value, datetime.date):
        raise TypeError
    return (value - _EPOCH_DATE).days


def as_microseconds(value: Any, *, is_utc: bool) -> int:
    """Return a timestamp as microseconds from 1970; raises `TypeError` for anything else."""
    if isinstance(value, FarTimestamp) and value.is_utc == is_utc:
        return value.microseconds
    if not isinstance(value, datetime.datetime):
        raise TypeError
    # Subtracting times with and without a zone raises a TypeError.
    return (value - (_EPOCH_UTC if is_utc else _EPOCH)) // _MICROSECOND


def date_of_text(text: str) -> datetime.date | FarDate:
    """Read a date in the form of `isoformat`; raises `ValueError`."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        days, suffix = _far_parts(text)
        if suffix or not -(1 << 31) <= days < 1 << 31:
            raise
        return date_of(days)


def timestamp_of_text(text: str, *, is_utc: bool) -> datetime.datetime | FarTimestamp:
    """Read a timestamp in the form of `isoformat`, in UTC without a zone; raises `ValueError`."""
    try:
        moment = datetime.datetime.fromisoformat(text)
        return moment.replace(tzinfo=datetime.UTC) if is_utc and moment.tzinfo is None else moment
    except ValueError:
        days, suffix = _far_parts(text)
        midnight = _EPOCH_UTC if is_utc else _EPOCH
        clock = datetime.datetime.fromisoformat(f"{_EPOCH_DATE}{suffix}")
        if is_utc and clock.tzinfo is None:
            clock = clock.replace(tzinfo=datetime.UTC)
        if (clock.tzinfo is None) == is_utc:
            raise
        microseconds = days * 86_400_000_000 + (clock - midnight) // _MICROSECOND
        if not -(1 << 63) <= microseconds < 1 << 63:
            raise
        return timestamp_of(microseconds, is_utc=is_utc)


def _far_parts(text: str) -> tuple[int, str]:
    """Return the days to the date at the beginning of a text, and the text after the date."""
    match = _YEAR.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' begins with no date")
    year, month, day, suffix = match.groups()
    return days_of(int(year), int(month), int(day)), suffix


def python_value(scalar: pa.Scalar) -> Any:
    """Return the result of `as_py`, or a `FarDate` or `FarTimestamp` where `as_py` fails."""
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        pass
    t = scalar.type
    if pa.types.is_date(t):
        return date_of(scalar.value)
    if pa.types.is_timestamp(t):
        return timestamp_of(scalar.value, is_utc=t.tz is not None)
    if pa.types.is_struct(t):
        return {name: python_value(item) for name, item in scalar.items()}
    if pa.types.is_map(t):
        return [tuple(python_value(part) for part in entry.values()) for entry in scalar.values]
    return [python_value(item) for item in scalar]


def arrow_value(value: Any, t: pa.DataType) -> pa.Array:
    """Return an array of one value, which may be a `FarDate` or `FarTimestamp`."""
    if isinstance(value, FarDate) and pa.types.is_date(t):
        return pa.array([value.days], pa.int32()).view(t)
    if isinstance(value, FarTimestamp) and pa.types.is_timestamp(t):
        return pa.array([value.microseconds], pa.int64()).view(t)
    return pa.array([value], t)
