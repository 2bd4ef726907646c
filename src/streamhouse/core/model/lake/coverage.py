"""Which offsets a lake table covers: one rule, for tiering and for the guard of the REST catalog.

A snapshot of another engine (compaction) carries no offsets; it covers what its newest ancestor
that has them covers. Every round also sets them as table properties in the same commit, with the
sequence number of its snapshot: they answer when an engine has expired all the snapshots that
carried them. A table that was rolled back to before that snapshot has ancestors older than it, and
is not taken for one that covers its rows.

Offsets of another owner are none: the table has been adopted by another service, or not yet by
this one.

Where lake and log are of different histories, `LakeDivergence` says how far each has rows of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streamhouse.core.model.lake.facts import (
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
    "offsets_said_by",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredOffsets:
    """The end offset per bucket that a snapshot covers, and the epoch that wrote it.

    Rows below `truncated_offsets`, of buckets that have one, were overwritten and taken out; those
    below `expired_offsets` have reached their time to live. `fingerprints` are those of the log
    that they came from, at the tiered offsets; an earlier release's snapshot has none.
    """

    tiered_offsets: Mapping[int, int]
    epoch: int
    truncated_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    fingerprints: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form of what says which history it is of."""
        return {
            "epoch": self.epoch,
            "tiered_offsets": buckets_to_json(self.tiered_offsets),
            "fingerprints": buckets_to_json(self.fingerprints),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """Of a snapshot, what says which offsets it covers."""

    properties: Mapping[str, str]
    sequence_number: int


def covered_offsets(
    ancestors: Iterable[SnapshotFacts],
    table_properties: Mapping[str, str],
    *,
    is_owner: Callable[[Mapping[str, str]], bool],
) -> CoveredOffsets | None:
    """Return what a table covers, or None when no round of its owner is in it.

    `ancestors` are the current snapshot and those it comes from, newest first, as far as they
    still exist. `is_owner` tells by the properties of a snapshot, or of the table, whose they are.
    """
    oldest: SnapshotFacts | None = None
    for snapshot in ancestors:
        found = offsets_said_by(snapshot.properties)
        if found is not None:
            return found if is_owner(snapshot.properties) else None
        oldest = snapshot
    sequence_number = int(table_properties.get(TIERED_SEQUENCE_PROPERTY, "0"))
    if oldest is None or oldest.sequence_number < sequence_number:
        return None
    return offsets_said_by(table_properties) if is_owner(table_properties) else None


def offsets_said_by(properties: Mapping[str, str]) -> CoveredOffsets | None:
    """Return the offsets that a round wrote there; None for a snapshot of anybody else."""
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
            fingerprints=fingerprints_from_property(
                properties.get(LOG_FINGERPRINTS_PROPERTY, "{}")
            ),
        )
    except (ValueError, TypeError, AttributeError):
        # Any engine may write properties; no round writes such ones.
        return None


def begin_properties(covered: CoveredOffsets) -> dict[str, str]:
    """Return what a snapshot says of where its rows begin: nothing while that is at offset 0.

    And always of the log that they came from: what another one said of it must not stay.
    """
    said = {
        TRUNCATED_OFFSETS_PROPERTY: covered.truncated_offsets,
        EXPIRED_OFFSETS_PROPERTY: covered.expired_offsets,
    }
    found = {key: tiered_offsets_to_property(offsets) for key, offsets in said.items() if offsets}
    return found | {LOG_FINGERPRINTS_PROPERTY: fingerprints_to_property(covered.fingerprints)}


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
