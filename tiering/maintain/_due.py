"""When maintenance of a lake table is worth its while: from metadata that is there anyway. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from streamhouse.core.model.lake.facts import LakeDebt, LakeRole
from streamhouse.lake.snapshots.inventory import Head, Inventory, InventoryReader
from streamhouse.tiering.maintain._maintenance_plan import RewriteLimits, RewritePlan
from streamhouse.tiering.maintain._maintenance_policy import MaintenancePolicy
from streamhouse.tiering.maintain._reads import ReadCost, least_files

__all__ = ["TableMemory", "are_orphans_due", "idle_due_ms", "is_expiry_due"]

# A round adds a file a bucket and partition, so there is nothing to merge before that many.
ROUNDS_BETWEEN_PLANS: Final = 8
SNAPSHOTS_BETWEEN_EXPIRIES: Final = 10
_REMOVALS_EVERY_MS_MIN: Final = 60_000
_ORPHANS_EVERY_MS: Final = 86_400_000
# Rewriting for the sake of readers rests so many times as long as it took: a quarter of the time.
_REST_RATIO: Final = 3
# What a plan for readers could not mend is looked at again when so much has come on top.
_HOPELESS_GROWTH: Final = 1.1


@dataclass
class TableMemory:
    """What a worker knows of a lake table between two maintenances; losing it costs a look.

    `oldest_us` is when the newest row of the oldest file was written. No file has only rows below
    the offsets `expired`. `small_files` of the `files` may be packed. The last plan was one for
    the limits `planned_for`, and is nothing to go by for others. The table could do with
    `least_files`. Nothing was to be done for readers while a read cost `hopeless_units`. The last
    rewrite for them took `rewrite_s`, and ended at `rewritten_at_s`.
    """

    reader: InventoryReader
    planned_at: int | None = None
    planned_for: RewriteLimits | None = None
    has_more: bool = False
    oldest_us: int | None = None
    expired: Mapping[int, int] = field(default_factory=dict)
    files: int = 0
    small_files: int = 0
    least_files: int | None = None
    hopeless_units: int = 0
    rewrite_s: float = 0.0
    rewritten_at_s: float = 0.0
    maintained_at_ms: int | None = None
    error: str = ""
    failures: int = 0
    paused_until_s: float = 0.0

    def is_rewrite_due(
        self, head: Head, limits: RewriteLimits, *, now_s: float, patience: int = 1
    ) -> bool:
        """Whether reads suffer, or enough rounds came since the last plan for files to merge."""
        if self.has_read_debt(head, limits, now_s=now_s, patience=patience):
            return True
        if self.planned_at is not None and self.planned_for == limits:
            rounds = head.sequence_number - self.planned_at
            is_cut_off = self.has_more and patience == 1
            return is_cut_off or rounds >= ROUNDS_BETWEEN_PLANS * patience
        return head.file_count >= ROUNDS_BETWEEN_PLANS * patience

    def has_read_debt(
        self, head: Head, limits: RewriteLimits, *, now_s: float, patience: int = 1
    ) -> bool:
        """Whether reads cost much more than they have to, and a rewrite for that is affordable.

        With `patience` rewrites rest so many times as long.
        """
        if self.least_files is None or self.planned_for != limits:
            return False
        if self.is_resting(now_s, patience):
            return False
        cost = ReadCost(head.file_count, head.row_count)
        least = ReadCost(self.least_files, head.live_row_count)
        is_hopeless = cost.units <= self.hopeless_units * _HOPELESS_GROWTH
        return cost.is_debt(least, limits) and not is_hopeless

    def is_resting(self, now_s: float, patience: int = 1) -> bool:
        """Whether the last rewrite took so long that none is to follow for readers' sake yet."""
        return now_s < self.rewritten_at_s + self.rewrite_s * _REST_RATIO * patience

    def is_removal_due(
        self,
        head: Head,
        role: LakeRole,
        policy: MaintenancePolicy,
        expired_offsets: Mapping[int, int],
        *,
        now_ms: int,
        patience: int = 1,
    ) -> bool:
        """Whether a file may have nothing but rows that have reached their time to live.

        Of a batch layout that is what has rows below `expired_offsets` alone. With `patience` so
        many slices of that time must have gone by since.
        """
        if role is LakeRole.BATCH:
            return dict(expired_offsets) != dict(self.expired)
        if role is not LakeRole.ROWS or policy.ttl_us is None:
            return False
        if self.oldest_us is None:
            # Nothing but a look at the files tells how old they are.
            return head.file_count > 0
        return self.oldest_us < now_ms * 1000 - policy.ttl_us - patience * policy.ttl_slack_us

    def removal_due_ms(
        self,
        head: Head,
        role: LakeRole,
        policy: MaintenancePolicy,
        expired_offsets: Mapping[int, int],
        *,
        now_ms: int,
    ) -> int | None:
        """Return when `is_removal_due` even if no more rows come; None: rows stay for ever."""
        if role is LakeRole.BATCH:
            return now_ms if dict(expired_offsets) != dict(self.expired) else None
        if role is not LakeRole.ROWS or policy.ttl_us is None:
            return None
        if head.file_count == 0:
            return now_ms + policy.ttl_us // 1000
        soon_ms = now_ms + max(_REMOVALS_EVERY_MS_MIN, policy.ttl_slack_us // 1000)
        if self.oldest_us is None:
            return soon_ms
        due_ms = (self.oldest_us + policy.ttl_us + policy.ttl_slack_us) // 1000 + 1
        return due_ms if due_ms > now_ms else soon_ms

    def debt_of(self, debt: LakeDebt) -> LakeDebt:
        """Return what is known of the table besides what its metadata says."""
        # What rounds have added since the last look is small.
        added = max(0, debt.data_files - self.files)
        at_ms = self.maintained_at_ms
        return replace(
            debt,
            small_files=min(self.small_files + added, debt.data_files),
            needed_files=self.least_files or 0,
            maintained_at_us=None if at_ms is None else at_ms * 1000,
            maintenance_error=self.error,
        )

    def planned(self, plan: RewritePlan, *, at: int, limits: RewriteLimits) -> None:
        """Remember that all of a plan is done by the snapshot with this sequence number."""
        self.planned_at, self.planned_for, self.has_more = at, limits, plan.has_more

    def rewritten(self, *, began_s: float, ended_s: float) -> None:
        """Remember how long a rewrite took."""
        self.rewrite_s, self.rewritten_at_s = ended_s - began_s, ended_s

    def looked(self, inventory: Inventory | None, *, now_ms: int, limits: RewriteLimits) -> None:
        """Remember what the files are; those of later rounds are younger than `now_ms`."""
        files = () if inventory is None else inventory.files
        known = [
            f.last_timestamp_us
            for f in files
            if f.last_timestamp_us is not None and f.bucket is not None
        ]
        self.oldest_us = min(known, default=now_ms * 1000)
        self.files = len(files)
        self.small_files = sum(not f.is_fixed and f.live_bytes < limits.full_bytes for f in files)
        self.least_files = least_files(files, limits)


def is_expiry_due(
    times_ms: Collection[int], *, now_ms: int, patience: int = 1, is_idle: bool = False
) -> bool:
    """Whether there are enough snapshots to expire for one more commit: `times_ms` are when.

    Of a table that `is_idle` no more come, so those that are left are enough, once all may go.
    """
    if is_idle and times_ms:
        return max(times_ms) <= now_ms
    return sum(time_ms <= now_ms for time_ms in times_ms) >= SNAPSHOTS_BETWEEN_EXPIRIES * patience


def are_orphans_due(head: Head, *, now_ms: int, idle_age_ms_min: int | None = None) -> bool:
    """Whether a day has passed since somebody looked for orphans of the table.

    With `idle_age_ms_min` it is of a table that is idle: a look is due once all that the workers
    of its rounds may have left is as old as that, and then no more.
    """
    if idle_age_ms_min is not None:
        idle_ms = _last_orphans_ms(head, idle_age_ms_min)
        return idle_ms is not None and idle_ms <= now_ms
    last_ms = head.orphans_removed_ms
    return last_ms is not None and last_ms + _ORPHANS_EVERY_MS < now_ms


def idle_due_ms(head: Head, times_ms: Collection[int], *, orphan_age_ms_min: int) -> int | None:
    """Return when there is something to tidy though no rows come any more; None: never again.

    `times_ms` are when each snapshot may be expired that is to go.
    """
    times = (max(times_ms, default=None), _last_orphans_ms(head, orphan_age_ms_min))
    return min((time for time in times if time is not None), default=None)


def _last_orphans_ms(head: Head, age_ms_min: int) -> int | None:
    """Return when files that the last round's worker may have left are old enough to go."""
    if head.committed_ms is None:
        return None
    last_ms = head.orphans_removed_ms or 0
    old_ms = head.committed_ms + age_ms_min
    return None if last_ms > old_ms else max(old_ms, last_ms + _ORPHANS_EVERY_MS) + 1
