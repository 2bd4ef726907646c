"""What zones do to predicates: the rows that a comparison of wall clocks keeps, row by row."""

from __future__ import annotations

import datetime
import operator
import zoneinfo
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamhouse.core.model.schema import Schema
from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.core.model.values.zone import parse_zone
from streamhouse.reading.where.parser import parse_predicate
from tests.support.examples import examples
from tests.support.predicate_model import OPERATORS, TYPES, to_batch, truth_values

SCHEMA: Final = Schema.from_arrow(pa.schema(list(TYPES.items())))
EPOCH: Final = datetime.datetime(1970, 1, 1)
MICROSECOND: Final = datetime.timedelta(microseconds=1)
HOUR: Final = datetime.timedelta(hours=1)
FUNCTIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Zones, each with a local time at which it changed its clocks: put forward and back, at midnight,
# across midnight, by half an hour, by a whole day.
CHANGES: Final = {
    "America/New_York": ["2024-03-10 02:30", "2024-11-03 01:30"],
    "Europe/Berlin": ["2024-03-31 02:30", "2024-10-27 02:30", "1945-05-24 03:00"],
    "Asia/Kolkata": ["2024-01-01 00:00"],
    "America/Sao_Paulo": ["2017-10-15 00:00", "2018-02-18 00:00"],
    "America/St_Johns": ["2006-10-29 00:00", "2006-04-02 00:01"],
    "America/Toronto": ["1919-03-31 00:00"],
    "Australia/Lord_Howe": ["2024-04-07 01:45", "2024-10-06 02:15"],
    "Pacific/Apia": ["2011-12-30 12:00", "2011-12-31 00:00"],
    "+05:45": ["2024-01-01 00:00"],
}


class Clock:
    """The obvious model: what Java's `ZonedDateTime` and Spark's casts do with one value."""

    def __init__(self, zone_id: str) -> None:
        sign, hours, minutes = zone_id[:1], zone_id[1:3], zone_id[4:]
        self.zone: datetime.tzinfo
        if sign in "+-":
            offset = datetime.timedelta(hours=int(hours), minutes=int(minutes))
            self.zone = datetime.timezone(offset)
        else:
            self.zone = zoneinfo.ZoneInfo(zone_id)

    def wall(self, moment: datetime.datetime) -> datetime.datetime:
        aware = moment.replace(tzinfo=datetime.UTC).astimezone(self.zone)
        return aware.replace(tzinfo=None, fold=0)

    def moment(self, wall: datetime.datetime) -> datetime.datetime:
        aware = wall.replace(tzinfo=self.zone)
        return aware.astimezone(datetime.UTC).replace(tzinfo=None)

    def midnight(self, day: datetime.date) -> datetime.datetime:
        wall = datetime.datetime(day.year, day.month, day.day)
        moment = self.moment(wall)
        if self.wall(moment) == wall:
            return moment
        # In a gap: the first minute that is not before the day.
        found = moment - 26 * HOUR
        while self.wall(found) < wall:
            found += datetime.timedelta(minutes=1)
        return found


@st.composite
def times(draw: st.DrawFn) -> tuple[str, list[datetime.datetime]]:
    zone_id = draw(st.sampled_from(sorted(CHANGES)))
    change = datetime.datetime.fromisoformat(draw(st.sampled_from(CHANGES[zone_id])))
    minutes = st.integers(-1600, 1600).map(lambda n: datetime.timedelta(minutes=n))
    near = st.builds(
        lambda step, few: change + step + few * MICROSECOND, minutes, st.integers(-1, 1)
    )
    far = st.datetimes(datetime.datetime(1880, 1, 1), datetime.datetime(2200, 1, 1))
    return zone_id, draw(st.lists(st.one_of(near, near, far), min_size=2, max_size=8))


def _micros(value: datetime.datetime) -> int:
    return (value - EPOCH) // MICROSECOND


def _truths(where: str, zone_id: str, cells: dict[str, list[Any]]) -> list[bool | None]:
    count = len(next(iter(cells.values())))
    nothing: dict[str, Any] = dict.fromkeys([*TYPES, "place"])
    batch = to_batch(
        [nothing | {name: column[i] for name, column in cells.items()} for i in range(count)]
    )
    zone = parse_zone(zone_id, name="zone")
    return truth_values(parse_predicate(where, SCHEMA, table="db.t", zone=zone), batch)


@given(times(), st.sampled_from(OPERATORS), st.data())
@settings(max_examples=examples(150))
def test_a_moment_is_compared_with_what_the_clock_shows(
    case: tuple[str, list[datetime.datetime]], symbol: str, data: st.DataObject
) -> None:
    zone_id, (literal, *walls) = case
    clock = Clock(zone_id)
    moments = [clock.moment(wall) + data.draw(st.integers(0, 2)) * HOUR for wall in walls]
    cells = {"at": [_micros(moment) for moment in moments]}
    compared = FUNCTIONS[symbol]

    by_date = _truths(f"date(at) {symbol} '{literal.date()}'", zone_id, cells)
    by_year = _truths(f"year(at) {symbol} {literal.year}", zone_id, cells)
    by_text = _truths(f"at {symbol} '{literal}'", zone_id, cells)
    by_wall = _truths(f"at {symbol} TIMESTAMP_NTZ '{literal}'", zone_id, cells)
    by_day = _truths(f"at {symbol} DATE '{literal.date()}'", zone_id, cells)

    assert by_date == [compared(clock.wall(m).date(), literal.date()) for m in moments]
    assert by_year == [compared(clock.wall(m).year, literal.year) for m in moments]
    assert by_text == by_wall == [compared(m, clock.moment(literal)) for m in moments]
    assert by_day == [compared(m, clock.midnight(literal.date())) for m in moments]


@given(times(), st.sampled_from(OPERATORS))
@settings(max_examples=examples(150))
def test_wall_clocks_and_dates_are_compared_with_a_moment(
    case: tuple[str, list[datetime.datetime]], symbol: str
) -> None:
    zone_id, (literal, *walls) = case
    clock = Clock(zone_id)
    days = [(wall.date() - EPOCH.date()).days for wall in walls]
    cells = {"local": [_micros(wall) for wall in walls], "day": days}
    compared, moment = FUNCTIONS[symbol], clock.moment(literal)

    by_wall = _truths(f"local {symbol} TIMESTAMP '{literal}'", zone_id, cells)
    by_day = _truths(f"TIMESTAMP '{literal}' {symbol} day", zone_id, cells)

    assert by_wall == [compared(clock.moment(wall), moment) for wall in walls]
    assert by_day == [compared(moment, clock.midnight(wall.date())) for wall in walls]


@given(times(), st.sampled_from(OPERATORS))
@settings(max_examples=examples(100))
def test_columns_are_compared_as_moments(
    case: tuple[str, list[datetime.datetime]], symbol: str
) -> None:
    zone_id, walls = case
    clock = Clock(zone_id)
    moments = [clock.moment(wall) for wall in reversed(walls)]
    cells = {
        "local": [_micros(wall) for wall in walls],
        "day": [(wall.date() - EPOCH.date()).days for wall in walls],
        "at": [_micros(moment) for moment in moments],
    }
    compared, pairs = FUNCTIONS[symbol], list(zip(walls, moments, strict=True))

    by_wall = _truths(f"local {symbol} at", zone_id, cells)
    by_day = _truths(f"at {symbol} day", zone_id, cells)

    assert by_wall == [compared(clock.moment(wall), moment) for wall, moment in pairs]
    assert by_day == [compared(moment, clock.midnight(wall.date())) for wall, moment in pairs]


@given(times(), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
@settings(max_examples=examples(60))
def test_many_values_are_moved_like_single_ones(
    case: tuple[str, list[datetime.datetime]], extremes: list[int]
) -> None:
    zone_id, walls = case
    zone = parse_zone(zone_id, name="zone")
    values = [*map(_micros, walls), *extremes, -(2**63), 2**63 - 1]
    days = [value // DAY_US for value in values]

    in_days, rest = zone.moments(np.array(values, np.int64))
    first_days, first_rest = zone.midnights(np.array(days, np.int64))

    parts = zip(in_days.tolist(), rest.tolist(), strict=True)
    assert list(parts) == [divmod(zone.moment_of(value), DAY_US) for value in values]
    parts = zip(first_days.tolist(), first_rest.tolist(), strict=True)
    assert list(parts) == [divmod(zone.midnight(day), DAY_US) for day in days]
