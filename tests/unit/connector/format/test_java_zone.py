"""What Spark's driver hands over of a zone: the result has Java's clocks, or refuses."""

from __future__ import annotations

import functools
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamhouse.connector.format._java_zone import handed_over, parse_transitions
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.calendar import DAY_US, days_of
from streamhouse.core.model.values.zone import (
    Transition,
    Zone,
    ZoneText,
    parse_zone,
    spark_zone,
)
from tests.support.union_world import UnionWorld

_HOUR_US = 3_600_000_000
_PLACES = ["Europe/Amsterdam", "Europe/Brussels", "Asia/Kolkata", "Pacific/Midway"]
_TIMES = st.integers(days_of(1880, 1, 1) * DAY_US, days_of(2044, 1, 1) * DAY_US)


@functools.cache
def _transitions(place: str) -> list[Transition]:
    """The changes of a zone in this machine's database, as Java would tell those of its own."""
    zone = parse_zone(place, name="zone")
    changes = []
    after = zone.offset_at(days_of(1800, 1, 1) * DAY_US)
    # No zone has changed its clocks twice within that time.
    for day in range(days_of(1800, 1, 1), days_of(2046, 1, 1), 4):
        start, end = day * DAY_US, (day + 4) * DAY_US
        before, after = after, zone.offset_at(end)
        if before != after:
            low, high = start, end
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if zone.offset_at(middle) == before else (low, middle)
            changes.append(Transition(high, before, after))
    return changes


@functools.cache
def _handed_over(here: str, there: str) -> str:
    return str(handed_over(parse_zone(here, name="zone"), _transitions(there)))


@given(st.sampled_from(_PLACES), st.sampled_from(_PLACES), _TIMES)
def test_the_zone_that_is_handed_over_has_the_clocks_of_java(
    here: str, there: str, time: int
) -> None:
    """One place is what this machine calls the zone, the other what Java calls so."""
    zone, java = spark_zone(_handed_over(here, there), name="zone"), parse_zone(there, name="zone")

    assert zone.offset_at(time) == java.offset_at(time)
    assert zone.moment_of(time) == java.moment_of(time)


def test_a_zone_that_is_the_same_is_its_name_alone() -> None:
    assert _handed_over("Europe/Oslo", "Europe/Oslo") == "Europe/Oslo|"


def test_clocks_that_differ_for_good_are_refused_from_then_on() -> None:
    zone = parse_zone(_handed_over("Europe/Oslo", "Asia/Kolkata"), name="zone")

    with pytest.raises(InvalidRequestError, match="differ in its clocks then"):
        zone.offset_at(days_of(2060, 1, 1) * DAY_US)


def test_transitions_as_java_writes_them() -> None:
    text = (
        "[Transition[Overlap at 1892-05-01T00:17:30+00:17:30 to Z],"
        " Transition[Gap at 1914-11-08T00:00Z to -01:00]]"
    )

    moment = days_of(1892, 5, 1) * DAY_US
    assert parse_transitions(text) == [
        Transition(moment, 1_050_000_000, 0),
        Transition(days_of(1914, 11, 8) * DAY_US, 0, -_HOUR_US),
    ]
    assert ZoneText.parse("A/B|!1:2:3").is_endless


def test_without_java_an_old_time_without_a_zone_is_refused(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
    with UnionWorld(tmp_path) as world:
        world.tiering.create_table(UnionWorld.PATH, schema)
        rows = {"id": [1], "at": pa.array([-13 * 10**14], pa.timestamp("us", tz="UTC"))}
        world.append(0, pa.record_batch(rows, schema=schema))

        for text in ("at < '1930-06-01 00:20:00'", "date(at) = '1930-06-01'", "year(at) = 1930"):
            with pytest.raises(InvalidRequestError, match="'Europe/Oslo': zone databases differ"):
                world.read(where=text, timeZone="Europe/Oslo")
            assert world.read(where=text, timeZone="+01:00").num_rows <= 1
        with_offset = "at < '1930-06-01 00:20:00+01:00'"
        assert world.read(where=with_offset, timeZone="Europe/Oslo").num_rows == 1
        assert world.read(where="at < '1990-06-01'", timeZone="Europe/Oslo").num_rows == 1


def test_a_zone_of_a_fixed_offset_is_known_at_all_times() -> None:
    assert spark_zone("+01:00", name="zone") == Zone("+01:00", _HOUR_US)
