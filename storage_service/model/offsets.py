"""Positions in a table: ranges of offsets, positions of buckets. Every end is exclusive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = [
    "BucketPositions",
    "OffsetRange",
    "buckets_to_json",
    "further",
    "offsets_from_json",
    "truncated_offsets",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRange:
    """Offsets `start` (inclusive) to `end` (exclusive) of one bucket."""

    bucket: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not an offset range: [{self.start}, {self.end})")

    @property
    def row_count(self) -> int:
        """Rows in the range; offsets are dense."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPositions:
    """Where one bucket stands; no other offset is above the high watermark.

    Rows below `truncated_offset` were overwritten: they are no rows of the table any more, in
    whichever tier they still lie. The log starts at it, or above. Rows below `expired_offset`, all
    of them in the lake, have reached `table.datalake.ttl`: no read of the table finds them, whether
    a lake table or the log still has them or not.
    """

    log_start_offset: int
    high_watermark: int
    tiered_offset: int
    truncated_offset: int = 0
    expired_offset: int = 0

    @property
    def first_offset(self) -> int:
        """Where the bucket's rows begin."""
        return max(self.truncated_offset, self.expired_offset)

    def to_json(self) -> dict[str, int]:
        """Return the JSON form."""
        return {
            "log_start_offset": self.log_start_offset,
            "high_watermark": self.high_watermark,
            "tiered_offset": self.tiered_offset,
            "truncated_offset": self.truncated_offset,
            "expired_offset": self.expired_offset,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BucketPositions:
        """Read the JSON form."""
        return cls(
            log_start_offset=int(value["log_start_offset"]),
            high_watermark=int(value["high_watermark"]),
            tiered_offset=int(value["tiered_offset"]),
            truncated_offset=int(value.get("truncated_offset", 0)),
            expired_offset=int(value.get("expired_offset", 0)),
        )


def truncated_offsets(positions: Mapping[int, BucketPositions]) -> dict[int, int]:
    """Return where the rows begin of buckets that an overwrite has cut."""
    return {b: at.truncated_offset for b, at in positions.items() if at.truncated_offset}


def further(old: Mapping[int, int], new: Mapping[int, int]) -> dict[int, int]:
    """Return of each bucket that either names the offset that is further."""
    return {b: max(old.get(b, 0), new.get(b, 0)) for b in sorted({*old, *new})}


def buckets_to_json(values: Mapping[int, _T]) -> dict[str, _T]:
    """Return bucket -> value as JSON has it, where every key is text."""
    return {str(bucket): value for bucket, value in sorted(values.items())}


def offsets_from_json(value: Mapping[str, Any]) -> dict[int, int]:
    """Read bucket -> offset from its JSON form."""
    return {int(bucket): int(offset) for bucket, offset in value.items()}
