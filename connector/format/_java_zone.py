"""The rules of a time zone that Java has and Python's zone database lacks: asked in Spark's driver.

Spark evaluates times by Java's zone database. A predicate must keep exactly the rows of Spark's
filter, whatever zone database this machine has. The rules of a zone are asked once.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.values.calendar import DAY_US, days_of
from streamhouse.core.model.values.zone import Transition, Zone, ZoneText, parse_zone

__all__ = ["handed_over", "parse_transitions", "with_java_rules"]

# From the first clocks of zones to a year in which rules have long repeated.
_FIRST_US: Final = days_of(1800, 1, 1) * DAY_US
_LAST_US: Final = days_of(2045, 1, 1) * DAY_US
_STEP_US: Final = 7 * DAY_US
_SECOND_US: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET: Final = r"(Z|[+-]\d\d:\d\d(?::\d\d)?)"
_TRANSITION: Final = re.compile(rf"Transition\[\w+ at (\d{{4}}-[\dT:-]+?){_OFFSET} to {_OFFSET}\]")

_texts: Final[dict[str, str]] = {}
_lock: Final = threading.Lock()


def with_java_rules(spark: Any, text: str) -> str:
    """Return a session's zone for `parse_zone`, with Java's rules if the session has a JVM."""
    if not has_jvm(spark):
        return text
    try:
        zone = parse_zone(text, name="the time zone")
    except InvalidRequestError:
        # A time that needs the zone raises the error.
        return text
    if zone.fixed_us is not None:
        return text
    with _lock:
        if zone.id not in _texts:
            _texts[zone.id] = str(handed_over(zone, _java_transitions(spark._jvm, zone.id)))
        return _texts[zone.id]


def _java_transitions(jvm: Any, region: str) -> list[Transition]:
    """Return the clock changes of a zone up to `_LAST_US`."""
    rules = jvm.java.time.ZoneId.of(region).getRules()
    changes = parse_transitions(rules.getTransitions().toString())
    moment = jvm.java.time.Instant.ofEpochSecond(
        (changes[-1].moment_us if changes else _FIRST_US) // _SECOND_US
    )
    while (change := rules.nextTransition(moment)) is not None:
        changes += parse_transitions(change.toString())
        if changes[-1].moment_us >= _LAST_US:
            break
        moment = change.getInstant()
    return changes


def parse_transitions(text: str) -> list[Transition]:
    """Parse the result of `toString` of a transition or of a list of transitions."""
    changes = []
    for wall, old_offset, new_offset in _TRANSITION.findall(text):
        before_us, after_us = _offset_us(old_offset), _offset_us(new_offset)
        shown = datetime.fromisoformat(wall).replace(tzinfo=UTC)
        wall_us = (shown - _EPOCH) // timedelta(microseconds=1)
        changes.append(Transition(wall_us - before_us, before_us, after_us))
    return changes


def _offset_us(text: str) -> int:
    if text == "Z":
        return 0
    hours, minutes, seconds = (int(part) for part in f"{text[1:]}:00".split(":")[:3])
    total = (hours * 60 + minutes) * 60 + seconds
    return (-total if text[0] == "-" else total) * _SECOND_US


def handed_over(zone: Zone, changes: list[Transition]) -> ZoneText:
    """Return Java's transitions up to the last difference from Python's."""
    last_us = _last_difference_us(zone, changes)
    if last_us is None:
        return ZoneText(zone.id)
    end = bisect_right(changes, last_us, key=lambda change: change.moment_us)
    if end < len(changes):
        return ZoneText(zone.id, changes[: end + 1])
    # Python has changes after Java's last change; Python's rules apply again after the last
    # difference.
    offset_us = changes[-1].after_us
    over = Transition(last_us + _STEP_US, offset_us, offset_us)
    return ZoneText(zone.id, [*changes, over], is_endless=over.moment_us >= _LAST_US)


def _last_difference_us(zone: Zone, changes: list[Transition]) -> int | None:
    """Return the last known moment of different clocks, None without a difference."""
    if not changes:
        return None
    moments = [change.moment_us for change in changes]
    looked_at = {*range(_FIRST_US, _LAST_US, _STEP_US), *moments, *(at - 1 for at in moments)}
    for moment in sorted(looked_at, reverse=True):
        place = bisect_right(moments, moment)
        offset_us = changes[place - 1].after_us if place else changes[0].before_us
        if moment < _LAST_US and zone.offset_at(moment) != offset_us:
            return int(moment)
    return None
