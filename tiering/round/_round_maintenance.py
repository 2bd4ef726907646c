"""Maintenance in step with rounds: under a round's claim, after its rows are in the lake.

The round is done and reported by then. A failure of maintenance is logged, reported to the service
and followed by a pause, and the claim is given back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from streamhouse.client import StorageClient
from streamhouse.core.errors import FencedError, StreamhouseError
from streamhouse.core.model.lake.facts import LakeRole, LakeState, SideLakeState
from streamhouse.core.model.offsets import BucketPositions, further
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.table_state import TieringReport
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.tiering.maintain._maintenance import Maintainer
from streamhouse.tiering.maintain._maintenance_policy import Claim, MaintenancePolicy
from streamhouse.tiering.maintain.maintenance_report import MaintenanceReport
from streamhouse.tiering.round._lease import Lease

__all__ = ["ClaimedMaintenance"]

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ClaimedMaintenance:
    """Maintains the lake tables of one table under the claim `epoch`, while its `lease` lasts.

    `registered` is the service's latest record of the lake tables, for readers to use.
    `lake_table` covers `tiered_offsets`. `sides` are the full history and the batch layout, if the
    table has them. No rows wait for a table that `is_idle`.
    """

    maintainer: Maintainer
    client: StorageClient
    lake_table: IcebergLakeTable
    sides: tuple[IcebergLakeTable, ...] = ()
    info: TableInfo
    epoch: int
    lease: Lease
    registered: LakeState
    tiered_offsets: Mapping[int, int]
    is_stopping: Callable[[], bool] = lambda: False
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    expired_at_us: int = 0
    is_idle: bool = False

    @property
    def lake_tables(self) -> tuple[IcebergLakeTable, ...]:
        """Every lake table of the table that has a snapshot."""
        tables = (self.lake_table, *self.sides)
        return tuple(lake_table for lake_table in tables if lake_table.snapshot_id is not None)

    def due(
        self, positions: Mapping[int, BucketPositions], *, is_busy: bool = False
    ) -> tuple[IcebergLakeTable, ...]:
        """Return the lake tables to maintain now. Never raises.

        Rows of this table wait if `positions` are beyond the lake; other tables wait if `is_busy`.
        """
        is_behind = is_busy or any(
            end < positions[bucket].high_watermark for bucket, end in self.tiered_offsets.items()
        )
        try:
            return tuple(
                lake_table
                for lake_table in self.lake_tables
                if self._is_due(lake_table, is_behind=is_behind)
            )
        except Exception:  # the round is done: no bug of maintenance may undo that
            _logger.exception("event=maintenance_bug table=%s", self.info.path)
            return ()

    def _is_due(self, lake_table: IcebergLakeTable, *, is_behind: bool = False) -> bool:
        return self.maintainer.is_due(
            lake_table,
            self.info,
            is_behind=is_behind,
            is_idle=self.is_idle,
            expired_offsets=self.lake_table.expired_offsets,
        )

    def after_round(self, due: Collection[IcebergLakeTable]) -> None:
        """Maintain the `due` lake tables and give the claim back; never raises.

        When rows leave the rows' own lake table, side tables with the same rows become due.
        """
        first_expired = self.lake_table.expired_offsets
        for lake_table in self.lake_tables:
            try:
                is_expired = self.lake_table.expired_offsets != first_expired
                if lake_table in due or (is_expired and self._is_due(lake_table)):
                    self.run(lake_table)
            except FencedError as error:
                # The next owner of the table goes on.
                _logger.info(
                    "event=maintenance_stopped lake_table=%s why=%r", lake_table.name, str(error)
                )
                return
            except StreamhouseError as error:
                _logger.warning(
                    "event=maintenance_failed lake_table=%s why=%r", lake_table.name, str(error)
                )
            except Exception:  # the round is done: no bug of maintenance may undo that
                _logger.exception("event=maintenance_bug lake_table=%s", lake_table.name)
        with contextlib.suppress(StreamhouseError):
            self.report(keep_lease=False)

    def run(
        self, lake_table: IcebergLakeTable, policy: MaintenancePolicy | None = None
    ) -> MaintenanceReport:
        """Run the due steps on one of `lake_tables`, or the steps of `policy`; keep the claim."""
        claim = Claim(
            epoch=self.epoch,
            snapshot_id=self._registered_snapshot(lake_table),
            check=self.lease.check,
            is_cancelled=lambda: self.lease.is_lost or self.is_stopping(),
            on_snapshot=lambda _: self.report(keep_lease=True),
            on_expired=self._expire,
            expired_offsets=self.lake_table.expired_offsets,
            is_idle=self.is_idle,
        )
        return self.maintainer.maintain(lake_table, self.info, claim, policy=policy)

    def due_again_us(self) -> int | None:
        """Return when to claim the table again without new rows. Never raises."""
        try:
            return self.maintainer.due_again_us(
                self.lake_tables, self.info, self.lake_table.expired_offsets
            )
        except Exception:  # the round is done: no bug of maintenance may undo that
            _logger.exception("event=maintenance_bug table=%s", self.info.path)
            return None

    def _expire(self, ends: Mapping[int, int], at_us: int) -> None:
        self.expired_offsets, self.expired_at_us = ends, at_us
        self.report(keep_lease=True)

    def report(self, *, keep_lease: bool) -> None:
        """Report the newest snapshots and the first offsets, for readers to use from now on."""
        snapshot_id = self.lake_table.snapshot_id
        assert snapshot_id is not None
        report = TieringReport(
            table_id=self.info.table_id,
            epoch=self.epoch,
            snapshot_id=snapshot_id,
            table_uuid=self.lake_table.uuid,
            tiered_offsets=self.tiered_offsets,
            changelog=self._state_of(LakeRole.CHANGES),
            batch=self._state_of(LakeRole.BATCH),
            keep_lease=keep_lease,
            maintenance_due_us=self.due_again_us(),
            expired_offsets=further(self.lake_table.expired_offsets, self.expired_offsets),
            expired_at_us=max(self.lake_table.expired_at_us, self.expired_at_us),
            fingerprints=self.lake_table.fingerprints,
            debt=self.maintainer.debt(self.lake_table, self.sides),
        )
        self.registered = self.client.complete_tiering(str(self.info.path), report)

    def _registered_snapshot(self, lake_table: IcebergLakeTable) -> int | None:
        lake = self.registered
        if lake_table.role is LakeRole.ROWS:
            return lake.snapshot_id
        side = lake.changelog if lake_table.role is LakeRole.CHANGES else lake.batch
        return None if side is None else side.snapshot_id

    def _state_of(self, role: LakeRole) -> SideLakeState | None:
        side = next((side for side in self.sides if side.role is role), None)
        if side is None or side.snapshot_id is None or side.covered is None:
            return None
        return SideLakeState(
            snapshot_id=side.snapshot_id,
            table_uuid=side.uuid,
            tiered_offsets=side.covered.tiered_offsets,
            truncated_offsets=side.covered.truncated_offsets,
            fingerprints=side.covered.fingerprints,
        )
