"""Maintenance in step with rounds: under a round's claim, after its rows are in the lake.

Whatever becomes of it, the round is done and reported: a failure is logged, told to the service
and followed by a pause, and the claim is given back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamhouse.storage_service.errors import FencedError, StreamhouseError
from streamhouse.storage_service.model.offsets import BucketPositions
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.tiering.iceberg_committer import IcebergLakeTable
from streamhouse.tiering.lease import Lease
from streamhouse.tiering.maintenance import (
    Claim,
    Maintainer,
    MaintenancePolicy,
    MaintenanceReport,
)
from streamhouse.tiering.ports import TieringClient

__all__ = ["ClaimedMaintenance"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClaimedMaintenance:
    """Maintains one lake table under the claim `epoch`, whose `lease` the caller keeps alive.

    `tiered_offsets` are those that the service knows for the table.
    """

    maintainer: Maintainer
    client: TieringClient
    lake_table: IcebergLakeTable
    info: TableInfo
    epoch: int
    lease: Lease
    tiered_offsets: Mapping[int, int]
    is_stopping: Callable[[], bool] = lambda: False

    def is_due(self, positions: Mapping[int, BucketPositions]) -> bool:
        """Whether to maintain now; `positions` say whether rows still wait. Never raises."""
        is_behind = any(
            end < positions[bucket].high_watermark for bucket, end in self.tiered_offsets.items()
        )
        try:
            return self.maintainer.is_due(self.lake_table, self.info, is_behind=is_behind)
        except Exception:  # the round is done: no bug of maintenance may undo that
            _logger.exception("maintenance of table %s stopped by a bug", self.info.path)
            return False

    def after_round(self, snapshot_id: int) -> None:
        """Do what is due and give the claim back; never raises."""
        try:
            self.run(snapshot_id)
        except FencedError as error:
            # The next owner of the table goes on.
            _logger.info("maintenance of table %s stopped: %s", self.info.path, error)
            return
        except StreamhouseError as error:
            _logger.warning("maintenance of table %s failed: %s", self.info.path, error)
        except Exception:  # the round is done: no bug of maintenance may undo that
            _logger.exception("maintenance of table %s stopped by a bug", self.info.path)
        with contextlib.suppress(StreamhouseError):
            self.report(self.lake_table.snapshot_id or snapshot_id, keep_lease=False)

    def run(
        self, snapshot_id: int | None, policy: MaintenancePolicy | None = None
    ) -> MaintenanceReport:
        """Do what is due, or what `policy` asks for; the claim stays.

        `snapshot_id` is the one the service tells readers to use.
        """
        claim = Claim(
            epoch=self.epoch,
            snapshot_id=snapshot_id,
            check=self.lease.check,
            is_cancelled=lambda: self.lease.is_lost or self.is_stopping(),
            on_snapshot=lambda snapshot_id: self.report(snapshot_id, keep_lease=True),
        )
        return self.maintainer.maintain(self.lake_table, self.info, claim, policy=policy)

    def report(self, snapshot_id: int, *, keep_lease: bool) -> None:
        """Tell the service which snapshot readers use from now on."""
        self.client.complete_tiering(
            str(self.info.path),
            table_id=self.info.table_id,
            epoch=self.epoch,
            lake_snapshot_id=snapshot_id,
            lake_table_uuid=self.lake_table.uuid,
            tiered_offsets=self.tiered_offsets,
            keep_lease=keep_lease,
        )
