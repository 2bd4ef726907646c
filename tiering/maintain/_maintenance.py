"""Maintenance of lake tables by a tiering worker: the due steps in order, without harm to rounds.

After a round the worker calls `is_due`, which reads loaded metadata only. If maintenance is due,
the worker rewrites files, expires snapshots and removes orphans under the round's claim, which
keeps other rounds out. Every step may fail or be cut off: the table stays right, and the next
maintenance goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from streamhouse.client import StorageClient
from streamhouse.core.backoff import Backoff
from streamhouse.core.model.lake.facts import (
    ORPHANS_REMOVED_PROPERTY,
    LakeDebt,
    LakeRole,
)
from streamhouse.core.model.offsets import further
from streamhouse.core.model.table import TableInfo
from streamhouse.lake.commits.committer import IcebergLakeTable
from streamhouse.lake.commits.expiry import (
    Expired,
    expire_snapshots,
    expiry_times_ms,
)
from streamhouse.lake.commits.orphans import (
    OrphansRemoved,
    find_orphans,
    remove_orphans,
)
from streamhouse.lake.commits.replacement import seal
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.snapshots.inventory import (
    Inventory,
    InventoryReader,
    LiveFile,
)
from streamhouse.lake.tables.iceberg_schema import METADATA_PROPERTIES
from streamhouse.tiering._ports import TaskRunner
from streamhouse.tiering.maintain._due import (
    TableMemory,
    are_orphans_due,
    idle_due_ms,
    is_expiry_due,
)
from streamhouse.tiering.maintain._maintenance_plan import RewritePlan, plan_rewrite
from streamhouse.tiering.maintain._maintenance_policy import Claim, MaintenancePolicy
from streamhouse.tiering.maintain._reads import ReadCost, lone_files, plan_for_reads
from streamhouse.tiering.maintain._removal import Removed, ends_before, files_below, remove_files
from streamhouse.tiering.maintain._rewrite import Rewrite, Rewritten
from streamhouse.tiering.maintain.maintenance_report import MaintenancePlan, MaintenanceReport

__all__ = ["Maintainer"]

_logger = logging.getLogger(__name__)

# While rows wait in the log, maintenance begins only once this many times more is due.
PATIENCE_BEHIND: Final = 8
IDLE_PAUSE_MS: Final = 3_600_000
_TABLES_REMEMBERED_MAX: Final = 256
ERROR_CHARACTERS_MAX: Final = 1_000
_BACKOFF: Final = Backoff(first_s=60.0, most_s=3_600.0)


@dataclass(kw_only=True)
class Maintainer:
    """Maintains the lake tables of a catalog for a worker; a single thread a table at a time."""

    pins: StorageClient
    runner: TaskRunner
    filesystem: LakeFilesystem
    checkpoint: Callable[[str], None] = lambda _: None
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    monotonic_s: Callable[[], float] = time.monotonic
    _memories: OrderedDict[str, TableMemory] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_due(
        self,
        lake_table: IcebergLakeTable,
        info: TableInfo,
        *,
        is_behind: bool = False,
        is_idle: bool = False,
        expired_offsets: Mapping[int, int] | None = None,
    ) -> bool:
        """Whether maintenance pays off now, judged from loaded metadata.

        While a table `is_behind` its log, rounds come first until much more is due. A table that
        `is_idle` is tidied to the end. Rows below `expired_offsets` are due to leave the layout.
        """
        if not info.properties().datalake_auto_maintenance:
            return False
        memory = self._memory(lake_table)
        if self.monotonic_s() < memory.paused_until_s:
            return False
        patience = PATIENCE_BEHIND if is_behind else 1
        head, now_ms = lake_table.head, self.clock_ms()
        rules = MaintenancePolicy.of(info)
        times_ms = expiry_times_ms(lake_table.iceberg, rules.expiry).values()
        return (
            memory.is_rewrite_due(head, rules.rewrite, now_s=self.monotonic_s(), patience=patience)
            or is_expiry_due(times_ms, now_ms=now_ms, patience=patience, is_idle=is_idle)
            or memory.is_removal_due(
                head,
                lake_table.role,
                rules,
                expired_offsets or {},
                now_ms=now_ms,
                patience=patience,
            )
            or (
                are_orphans_due(head, now_ms=now_ms, idle_age_ms_min=_idle_age(rules, is_idle))
                and not is_behind
            )
        )

    def due_again_us(
        self,
        lake_tables: Iterable[IcebergLakeTable],
        info: TableInfo,
        expired_offsets: Mapping[int, int],
    ) -> int | None:
        """Return when to check the lake tables again without new rows; None: never."""
        if not info.properties().datalake_auto_maintenance:
            return None
        rules = MaintenancePolicy.of(info)
        times = []
        for lake_table in lake_tables:
            head = lake_table.head
            due_ms = idle_due_ms(
                head,
                expiry_times_ms(lake_table.iceberg, rules.expiry).values(),
                orphan_age_ms_min=rules.orphan_age_ms_min,
            )
            memory = self._memory(lake_table)
            paused_s = max(0.0, memory.paused_until_s - self.monotonic_s())
            not_before_ms = self.clock_ms() + int(paused_s * 1000)
            removal_ms = memory.removal_due_ms(
                head, lake_table.role, rules, expired_offsets, now_ms=self.clock_ms()
            )
            if removal_ms is not None:
                times.append(max(removal_ms, not_before_ms))
            if due_ms is not None:
                # The remaining snapshots may be pinned: the next attempt has time.
                again_ms = (memory.maintained_at_ms or 0) + IDLE_PAUSE_MS
                times.append(max(due_ms, not_before_ms, again_ms))
        return min(times) * 1000 if times else None

    def maintain(
        self,
        lake_table: IcebergLakeTable,
        info: TableInfo,
        claim: Claim,
        *,
        policy: MaintenancePolicy | None = None,
    ) -> MaintenanceReport:
        """Run the due steps, or with a `policy` every step of the policy.

        Raises:
            FencedError: another worker has the table now.
            StreamhouseError: a step failed; the steps before are done, and the table is right.
                `is_due` is false for a while.
        """
        memory = self._memory(lake_table)
        try:
            report = self._maintain(lake_table, info, claim, policy, memory)
            if policy is not None:
                inventory = memory.reader.read(lake_table.iceberg)
                report = replace(report, lone_files=_lone_files(inventory, policy))
        except Exception as error:
            memory.error = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
            memory.failures += 1
            memory.paused_until_s = self.monotonic_s() + _BACKOFF.after(memory.failures)
            raise
        memory.failures, memory.error, memory.maintained_at_ms = 0, "", self.clock_ms()
        return report

    def debt(
        self, lake_table: IcebergLakeTable, sides: Iterable[IcebergLakeTable] = ()
    ) -> LakeDebt | None:
        """Return the lake table's figures for people, with an error of the table or of `sides`."""
        debt = lake_table.debt
        if debt is None:
            return None
        debt = self._memory(lake_table).debt_of(debt)
        errors = (debt.maintenance_error, *(self._memory(side).error for side in sides))
        return replace(debt, maintenance_error=next(filter(None, errors), ""))

    def plan(
        self,
        lake_table: IcebergLakeTable,
        policy: MaintenancePolicy,
        *,
        path: str,
        expired_offsets: Mapping[int, int] | None = None,
    ) -> MaintenancePlan:
        """Return the steps that `maintain` with this policy would run; changes nothing."""
        inventory = self._memory(lake_table).reader.read(lake_table.iceberg)
        now_ms, snapshots = self.clock_ms(), lake_table.head.snapshot_count
        times_ms = expiry_times_ms(
            lake_table.iceberg, policy.expiry, pinned=self._pinned(path)
        ).values()
        orphans = find_orphans(
            lake_table.iceberg,
            self.filesystem,
            modified_before_ms=now_ms - policy.orphan_age_ms_min,
        )
        return MaintenancePlan(
            inventory=inventory,
            removable=self._removable(lake_table, inventory, policy, expired_offsets or {})[0],
            rewrite=RewritePlan() if inventory is None else _planned(inventory, policy),
            snapshots=snapshots,
            expirable=sum(time_ms <= now_ms for time_ms in times_ms),
            orphans=len(orphans),
            orphan_bytes=sum(file.size_bytes for file in orphans),
            lone_files=_lone_files(inventory, policy),
        )

    def _maintain(
        self,
        lake_table: IcebergLakeTable,
        info: TableInfo,
        claim: Claim,
        policy: MaintenancePolicy | None,
        memory: TableMemory,
    ) -> MaintenanceReport:
        is_on_demand = policy is not None
        rules = policy or MaintenancePolicy.of(info)
        table = lake_table.iceberg
        path = str(info.path)
        removed = rewritten = None
        in_use = claim.snapshot_id
        if is_on_demand or memory.is_removal_due(
            lake_table.head,
            lake_table.role,
            rules,
            claim.expired_offsets,
            now_ms=self.clock_ms(),
        ):
            # Removal comes first: removed files need no packing.
            removed = self._remove_old(lake_table, claim, rules, memory)
            in_use = in_use if removed is None else removed.snapshot_id
        now_s = self.monotonic_s()
        if is_on_demand or memory.is_rewrite_due(lake_table.head, rules.rewrite, now_s=now_s):
            rewritten = self._rewrite(lake_table, claim, rules, memory)
            in_use = in_use if rewritten is None else rewritten.snapshot_id
        # The time of the last search for orphans is on the table, because workers come and go.
        table_properties = lake_table.properties
        properties = {k: v for k, v in METADATA_PROPERTIES.items() if k not in table_properties}
        orphans = OrphansRemoved()
        now_ms = self.clock_ms()
        idle_ms = _idle_age(rules, claim.is_idle)
        if is_on_demand or are_orphans_due(lake_table.head, now_ms=now_ms, idle_age_ms_min=idle_ms):
            claim.check()
            orphans = remove_orphans(
                table,
                self.filesystem,
                modified_before_ms=now_ms - rules.orphan_age_ms_min,
                seal=lambda: _sealed(lake_table, claim),
                check_lease=claim.check,
            )
            in_use = orphans.sealed_by or in_use
            self.checkpoint("orphans-removed")
            properties[ORPHANS_REMOVED_PROPERTY] = str(now_ms)
        expired = Expired()
        times_ms = expiry_times_ms(table, rules.expiry).values()
        is_due = is_expiry_due(times_ms, now_ms=now_ms, is_idle=claim.is_idle)
        if is_on_demand or properties or is_due:
            if lake_table.head.orphans_removed_ms is None:
                # The first search comes a day after the first maintenance.
                properties.setdefault(ORPHANS_REMOVED_PROPERTY, str(now_ms))
            expired = expire_snapshots(
                table,
                rules.expiry,
                now_ms=now_ms,
                pinned=lambda: {*self._pinned(path), *([] if in_use is None else [in_use])},
                filesystem=self.filesystem,
                properties=properties,
                check_lease=claim.check,
                checkpoint=self.checkpoint,
            )
        return MaintenanceReport(
            removed=removed,
            rewritten=rewritten,
            expired=expired,
            orphans=orphans,
            has_more=memory.has_more,
        )

    def _remove_old(
        self,
        lake_table: IcebergLakeTable,
        claim: Claim,
        rules: MaintenancePolicy,
        memory: TableMemory,
    ) -> Removed | None:
        inventory = memory.reader.read(lake_table.iceberg)
        files, ends = self._removable(lake_table, inventory, rules, claim.expired_offsets)
        if inventory is None or not files:
            self._refresh(lake_table, memory, rules)
            memory.expired = ends
            return None
        expired_at_us = 0
        if lake_table.role is LakeRole.ROWS:
            # From here on no read returns these rows, even while a lake table still has the rows.
            # The batch layout drops the rows after this table's snapshot has the offsets.
            newest = [f.last_timestamp_us for f in files if f.last_timestamp_us is not None]
            expired_at_us = max([lake_table.expired_at_us, *newest])
            claim.on_expired(ends, expired_at_us)
            self.checkpoint("expiry-registered")
        removed = remove_files(
            lake_table,
            inventory,
            files,
            expired_offsets=ends,
            expired_at_us=expired_at_us,
            epoch=claim.epoch,
            check_lease=claim.check,
            checkpoint=self.checkpoint,
        )
        self._refresh(lake_table, memory, rules)
        memory.expired = ends
        claim.on_snapshot(removed.snapshot_id)
        _logger.info("event=lake_rows_removed lake_table=%s what='%s'", lake_table.name, removed)
        return removed

    def _refresh(
        self, lake_table: IcebergLakeTable, memory: TableMemory, rules: MaintenancePolicy
    ) -> None:
        memory.looked(
            memory.reader.read(lake_table.iceberg),
            now_ms=self.clock_ms(),
            limits=rules.rewrite,
        )

    def _removable(
        self,
        lake_table: IcebergLakeTable,
        inventory: Inventory | None,
        rules: MaintenancePolicy,
        expired_offsets: Mapping[int, int],
    ) -> tuple[tuple[LiveFile, ...], Mapping[int, int]]:
        """Return the files to remove, and the offsets below which rows are too old."""
        files = () if inventory is None else inventory.files
        ends = expired_offsets
        if lake_table.role is not LakeRole.BATCH:
            ends = lake_table.expired_offsets
            if lake_table.role is LakeRole.ROWS and rules.ttl_us is not None:
                ends = further(ends, ends_before(files, self.clock_ms() * 1000 - rules.ttl_us))
        return tuple(files_below(files, ends)), ends

    def _rewrite(
        self,
        lake_table: IcebergLakeTable,
        claim: Claim,
        rules: MaintenancePolicy,
        memory: TableMemory,
    ) -> Rewritten | None:
        inventory = memory.reader.read(lake_table.iceberg)
        if inventory is None:
            return None
        # Frequent rounds make files due while the rest after a rewrite for readers still lasts.
        is_resting = memory.is_resting(self.monotonic_s())
        if is_resting:
            plan = plan_rewrite(inventory.files, inventory.deletes, rules.rewrite)
        else:
            plan = _planned(inventory, rules)
        self.checkpoint("rewrite-planned")
        if plan.is_empty:
            memory.planned(plan, at=inventory.sequence_number, limits=rules.rewrite)
            self._refresh(lake_table, memory, rules)
            head = lake_table.head
            if not is_resting:
                memory.hopeless_units = ReadCost(head.file_count, head.row_count).units
            return None
        began_s = self.monotonic_s()
        rewritten = Rewrite(
            table=lake_table.name,
            lake_table=lake_table,
            inventory=inventory,
            plan=plan,
            runner=self.runner,
            filesystem=self.filesystem,
            epoch=claim.epoch,
            check_lease=claim.check,
            is_cancelled=claim.is_cancelled,
            checkpoint=self.checkpoint,
        ).run()
        # Noted only after success: a failed rewrite stays due.
        memory.planned(plan, at=lake_table.head.sequence_number, limits=rules.rewrite)
        memory.hopeless_units = 0
        memory.rewritten(began_s=began_s, ended_s=self.monotonic_s())
        self._refresh(lake_table, memory, rules)
        claim.on_snapshot(rewritten.snapshot_id)
        _logger.info(
            "event=lake_files_rewritten lake_table=%s what='%s'", lake_table.name, rewritten
        )
        return rewritten

    def _pinned(self, path: str) -> Collection[int]:
        return self.pins.pinned_snapshots(path).values()

    def _memory(self, lake_table: IcebergLakeTable) -> TableMemory:
        with self._lock:
            memory = self._memories.setdefault(
                lake_table.uuid, TableMemory(InventoryReader(self.filesystem))
            )
            self._memories.move_to_end(lake_table.uuid)
            while len(self._memories) > _TABLES_REMEMBERED_MAX:
                self._memories.popitem(last=False)
            return memory


def _sealed(lake_table: IcebergLakeTable, claim: Claim) -> int | None:
    """Fence off commits of earlier claims, and report the new snapshot."""
    snapshot_id = seal(lake_table, epoch=claim.epoch, check_lease=claim.check)
    if snapshot_id is not None:
        claim.on_snapshot(snapshot_id)
    return snapshot_id


def _planned(inventory: Inventory, policy: MaintenancePolicy) -> RewritePlan:
    return plan_for_reads(inventory.files, inventory.deletes, policy.rewrite)


def _lone_files(inventory: Inventory | None, policy: MaintenancePolicy) -> int:
    return 0 if inventory is None else lone_files(inventory.files, policy.rewrite)


def _idle_age(policy: MaintenancePolicy, is_idle: bool) -> int | None:
    return policy.orphan_age_ms_min if is_idle else None
