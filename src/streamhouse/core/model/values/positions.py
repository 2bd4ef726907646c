"""Positions as written by users: `earliest`, `latest`, times, or an offset for each bucket.

Offsets are a dict, with buckets as numbers or texts, or the dict as JSON text. This module reads
both the options of reads and the starts of subscriptions, so both accept the same values. Offsets
may name their table: `{"table_id": 7, "offsets": {"0": 12}}`, or a dict of `Offset`. Plain numbers
are offsets of the current table with the name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.offsets import Offset, table_of_offsets
from streamhouse.core.model.values.calendar import DAY_US, days_of
from streamhouse.core.model.values.numbers import whole_number
from streamhouse.core.model.values.zone import parse_zone

__all__ = [
    "EARLIEST",
    "LATEST",
    "StartingPosition",
    "from_json_text",
    "moment_of_version",
    "moment_us",
    "parse_ending_offsets",
    "parse_starting_offsets",
    "parse_timestamp_us",
]

EARLIEST: Final = -2
"""In a mapping of offsets: the oldest row of the bucket. The number is Kafka's."""

LATEST: Final = -1
"""In a mapping of offsets: the end at the time of planning."""

_TABLE_ID: Final = "table_id"
_OFFSETS: Final = "offsets"
_NAMED: Final = {"earliest": EARLIEST, "latest": LATEST}
_WORDS_OF_KAFKA: Final = {str(number): word for word, number in _NAMED.items()}
_BUCKET: Final = re.compile(r"[0-9]{1,10}")
_MICROSECOND: Final = timedelta(microseconds=1)
_YEAR_LAST: Final = 2262
# Numbers below it are seconds or milliseconds: no row was written in the first weeks of 1970.
_MICROSECONDS_MIN: Final = 10**13
_END_US: Final = days_of(_YEAR_LAST + 1, 1, 1) * DAY_US

Kind = Literal["full", "earliest", "latest", "timestamp", "offsets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPosition:
    """The start of a read; `offsets` may hold `EARLIEST` and `LATEST` and lack buckets.

    The offsets have the id of their table if the user named the table.
    """

    kind: Kind
    offsets: Mapping[int, int] = field(default_factory=dict)
    timestamp_us: int | None = None


def parse_starting_offsets(
    value: object, *, name: str, zone: str = "UTC", words: str = "full, earliest, latest"
) -> StartingPosition:
    """Read the start of a read; a time without a zone is in `zone`. An error lists `words`."""
    value = from_json_text(value, name=name)
    if isinstance(value, Mapping):
        return StartingPosition(kind="offsets", offsets=_offsets(value, name=name))
    if isinstance(value, datetime):
        return StartingPosition(kind="timestamp", timestamp_us=moment_us(value, name=name))
    text = value.strip() if isinstance(value, str) else ""
    lowered = text.lower()
    if (word := _WORDS_OF_KAFKA.get(str(value).strip())) is not None:
        raise InvalidRequestError(f"{name} = {value!r} is Kafka's number: write '{word}'")
    if lowered == "full":
        return StartingPosition(kind="full")
    if lowered == "earliest":
        return StartingPosition(kind="earliest")
    if lowered == "latest":
        return StartingPosition(kind="latest")
    if not lowered[:1].isdigit() and not lowered.startswith("-"):
        raise InvalidRequestError(
            f"{name} must be {words}, a time, or bucket -> offset like"
            f' {{"0": 12, "1": "earliest"}}, not {value!r:.200}'
        )
    timestamp_us = parse_timestamp_us(text, name=name, zone=zone)
    return StartingPosition(kind="timestamp", timestamp_us=timestamp_us)


def parse_ending_offsets(text: str, *, name: str) -> dict[int, int]:
    """Read option `endingOffsets`; a missing bucket ends at the latest offset."""
    if text.strip().lower() == "latest":
        return {}
    value = from_json_text(text, name=name)
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{name} must be latest or bucket -> offset like"
            f' {{"0": 99, "1": "latest"}}, not {text!r:.200}'
        )
    offsets = _offsets(value, name=name)
    if EARLIEST in offsets.values():
        raise InvalidRequestError(f"{name} = '{text[:200]}': a read cannot end at 'earliest'")
    return offsets


def from_json_text(value: object, *, name: str) -> object:
    """Return the value of a text with a JSON object; any other value unchanged."""
    if not isinstance(value, str) or not value.strip().startswith("{"):
        return value

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Python would use the last value: rows would be skipped, or read twice.
        members: dict[str, Any] = {}
        for key, member in pairs:
            if key in members:
                raise InvalidRequestError(f"{name} = '{value[:200]}' names '{key[:80]}' twice")
            members[key] = member
        return members

    try:
        return json.loads(value, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{name} = '{value[:200]}' must be JSON from bucket to offset, like"
            ' {"0": 12, "1": "earliest"}'
        ) from error


def parse_timestamp_us(text: str, *, name: str, zone: str = "UTC") -> int:
    """Read ISO-8601, in `zone` without a zone in the text, or a number, as microseconds since 1970.

    A number of 11 to 13 digits is milliseconds, of 14 to 16 digits microseconds: both cover the
    years 1970 to 2286. Fewer digits (seconds) and more digits (nanoseconds) are refused, but 0 is
    before all rows.
    """
    text = text.strip()
    if re.fullmatch(r"[+-]?[0-9]+", text):
        timestamp_us = _of_number(text, name=name)
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise InvalidRequestError(
                f"{name} = '{text[:200]}' is not a time: write ISO-8601 like"
                " '2026-01-31T12:00:00Z', or milliseconds or microseconds since 1970"
            ) from error
        wall = (moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // _MICROSECOND
        if (offset := moment.utcoffset()) is not None:
            timestamp_us = wall - offset // _MICROSECOND
        else:
            timestamp_us = parse_zone(zone, name="the time zone").moment_of(wall)
    if timestamp_us != 0 and not _MICROSECONDS_MIN <= timestamp_us < _END_US:
        raise InvalidRequestError(
            f"{name} = '{text[:200]}' is a time before May 1970 or after {_YEAR_LAST}, when no row"
            " was written: check the unit and the sign"
        )
    return timestamp_us


def moment_us(value: int | datetime, *, name: str) -> int:
    """Return a time in microseconds since 1970; 0 is before all rows.

    Raises `InvalidRequestError` for seconds, milliseconds and nanoseconds, and for a time without a
    zone.
    """
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidRequestError(
                f"{name} = {value!r} has no time zone: add one, as in tzinfo=datetime.UTC"
            )
        return parse_timestamp_us(value.isoformat(), name=name)
    number = whole_number(value)
    if number is None or (number != 0 and not _MICROSECONDS_MIN <= number < _END_US):
        raise InvalidRequestError(
            f"{name} = {value!r:.80} is no time in microseconds since 1970, which has 14 to 16"
            " digits: multiply seconds by 1,000,000 and milliseconds by 1,000, and divide"
            " nanoseconds by 1,000"
        )
    return number


def moment_of_version(version: int) -> int:
    """Return the time of a commit version as `moment_us` takes it.

    A version is any number that a commit may have, as 1 for the beginning: no commit was earlier
    than the least time, or is later than the last.
    """
    return 0 if version < _MICROSECONDS_MIN else min(version, _END_US - 1)


def _of_number(text: str, *, name: str) -> int:
    digits = len(text.lstrip("+-").lstrip("0"))
    if digits == 0 or 11 <= digits <= 13:
        return int(text) * 1_000
    if 14 <= digits <= 16:
        return int(text)
    hint = "multiply seconds by 1000" if digits < 11 else "divide nanoseconds by 1000"
    raise InvalidRequestError(
        f"{name} = '{text[:200]}' has {digits} digits, so it is neither milliseconds since 1970"
        f" (11 to 13 digits) nor microseconds (14 to 16): {hint}, or write ISO-8601 like"
        " '2026-01-31T12:00:00Z'"
    )


def _offsets(value: Mapping[Any, Any], *, name: str) -> dict[int, int]:
    table_id = table_of_offsets(value.values(), what=name)
    if value.keys() == {_TABLE_ID, _OFFSETS}:
        table_id = _whole(value[_TABLE_ID], rule=f"{name}: table_id is a whole number")
        value = value[_OFFSETS]
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name}: offsets are bucket -> offset, not {value!r:.80}")
    offsets: dict[int, int] = {}
    for bucket, offset in value.items():
        number = int(bucket) if isinstance(bucket, str) and _BUCKET.fullmatch(bucket) else bucket
        at = _whole(number, rule=f"{name}: a bucket is a whole number from 0 on")
        if at in offsets:
            raise InvalidRequestError(f"{name} names bucket {at} twice, also as {bucket!r:.80}")
        if isinstance(offset, str):
            offset = _NAMED.get(offset.lower(), offset)
        rule = f"{name}: the offset of bucket {at} is a whole number, 'earliest' or 'latest'"
        number = _whole(offset, rule=rule, least=EARLIEST)
        offsets[at] = number if table_id is None or number < 0 else Offset(number, table_id)
    return offsets


def _whole(value: Any, *, rule: str, least: int = 0) -> int:
    number = whole_number(value, least=least)
    if number is None:
        raise InvalidRequestError(f"{rule}, not {value!r:.80}")
    return number
