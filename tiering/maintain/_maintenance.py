"""Maintenance of lake tables by a tiering worker: what is due, done in order, never a round's harm.

After a round the worker asks `is_due`, which looks at nothing but metadata it has anyway. If so it
rewrites files, expires snapshots and removes orphans while it still holds the round's claim, so no
round of its own can come in between. Every step may fail or be cut off: the table stays right, the
next maintenance goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

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
from streamhouse.tiering.maintain._maintenance_policy import Claim, MaintenancePolicy, Pins
from streamhouse.tiering.maintain._reads import ReadCost, lone_files, plan_for_reads
from streamhouse.tiering.maintain._removal import Removed, ends_before, files_below, remove_files
from streamhouse.tiering.maintain._rewrite import Rewrite, Rewritten
from streamhouse.tiering.maintain.maintenance_report import MaintenancePlan, MaintenanceReport

__all__ = ["Maintainer"]

_logger = logging.getLogger(__name__)

# So many times more must be due while rows wait in the log.
PATIENCE_BEHIND: Final = 8
IDLE_PAUSE_MS: Final = 3_600_000
_TABLES_REMEMBERED_MAX: Final = 256
ERROR_CHARACTERS_MAX: Final = 1_000
_BACKOFF: Final = Backoff(first_s=60.0, most_s=3_600.0)


@dataclass(kw_only=True)
class Maintainer:
    """Maintains the lake tables of one catalog for one worker. Not thread-safe a table."""

    pins: Pins
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
        """Whether maintenance is worth its while now: from metadata that is there anyway.

        While a table `is_behind` its log, rounds come first until much more is due. One that
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
        """Return when to look at the lake tables again even if no more rows come; None: never."""
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
                # What was left may be pinned: that has time.
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
        """Do what is due, or with a `policy` everything it asks for.

        Raises:
            FencedError: another worker has the table now.
            StreamhouseError: a step failed; those before it are done, and the table is right. What
                is due by itself is not due again for a while.
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
        """Return what is known of the lake table, and what failed for any; for people."""
        debt = lake_table.debt
        if debt is None:
            return None
        found = self._memory(lake_table).debt_of(debt)
        errors = (found.maintenance_error, *(self._memory(side).error for side in sides))
        return replace(found, maintenance_error=next(filter(None, errors), ""))

    def plan(
        self,
        lake_table: IcebergLakeTable,
        policy: MaintenancePolicy,
        *,
        path: str,
        expired_offsets: Mapping[int, int] | None = None,
    ) -> MaintenancePlan:
        """Return what `maintain` with this policy would do; changes nothing."""
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
        is_asked = policy is not None
        rules = policy or MaintenancePolicy.of(info)
        table = lake_table.iceberg
        path = str(info.path)
        removed = rewritten = None
        in_use = claim.snapshot_id
        if is_asked or memory.is_removal_due(
            lake_table.head,
            lake_table.role,
            rules,
            claim.expired_offsets,
            now_ms=self.clock_ms(),
        ):
            # First, because what goes need not be packed.
            removed = self._remove_old(lake_table, claim, rules, memory)
            in_use = in_use if removed is None else removed.snapshot_id
        now_s = self.monotonic_s()
        if is_asked or memory.is_rewrite_due(lake_table.head, rules.rewrite, now_s=now_s):
            rewritten = self._rewrite(lake_table, claim, rules, memory)
            in_use = in_use if rewritten is None else rewritten.snapshot_id
        # The time of the last look for orphans is on the table: workers come and go.
        there = lake_table.properties
        properties = {k: value for k, value in METADATA_PROPERTIES.items() if k not in there}
        orphans = OrphansRemoved()
        now_ms = self.clock_ms()
        idle_ms = _idle_age(rules, claim.is_idle)
        if is_asked or are_orphans_due(lake_table.head, now_ms=now_ms, idle_age_ms_min=idle_ms):
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
        if is_asked or properties or is_due:
            if lake_table.head.orphans_removed_ms is None:
                # The first look comes a day after the first maintenance.
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
        found, ends = self._removable(lake_table, inventory, rules, claim.expired_offsets)
        if inventory is None or not found:
            self._look(lake_table, memory, rules)
            memory.expired = ends
            return None
        if lake_table.role is LakeRole.ROWS:
            # From here on no read finds these rows, in whichever lake table and for how long ever
            # they lie there. They leave that of the batch layout after this one's says so.
            claim.on_expired(ends)
            self.checkpoint("expiry-registered")
        removed = remove_files(
            lake_table,
            inventory,
            found,
            expired_offsets=ends,
            epoch=claim.epoch,
            check_lease=claim.check,
            checkpoint=self.checkpoint,
        )
        self._look(lake_table, memory, rules)
        memory.expired = ends
        claim.on_snapshot(removed.snapshot_id)
        _logger.info("event=lake_rows_removed lake_table=%s what='%s'", lake_table.name, removed)
        return removed

    def _look(
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
        # Rounds that come close together make files due sooner than readers' rewrites may follow.
        is_resting = memory.is_resting(self.monotonic_s())
        if is_resting:
            plan = plan_rewrite(inventory.files, inventory.deletes, rules.rewrite)
        else:
            plan = _planned(inventory, rules)
        self.checkpoint("rewrite-planned")
        if plan.is_empty:
            memory.planned(plan, at=inventory.sequence_number, limits=rules.rewrite)
            self._look(lake_table, memory, rules)
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
        # Only now: what a rewrite that failed was due for is due still.
        memory.planned(plan, at=lake_table.head.sequence_number, limits=rules.rewrite)
        memory.hopeless_units = 0
        memory.rewritten(began_s=began_s, ended_s=self.monotonic_s())
        self._look(lake_table, memory, rules)
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
    """See that no commit of an earlier claim can land any more, and tell of the snapshot for it."""
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
