"""Which offsets a lake table covers: one rule, for tiering and for the guard of the REST catalog.

Every round writes the covered offsets into its snapshot. A snapshot of another engine (compaction)
carries no offsets and covers the same offsets as its newest ancestor with offsets.

Every round also writes the offsets, and the sequence number of its snapshot, into the table
properties of the same commit. The table properties answer when an engine has expired all snapshots
with offsets. A table rolled back to an earlier snapshot has only ancestors with lower sequence
numbers, so its table properties do not count.

Offsets of another owner do not count: the table was adopted by another service, or is not yet
adopted by this service.

Where lake and log have different histories, `LakeDivergence` counts the rows of each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streamhouse.core.model.lake.facts import (
    EXPIRED_AT_PROPERTY,
    EXPIRED_OFFSETS_PROPERTY,
    LOG_FINGERPRINTS_PROPERTY,
    TIERED_OFFSETS_PROPERTY,
    TIERED_SEQUENCE_PROPERTY,
    TIERING_EPOCH_PROPERTY,
    TRUNCATED_OFFSETS_PROPERTY,
    fingerprints_from_property,
    fingerprints_to_property,
    tiered_offsets_from_property,
    tiered_offsets_to_property,
)
from streamhouse.core.model.offsets import buckets_to_json

__all__ = [
    "BucketDivergence",
    "CoveredOffsets",
    "LakeDivergence",
    "SnapshotFacts",
    "begin_properties",
    "covered_offsets",
    "offsets_of_properties",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredOffsets:
    """The end offset per bucket that a snapshot covers, and the epoch of the round behind it.

    Rows below `truncated_offsets` were overwritten and removed; rows below `expired_offsets` have
    reached their time to live, and the newest of them was written at `expired_at_us`.
    `fingerprints` are the fingerprints of the source log at the tiered offsets; a snapshot of an
    earlier release has none.
    """

    tiered_offsets: Mapping[int, int]
    epoch: int
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_at_us: int = 0
    fingerprints: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form of the fields which identify the history."""
        return {
            "epoch": self.epoch,
            "tiered_offsets": buckets_to_json(self.tiered_offsets),
            "fingerprints": buckets_to_json(self.fingerprints),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """The properties and the sequence number of one snapshot."""

    properties: Mapping[str, str]
    sequence_number: int


def covered_offsets(
    ancestors: Iterable[SnapshotFacts],
    table_properties: Mapping[str, str],
    *,
    is_owner: Callable[[Mapping[str, str]], bool],
) -> CoveredOffsets | None:
    """Return the offsets covered by a table, or None if it has no round of its owner.

    `ancestors` are the current snapshot and its ancestors, newest first, without expired snapshots.
    `is_owner` decides by the properties of a snapshot or table whether its owner is the right one.
    """
    oldest: SnapshotFacts | None = None
    for snapshot in ancestors:
        covered = offsets_of_properties(snapshot.properties)
        if covered is not None:
            return covered if is_owner(snapshot.properties) else None
        oldest = snapshot
    sequence_number = int(table_properties.get(TIERED_SEQUENCE_PROPERTY, "0"))
    if oldest is None or oldest.sequence_number < sequence_number:
        return None
    return offsets_of_properties(table_properties) if is_owner(table_properties) else None


def offsets_of_properties(properties: Mapping[str, str]) -> CoveredOffsets | None:
    """Return the offsets in the properties of a round; None for properties of any other engine."""
    text = properties.get(TIERED_OFFSETS_PROPERTY)
    if text is None:
        return None
    try:
        return CoveredOffsets(
            tiered_offsets=tiered_offsets_from_property(text),
            epoch=int(properties.get(TIERING_EPOCH_PROPERTY, "0")),
            truncated_offsets=tiered_offsets_from_property(
                properties.get(TRUNCATED_OFFSETS_PROPERTY, "{}")
            ),
            expired_offsets=tiered_offsets_from_property(
                properties.get(EXPIRED_OFFSETS_PROPERTY, "{}")
            ),
            expired_at_us=int(properties.get(EXPIRED_AT_PROPERTY, "0")),
            fingerprints=fingerprints_from_property(
                properties.get(LOG_FINGERPRINTS_PROPERTY, "{}")
            ),
        )
    except (ValueError, TypeError, AttributeError):
        # Any engine may write properties; a round never writes malformed properties.
        return None


def begin_properties(covered: CoveredOffsets) -> dict[str, str]:
    """Return the properties of a snapshot with truncated and expired offsets and fingerprints.

    Empty offsets have no property. The fingerprints are always present, so that fingerprints of an
    earlier snapshot never stay.
    """
    offsets_by_property = {
        TRUNCATED_OFFSETS_PROPERTY: covered.truncated_offsets,
        EXPIRED_OFFSETS_PROPERTY: covered.expired_offsets,
    }
    properties = {
        key: tiered_offsets_to_property(offsets)
        for key, offsets in offsets_by_property.items()
        if offsets
    }
    if covered.expired_at_us:
        properties[EXPIRED_AT_PROPERTY] = str(covered.expired_at_us)
    return properties | {LOG_FINGERPRINTS_PROPERTY: fingerprints_to_property(covered.fingerprints)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDivergence:
    """One bucket of a lake and a log with equal rows below `common_offset`, judged by fingerprints.

    From `common_offset` on, each side has different rows, up to its end offset.
    """

    bucket: int
    common_offset: int
    log_start_offset: int
    log_end_offset: int
    lake_end_offset: int

    @property
    def log_rows(self) -> int:
        """The number of offsets from the common offset to the end of the log."""
        return self.log_end_offset - self.common_offset

    @property
    def lake_rows(self) -> int:
        """The number of offsets from the common offset to the end of the lake."""
        return self.lake_end_offset - self.common_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeDivergence:
    """Rows kept and rows removed when the lake is adopted in place of the log.

    The files of the log move to the folder `set_aside` of the data directory.
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
