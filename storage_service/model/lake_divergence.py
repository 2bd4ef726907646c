"""How the history of a table's lake differs from that of its log, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BucketDivergence", "LakeDivergence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDivergence:
    """Lake and log have the same rows below `common_offset`, as far as fingerprints tell.

    From there on each has rows of its own, up to its end.
    """

    bucket: int
    common_offset: int
    log_start_offset: int
    log_end_offset: int
    lake_end_offset: int

    @property
    def log_rows(self) -> int:
        """How many offsets from the common one on only the log has, or has other rows at."""
        return self.log_end_offset - self.common_offset

    @property
    def lake_rows(self) -> int:
        """How many offsets from the common one on the lake has."""
        return self.lake_end_offset - self.common_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeDivergence:
    """What adopting the lake in place of the log keeps, and what it takes out of the table.

    The files of the log stay, in the folder `set_aside` of the data directory.
    """

    table: str
    why: str
    set_aside: str
    buckets: tuple[BucketDivergence, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "table": self.table,
            "why": self.why,
            "set_aside": self.set_aside,
            "buckets": [asdict(bucket) for bucket in self.buckets],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LakeDivergence:
        """Read the JSON form."""
        return cls(
            table=str(value["table"]),
            why=str(value["why"]),
            set_aside=str(value["set_aside"]),
            buckets=tuple(BucketDivergence(**bucket) for bucket in value["buckets"]),
        )
