"""A table at one instant, a tiering worker's claim on the table, and the worker's report.

Plans and rounds start from a `TableState`; a round ends with a `TieringReport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from streamhouse.core.model.lake.facts import (
    LakeDebt,
    LakeRole,
    LakeState,
    SideLakeState,
)
from streamhouse.core.model.offsets import (
    BucketPositions,
    buckets_to_json,
    offsets_from_json,
    truncated_offsets,
)
from streamhouse.core.model.table import TableInfo

__all__ = [
    "EMBEDDED_WORKER_ID",
    "BucketSizes",
    "TableSizes",
    "TableState",
    "TieringAssignment",
    "TieringReport",
]

EMBEDDED_WORKER_ID: Final = "embedded"
"""The name of the worker inside of the service, which dies with the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """One consistent cut of a table: all buckets of an append are in the cut, or none.

    `positions` has every bucket; `lake` is the lake snapshot of the tiered offsets. With
    `may_lose_rows` the service may lose rows of this cut and give their offsets to new rows.
    `truncated_at_us` is the time of the last overwrite of a log table, 0 without one.
    """

    table: TableInfo
    positions: Mapping[int, BucketPositions]
    lake: LakeState
    may_lose_rows: bool = False
    truncated_at_us: int = 0

    def in_version(self, schema_id: int) -> TableState:
        """Return the same cut with the table in this version of its schema."""
        return replace(self, table=self.table.in_version(schema_id))

    def reached_offsets(self) -> dict[int, int]:
        """Return bucket -> the end offset of the rows present in every layout of the table.

        Rows overwritten before tiering, and expired rows, are missing from the lake and still count
        as reached.
        """
        reached = {bucket: at.tiered_offset for bucket, at in self.positions.items()}
        if self.table.properties().has_batch_layout:
            batch = {} if self.lake.batch is None else self.lake.batch.tiered_offsets
            reached = {bucket: min(end, batch.get(bucket, 0)) for bucket, end in reached.items()}
        return {
            bucket: max(end, self.positions[bucket].first_offset) for bucket, end in reached.items()
        }

    @property
    def has_overwritten_rows(self) -> bool:
        """Whether a lake layout of the table still has overwritten rows."""
        current_offsets = truncated_offsets(self.positions)
        layouts = (self.lake if self.lake.snapshot_id is not None else None, self.lake.batch)
        return any(
            lake is not None and dict(lake.truncated_offsets) != current_offsets for lake in layouts
        )

    def in_batch_layout(self) -> TableState | None:
        """Return the same cut with the snapshot and the offsets of the batch layout.

        None while the layout has no snapshot, or lacks rows which are gone from the log: the layout
        is younger than these rows, and later rounds add them.
        """
        batch = self.lake.batch
        if batch is None:
            return None
        ends = batch.tiered_offsets
        if any(
            max(ends[b], at.first_offset) < at.log_start_offset for b, at in self.positions.items()
        ):
            return None
        return replace(
            self,
            positions={b: replace(at, tiered_offset=ends[b]) for b, at in self.positions.items()},
            lake=replace(
                self.lake,
                role=LakeRole.BATCH,
                snapshot_id=batch.snapshot_id,
                table_uuid=batch.table_uuid,
                tiered_offsets=ends,
                tiered_at_us=self.lake.batch_tiered_at_us,
                truncated_offsets=batch.truncated_offsets,
                fingerprints=batch.fingerprints,
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "table": self.table.to_json(),
            "positions": {str(b): p.to_json() for b, p in sorted(self.positions.items())},
            "lake": self.lake.to_json(),
            **({"may_lose_rows": True} if self.may_lose_rows else {}),
            **({"truncated_at_us": self.truncated_at_us} if self.truncated_at_us else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableState:
        """Read the JSON form."""
        table = TableInfo.from_json(value["table"])
        return cls(
            table=table,
            positions={
                int(bucket): BucketPositions.from_json(at, table_id=table.table_id)
                for bucket, at in value["positions"].items()
            },
            lake=LakeState.from_json(value["lake"]),
            may_lose_rows=bool(value.get("may_lose_rows", False)),
            truncated_at_us=int(value.get("truncated_at_us", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringAssignment:
    """One tiering round granted to one worker.

    The worker owns the table's lake until the round completes, fails, or misses heartbeats for
    `lease_ms`; afterwards `epoch` is fenced. The round tiers rows up to the cut `state`. Without
    `is_batch_due` a batch layout is fresh enough to wait for a later round.
    """

    epoch: int
    lease_ms: int
    state: TableState
    is_batch_due: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "epoch": self.epoch,
            "lease_ms": self.lease_ms,
            "state": self.state.to_json(),
            "is_batch_due": self.is_batch_due,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TieringAssignment:
        """Read the JSON form."""
        return cls(
            epoch=int(value["epoch"]),
            lease_ms=int(value["lease_ms"]),
            state=TableState.from_json(value["state"]),
            is_batch_due=bool(value.get("is_batch_due", True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringReport:
    """A committed lake snapshot, as reported by the worker of the claim `epoch`.

    Lake tables: `snapshot_id`, `table_uuid` and `tiered_offsets` belong to the lake table of the
    rows. `changelog` is the snapshot of the full history, `batch` the snapshot of the batch layout.
    A None in `changelog`, `batch` or `truncated_offsets` leaves the service's state unchanged.

    Rows: The snapshot has no rows below `truncated_offsets`, which were overwritten. Reads leave
    out rows below `expired_offsets`; an expired offset never goes back. `fingerprints` are the
    fingerprints of the source log in the snapshot.

    Claim: With `keep_lease` the claim goes on until a report without `keep_lease`. At
    `maintenance_due_us` the table needs a round even without new rows. `debt` describes the files
    of the lake table, for people.
    """

    table_id: int
    epoch: int
    snapshot_id: int
    table_uuid: str
    tiered_offsets: Mapping[int, int]
    changelog: SideLakeState | None = None
    batch: SideLakeState | None = None
    truncated_offsets: Mapping[int, int] | None = None
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_at_us: int = 0
    fingerprints: Mapping[int, str] = field(default_factory=dict)
    debt: LakeDebt | None = None
    keep_lease: bool = False
    maintenance_due_us: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; a snapshot id is a string because it exceeds 2**53."""
        return {
            "table_id": self.table_id,
            "epoch": self.epoch,
            "lake_snapshot_id": str(self.snapshot_id),
            "lake_table_uuid": self.table_uuid,
            "tiered_offsets": buckets_to_json(self.tiered_offsets),
            "changelog": None if self.changelog is None else self.changelog.to_json(),
            "batch": None if self.batch is None else self.batch.to_json(),
            "keep_lease": self.keep_lease,
            "debt": None if self.debt is None else self.debt.to_json(),
            "truncated_offsets": None
            if self.truncated_offsets is None
            else buckets_to_json(self.truncated_offsets),
            "maintenance_due_us": self.maintenance_due_us,
            "expired_offsets": buckets_to_json(self.expired_offsets),
            "expired_at_us": self.expired_at_us,
            "fingerprints": buckets_to_json(self.fingerprints),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TieringReport:
        """Read the JSON form."""
        changelog, batch, debt = (value.get(key) for key in ("changelog", "batch", "debt"))
        truncated = value.get("truncated_offsets")
        return cls(
            table_id=int(value["table_id"]),
            epoch=int(value["epoch"]),
            snapshot_id=int(value["lake_snapshot_id"]),
            table_uuid=str(value["lake_table_uuid"]),
            tiered_offsets=offsets_from_json(value["tiered_offsets"]),
            changelog=None if changelog is None else SideLakeState.from_json(changelog),
            batch=None if batch is None else SideLakeState.from_json(batch),
            truncated_offsets=None if truncated is None else offsets_from_json(truncated),
            expired_offsets=offsets_from_json(value.get("expired_offsets", {})),
            expired_at_us=int(value.get("expired_at_us", 0)),
            fingerprints={
                int(b): str(fingerprint) for b, fingerprint in value.get("fingerprints", {}).items()
            },
            debt=None if debt is None else LakeDebt.from_json(debt),
            keep_lease=bool(value.get("keep_lease", False)),
            maintenance_due_us=value.get("maintenance_due_us"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSizes:
    """The bytes of one bucket: its log, the tiered part of the log, and its rows by key.

    `tiered_log_bytes` is an estimate by the share of tiered rows, as if all rows were equally
    large.
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
        """The bytes on the service's disk."""
        return sum(sizes.log_bytes + sizes.key_bytes for sizes in self.buckets.values())

    @property
    def doubled_bytes(self) -> int:
        """The bytes of the log which the lake has, too."""
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
