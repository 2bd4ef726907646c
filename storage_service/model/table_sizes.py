"""How many bytes the service keeps of a table, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BucketSizes", "TableSizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizes:
    """One bucket: its log, the part of it that the lake has too, its rows by key.

    `tiered_log_bytes` is estimated by the share of the log's rows; a row is as large as the others.
    """

    log_bytes: int
    tiered_log_bytes: int
    key_bytes: int = 0

    @classmethod
    def of_log(
        cls, log_bytes: int, *, start: int, tiered: int, end: int, key_bytes: int = 0
    ) -> BucketSizes:
        """Return the sizes of a log with the offsets [start, end), tiered up to `tiered`."""
        rows, tiered_rows = end - start, max(0, min(tiered, end) - start)
        return cls(
            log_bytes=log_bytes,
            tiered_log_bytes=log_bytes * tiered_rows // rows if rows else 0,
            key_bytes=key_bytes,
        )


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The sizes of all buckets."""

    buckets: Mapping[int, BucketSizes]

    @property
    def hot_bytes(self) -> int:
        """What the service's disk holds."""
        return sum(sizes.log_bytes + sizes.key_bytes for sizes in self.buckets.values())

    @property
    def doubled_bytes(self) -> int:
        """What of the log is in the lake too."""
        return sum(sizes.tiered_log_bytes for sizes in self.buckets.values())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "buckets": {
                str(bucket): {
                    "log_bytes": sizes.log_bytes,
                    "tiered_log_bytes": sizes.tiered_log_bytes,
                    "key_bytes": sizes.key_bytes,
                }
                for bucket, sizes in sorted(self.buckets.items())
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableSizes:
        """Read the JSON form."""
        return cls(
            {
                int(bucket): BucketSizes(
                    log_bytes=int(sizes["log_bytes"]),
                    tiered_log_bytes=int(sizes["tiered_log_bytes"]),
                    key_bytes=int(sizes["key_bytes"]),
                )
                for bucket, sizes in value["buckets"].items()
            }
        )
