"""Dates and timestamps of every year that 32 bits of days or 64 bits of microseconds can name.

Python's own stop at the years 1 and 9999. The calendar repeats every 400 years, so any day is one
of Python's in another cycle. Years outside 0 to 9999 are written with a sign, as ISO 8601, Java and
Spark write them: `+12000-01-01`, `-0044-03-15`.
"""

from __future__ import annotations

import datetime
from typing import Final

__all__ = ["DAY_US", "date_text", "days_of", "timestamp_text"]

DAY_US: Final = 86_400_000_000
_CYCLE_YEARS: Final = 400
_CYCLE_DAYS: Final = 146_097
_EPOCH: Final = datetime.date(1970, 1, 1)
_MIDNIGHT: Final = datetime.datetime.combine(_EPOCH, datetime.time())
_YEAR_LAST_UNSIGNED: Final = 9999


def date_text(days: int) -> str:
    """Return a day, counted from 1970-01-01, as ISO 8601."""
    cycle, day = divmod(days, _CYCLE_DAYS)
    known = _EPOCH + datetime.timedelta(days=day)
    year = known.year + cycle * _CYCLE_YEARS
    sign = "-" if year < 0 else "+" if year > _YEAR_LAST_UNSIGNED else ""
    return f"{sign}{abs(year):04}-{known.month:02}-{known.day:02}"


def days_of(year: int, month: int, day: int) -> int:
    """Return the days from 1970-01-01 to a date; raises `ValueError` for no date."""
    cycle, rest = divmod(year, _CYCLE_YEARS)
    known = datetime.date(_CYCLE_YEARS + rest, month, day)
    return known.toordinal() - _EPOCH.toordinal() + (cycle - 1) * _CYCLE_DAYS


def timestamp_text(microseconds: int, *, separator: str = "T") -> str:
    """Return a moment, counted from 1970-01-01T00:00:00, as `datetime.isoformat` writes it."""
    days, rest = divmod(microseconds, DAY_US)
    clock = (_MIDNIGHT + datetime.timedelta(microseconds=rest)).time()
    return f"{date_text(days)}{separator}{clock.isoformat()}"
