"""What users write for positions: `earliest`, `latest`, times, JSON of an offset per bucket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from streamhouse.storage_service.errors import InvalidRequestError

__all__ = [
    "EARLIEST",
    "LATEST",
    "StartingPosition",
    "parse_ending_offsets",
    "parse_starting_offsets",
    "parse_timestamp_us",
]

EARLIEST: Final = -2
"""In a mapping of offsets: the oldest row there is. The number is Kafka's."""

LATEST: Final = -1
"""In a mapping of offsets: the end at the time of planning."""

Kind = Literal["full", "earliest", "latest", "timestamp", "offsets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPosition:
    """Where a read starts; `offsets` may hold `EARLIEST` and `LATEST` and lack buckets."""

    kind: Kind
    offsets: Mapping[int, int] = field(default_factory=dict)
    timestamp_us: int | None = None


def parse_starting_offsets(text: str, *, name: str) -> StartingPosition:
    """Read option `startingOffsets`."""
    lowered = text.strip().lower()
    if lowered == "full":
        return StartingPosition(kind="full")
    if lowered == "earliest":
        return StartingPosition(kind="earliest")
    if lowered == "latest":
        return StartingPosition(kind="latest")
    if lowered.startswith("{"):
        return StartingPosition(kind="offsets", offsets=_offsets(text, name=name))
    try:
        return StartingPosition(kind="timestamp", timestamp_us=parse_timestamp_us(text, name=name))
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{name} = '{text}' must be full, earliest, latest, a time, or JSON like"
            ' {"0": 12, "1": "earliest"}'
        ) from error


def parse_ending_offsets(text: str, *, name: str) -> dict[int, int]:
    """Read option `endingOffsets`; buckets that are absent end at the latest offset."""
    if text.strip().lower() == "latest":
        return {}
    if not text.strip().startswith("{"):
        raise InvalidRequestError(
            f'{name} = \'{text}\' must be latest or JSON like {{"0": 99, "1": "latest"}}'
        )
    offsets = _offsets(text, name=name)
    if EARLIEST in offsets.values():
        raise InvalidRequestError(f"{name} = '{text}': a read cannot end at 'earliest'")
    return offsets


def parse_timestamp_us(text: str, *, name: str) -> int:
    """Read ISO-8601 (UTC unless it names a zone) or epoch milliseconds as epoch microseconds."""
    text = text.strip()
    if text.lstrip("-").isdigit():
        return int(text) * 1_000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} = '{text}' is not a time: write ISO-8601 like"
            " '2026-01-31T12:00:00Z', or milliseconds since 1970"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _offsets(text: str, *, name: str) -> dict[int, int]:
    try:
        value = json.loads(text)
        return {_bucket(bucket): _offset(offset) for bucket, offset in value.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidRequestError(
            f"{name} = '{text[:200]}' must be JSON from bucket to offset, like"
            ' {"0": 12, "1": "earliest"}'
        ) from error


def _bucket(text: str) -> int:
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


def _offset(value: Any) -> int:
    named = {"earliest": EARLIEST, "latest": LATEST}
    if isinstance(value, str):
        value = named.get(value.lower(), value)
    if not isinstance(value, int) or isinstance(value, bool) or value < EARLIEST:
        raise ValueError(value)
    return value
