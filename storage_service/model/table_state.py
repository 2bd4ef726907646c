"""A table at one instant, and a tiering worker's claim on it: what plans and rounds start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from streamhouse.storage_service.model.lake import LakeRole, LakeState
from streamhouse.storage_service.model.offsets import BucketPositions, truncated_offsets
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["EMBEDDED_WORKER_ID", "TableState", "TieringAssignment"]

EMBEDDED_WORKER_ID: Final = "embedded"
"""Name of the worker inside the service: when the service has died, so has that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """One consistent cut of a table: all of an append's buckets are in it, or none.

    `positions` has every bucket; `lake` is the lake snapshot those tiered offsets belong to.
    """

    table: TableInfo
    positions: Mapping[int, BucketPositions]
    lake: LakeState

    def in_version(self, schema_id: int) -> TableState:
        """Return the same cut with the table in this version of its schema."""
        return replace(self, table=self.table.in_version(schema_id))

    def reached_offsets(self) -> dict[int, int]:
        """Return bucket -> the end offset of the rows that every layout of the table has.

        Rows that were overwritten before they were tiered are no lake's to have, and no layout
        needs rows that have expired.
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
        """Whether the lake, in any of its layouts, has rows that were overwritten."""
        wanted = truncated_offsets(self.positions)
        layouts = (self.lake if self.lake.snapshot_id is not None else None, self.lake.batch)
        return any(lake is not None and dict(lake.truncated_offsets) != wanted for lake in layouts)

    def in_batch_layout(self) -> TableState | None:
        """Return the same cut with the lake that the batch layout is: its snapshot, its offsets.

        None while the table has no such snapshot, or one that lacks rows which are gone from the
        log: the layout came later, and rounds still bring them.
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
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TableState:
        """Read the JSON form."""
        return cls(
            table=TableInfo.from_json(value["table"]),
            positions={int(b): BucketPositions.from_json(p) for b, p in value["positions"].items()},
            lake=LakeState.from_json(value["lake"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringAssignment:
    """One tiering round granted to one worker.

    The worker owns the table's lake until it completes, fails, or misses heartbeats for
    `lease_ms`; then `epoch` is fenced. `state` is the cut to tier up to. Without `is_batch_due` the
    batch layout, if the table has one, is fresh enough to wait for a later round.
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
