"""Positions in a table: ranges of offsets, positions of buckets. Every end is exclusive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BucketPositions", "OffsetRange"]


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
    """Where one bucket stands; neither other offset is above the high watermark."""

    log_start_offset: int
    high_watermark: int
    tiered_offset: int

    def to_json(self) -> dict[str, int]:
        """Return the JSON form."""
        return {
            "log_start_offset": self.log_start_offset,
            "high_watermark": self.high_watermark,
            "tiered_offset": self.tiered_offset,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BucketPositions:
        """Read the JSON form."""
        return cls(
            log_start_offset=int(value["log_start_offset"]),
            high_watermark=int(value["high_watermark"]),
            tiered_offset=int(value["tiered_offset"]),
        )
