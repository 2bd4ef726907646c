"""Time zones as named by Spark, and the moments of their wall clocks as computed by Java.

A wall clock time inside a gap moves forward by the length of the gap; a wall clock time inside an
overlap means the first of its two moments. A date begins at its first moment: midnight, or the end
of a gap around midnight. `zoneinfo` reads the rules from the machine's zone database.

Java has a separate zone database, and a hundred zones have different clocks there before 1985.
Spark's driver asks Java and hands over the differences as part of the zone's text (`ZoneText`).
Without a driver, `spark_zone` refuses a time of these years.

Moments and wall clock times are microseconds since 1970-01-01T00:00:00, of any year. Python's dates
end at the year 9999, but the calendar and its rules repeat every 400 years.
"""

from __future__ import annotations

import datetime
import functools
import re
import zoneinfo
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.calendar import DAY_US, days_of

__all__ = ["UTC", "Transition", "Zone", "ZoneText", "parse_zone", "spark_zone"]

_Int64s = npt.NDArray[np.int64]

_SECOND_US: Final = 1_000_000
_HOUR_US: Final = 3_600_000_000
_AGREED_SINCE_US: Final = days_of(1985, 1, 1) * DAY_US
_OFFSET_HOURS_MAX: Final = 18
_CYCLE_DAYS: Final = 146_097
# Later days are looked up in another cycle of 400 years. Before the first day no zone has a rule,
# so the first offset of the zone holds.
_FIRST_DAY: Final = days_of(2, 1, 1)
_LAST_DAY: Final = days_of(9998, 1, 1)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC).replace(tzinfo=None)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_OFFSET: Final = re.compile(r"(?:GMT|UTC|UT)?([+-])(\d{1,2})(?::?(\d{2})(?::?(\d{2}))?)?", re.ASCII)
# `java.time.ZoneId.SHORT_IDS`, which Spark accepts too.
_SHORT_IDS: Final = {
    "ACT": "Australia/Darwin", "AET": "Australia/Sydney", "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo", "AST": "America/Anchorage", "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka", "CAT": "Africa/Harare", "CNT": "America/St_Johns",
    "CST": "America/Chicago", "CTT": "Asia/Shanghai", "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris", "IET": "America/Indiana/Indianapolis", "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo", "MIT": "Pacific/Apia", "NET": "Asia/Yerevan", "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi", "PNT": "America/Phoenix", "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal", "VST": "Asia/Ho_Chi_Minh",
    "EST": "-05:00", "MST": "-07:00", "HST": "-10:00",
}  # fmt: skip


class Transition(NamedTuple):
    """A change of a zone's clocks: the moment, and the offsets from UTC before and after."""

    moment_us: int
    before_us: int
    after_us: int

    @property
    def wall_end_us(self) -> int:
        """The wall clock time up to which the offset before the change applies."""
        return self.moment_us + max(self.before_us, self.after_us)


@dataclass(frozen=True, slots=True)
class Zone:
    """A time zone: a fixed offset, or a region of the database.

    `transitions` are Java's, up to the last transition before which the two databases differ. Times
    outside of `known_since_us` and `known_until_us` are refused, because Spark's result is unknown.
    """

    id: str
    fixed_us: int | None = None
    transitions: tuple[Transition, ...] = ()
    known_since_us: int | None = None
    known_until_us: int | None = None

    @property
    def is_utc(self) -> bool:
        """Whether the zone's wall clocks always show UTC."""
        return self.fixed_us == 0

    def offset_at(self, moment: int) -> int:
        """Return the offset of the wall clock from UTC at a moment."""
        if self.fixed_us is not None:
            return self.fixed_us
        self._check_range(moment)
        if self.transitions and moment < self.transitions[-1].moment_us:
            return self.transitions[bisect_right(self.transitions, moment, key=_moment)].before_us
        region = _region(self.id)
        return _microseconds(
            region.fromutc(_within_python_years(moment).replace(tzinfo=region)).utcoffset()
        )

    def offset_of_wall(self, wall: int) -> int:
        """Return the offset for a wall clock time: before a gap or overlap, the earlier offset."""
        if self.fixed_us is not None:
            return self.fixed_us
        self._check_range(wall)
        if self.transitions and wall < self.transitions[-1].wall_end_us:
            return self.transitions[bisect_right(self.transitions, wall, key=_wall_end)].before_us
        return _microseconds(
            _within_python_years(wall).replace(tzinfo=_region(self.id)).utcoffset()
        )

    def _check_range(self, time: int) -> None:
        since, until = self.known_since_us, self.known_until_us
        if (since is None or time >= since) and (until is None or time < until):
            return
        why = "zone databases differ in its clocks before 1985, and Spark's cannot be asked here"
        if until is not None and time >= until:
            why = "Java's zone database and this machine's differ in its clocks then: update both"
        raise InvalidRequestError(
            f"time zone '{self.id}': {why}; write a time with its offset, as in"
            " '1930-06-01T12:00:00+01:00', or take a zone like '+01:00'"
        )

    def moment_of(self, wall: int) -> int:
        """Return the moment at which the wall clock shows `wall`."""
        return wall - self.offset_of_wall(wall)

    def midnight(self, day: int) -> int:
        """Return the first moment of a day, counted from 1970-01-01."""
        wall = day * DAY_US
        moment = self.moment_of(wall)
        if moment + self.offset_at(moment) == wall:
            return moment
        # Midnight is in a gap, so the day begins at the end of the gap.
        return _first_change(self.offset_at, moment - DAY_US - _HOUR_US, moment)

    def day_reaching(self, moment: int) -> int:
        """Return the first day whose midnight is at or after a moment."""
        day = (moment + self.offset_at(moment)) // DAY_US - 2
        while self.midnight(day) < moment:
            day += 1
        return day

    def moments_reaching(self, wall: int) -> list[tuple[int, int | None]]:
        """Return, as ranges, the moments at which the wall clock shows `wall` or later.

        A clock put back across `wall` gives more than one range. Ends are exclusive; the last range
        has no end.
        """
        return self._reaching(wall, self.offset_at)

    def walls_reaching(self, moment: int) -> list[tuple[int, int | None]]:
        """Return, as ranges, the wall clock times at or after `moment`."""
        return self._reaching(moment, lambda wall: -self.offset_of_wall(wall))

    def _reaching(self, target: int, shift: Callable[[int], int]) -> list[tuple[int, int | None]]:
        if self.fixed_us is not None:
            return [(target - shift(target), None)]
        # Beyond these hours on either side no shift reaches, or misses, the target.
        hours = range(-_OFFSET_HOURS_MAX - 3, _OFFSET_HOURS_MAX + 4, 3)
        points = [target + hour * _HOUR_US for hour in hours]
        shifts = [shift(point) for point in points]
        changes = [
            _first_change(shift, points[i], points[i + 1])
            for i in range(len(points) - 1)
            if shifts[i] != shifts[i + 1]
        ]
        ranges: list[tuple[int, int | None]] = []
        for start, end in zip([points[0], *changes], [*changes, None], strict=True):
            first = max(start, target - shift(start))
            if end is not None and first >= end:
                continue
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((first, end))
        return ranges

    def midnights(self, days: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the first moment of each day as a day in UTC and microseconds of the day."""
        distinct_days, places = np.unique(days, return_inverse=True)
        parts = [divmod(self.midnight(day), DAY_US) for day in distinct_days.tolist()]
        pairs = np.array(parts, np.int64).reshape(-1, 2)
        return pairs[places, 0], pairs[places, 1]

    def moments(self, walls: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the moment of each wall clock time as a day in UTC and microseconds of the day."""
        return self._shifted(walls, is_wall=True)

    def walls(self, moments: _Int64s) -> tuple[_Int64s, _Int64s]:
        """Return the wall clock time of each moment as a day and microseconds of the day."""
        return self._shifted(moments, is_wall=False)

    def _shifted(self, times: _Int64s, *, is_wall: bool) -> tuple[_Int64s, _Int64s]:
        days, time_of_day = np.divmod(times, DAY_US)
        distinct_days, places = np.unique(days, return_inverse=True)
        rules = np.array(
            [_rule_of_day(self, day, is_wall) for day in distinct_days.tolist()], np.int64
        )
        first_shifts, change, last_shifts = rules.reshape(-1, 3)[places].T
        carried, time_of_day = np.divmod(
            time_of_day + np.where(time_of_day < change, first_shifts, last_shifts), DAY_US
        )
        return days + carried, time_of_day


UTC: Final = Zone("UTC", 0)


class ZoneText(NamedTuple):
    """A region handed over by Spark's driver, with Java's transitions missing in Python."""

    region: str
    transitions: Sequence[Transition] = ()
    is_endless: bool = False
    """Whether the two databases differ for good after the last transition."""

    def __str__(self) -> str:
        seconds = [":".join(str(us // _SECOND_US) for us in t) for t in self.transitions]
        return f"{self.region}|{'!' if self.is_endless else ''}{','.join(seconds)}"

    @property
    def zone(self) -> Zone:
        """The zone."""
        changes = tuple(self.transitions)
        until = changes[-1].moment_us if self.is_endless else None
        return Zone(self.region, transitions=changes, known_until_us=until)

    @classmethod
    def parse(cls, text: str) -> ZoneText:
        """Read the text made by `str`."""
        region, _, transitions = text.partition("|")
        changes = [
            Transition(*(int(second) * _SECOND_US for second in change.split(":")))
            for change in transitions.removeprefix("!").split(",")
            if change
        ]
        return cls(region, changes, is_endless=transitions.startswith("!"))


def spark_zone(text: str, *, name: str) -> Zone:
    """Read a zone for times that must equal Spark's; see the module."""
    zone = parse_zone(text, name=name)
    if zone.fixed_us is not None or "|" in text:
        return zone
    return replace(zone, known_since_us=_AGREED_SINCE_US)


@functools.lru_cache(maxsize=64)
def parse_zone(text: str, *, name: str) -> Zone:
    """Read a zone of Spark's `spark.sql.session.timeZone`: a region or an offset."""
    stripped = text.strip()
    if "|" in stripped:
        handed_over = ZoneText.parse(stripped)
        parse_zone(handed_over.region, name=name)
        return handed_over.zone
    zone = _SHORT_IDS.get(stripped, stripped)
    if zone in ("Z", "UTC", "UT", "GMT", "Etc/UTC"):
        return UTC
    if match := _OFFSET.fullmatch(zone):
        sign, *parts = match.groups()
        hours, minutes, seconds = (int(part or 0) for part in parts)
        total = (hours * 60 + minutes) * 60 + seconds
        if minutes < 60 and seconds < 60 and total <= _OFFSET_HOURS_MAX * 3600:
            return Zone(stripped, (-total if sign == "-" else total) * 1_000_000)
    else:
        try:
            _region(zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            pass
        else:
            return Zone(zone)
    raise InvalidRequestError(
        f"{name} = '{text}' is not a time zone this machine knows: write a region like"
        " 'Europe/Berlin', or an offset like '+01:00' (regions need the machine's zone database,"
        " or the package tzdata)"
    )


@functools.lru_cache(maxsize=64)
def _region(zone_id: str) -> zoneinfo.ZoneInfo:
    return zoneinfo.ZoneInfo(zone_id)


@functools.lru_cache(maxsize=100_000)
def _rule_of_day(zone: Zone, day: int, is_wall: bool) -> tuple[int, int, int]:
    """Return a day's first shift, the time of the day at which the shift ends, and the next shift.

    With `is_wall`, the day is a wall clock day and shifts lead to moments; otherwise the day is in
    UTC and shifts lead to wall clock times. No zone has ever changed its clocks twice within a day.
    """

    def shift(time: int) -> int:
        return -zone.offset_of_wall(time) if is_wall else zone.offset_at(time)

    start = day * DAY_US
    first_shift, last_shift = shift(start), shift(start + DAY_US - 1)
    if first_shift == last_shift:
        return first_shift, DAY_US, first_shift
    change = _first_change(shift, start, start + DAY_US - 1)
    return first_shift, change - start, last_shift


def _moment(transition: Transition) -> int:
    return transition.moment_us


def _wall_end(transition: Transition) -> int:
    return transition.wall_end_us


def _first_change(shift: Callable[[int], int], low: int, high: int) -> int:
    """Return the first value from which on `shift` equals its value at `high`, by bisection."""
    last_shift = shift(high)
    while high - low > 1:
        middle = (low + high) // 2
        if shift(middle) == last_shift:
            high = middle
        else:
            low = middle
    return high


def _within_python_years(microseconds: int) -> datetime.datetime:
    """Return a time within Python's years at which every zone has the same rules."""
    day, time_of_day = divmod(microseconds, DAY_US)
    if day < _FIRST_DAY:
        day = _FIRST_DAY
    elif day >= _LAST_DAY:
        day = _LAST_DAY - _CYCLE_DAYS + (day - _LAST_DAY) % _CYCLE_DAYS
    return _EPOCH + datetime.timedelta(days=day, microseconds=time_of_day)


def _microseconds(offset: datetime.timedelta | None) -> int:
    assert offset is not None, "every region has an offset"
    return offset // _MICROSECOND
