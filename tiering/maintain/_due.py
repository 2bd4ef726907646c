"""When maintenance of a lake table pays off, judged from loaded metadata alone. Pure."""

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

# A round adds one file to a bucket and partition: fewer rounds leave nothing to merge.
ROUNDS_BETWEEN_PLANS: Final = 8
SNAPSHOTS_BETWEEN_EXPIRIES: Final = 10
_REMOVALS_EVERY_MS_MIN: Final = 60_000
_ORPHANS_EVERY_MS: Final = 86_400_000
# After a rewrite for readers the worker rests three times as long as the rewrite took.
_REST_RATIO: Final = 3
# Read costs that no plan could lower are planned for again after they have grown by this factor.
_HOPELESS_GROWTH: Final = 1.1


@dataclass
class TableMemory:
    """A worker's notes on a lake table between two maintenances; a lost note costs one inventory.

    `oldest_us` is when the newest row of the oldest file was written. No file has only rows below
    the offsets `expired`. `small_files` of the `files` may be packed. The last plan holds for the
    limits `planned_for` only. `least_files` would be enough for the table's rows. No plan lowered
    the cost of a read below `hopeless_units`. The last rewrite for readers took `rewrite_s`, and
    ended at `rewritten_at_s`.
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
        """Whether reads are too dear, or the rounds since the last plan left files to merge."""
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
        """Whether reads cost much more than the least cost, and a rewrite is affordable.

        `patience` multiplies the rest between rewrites.
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
        """Whether the rest after the last rewrite lasts: no rewrite for readers begins yet."""
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
        """Whether all rows of some file may have reached their time to live.

        In a batch layout all rows of the file are below `expired_offsets`. With `patience` that
        many slices of the time to live must have passed since.
        """
        if role is LakeRole.BATCH:
            return dict(expired_offsets) != dict(self.expired)
        if role is not LakeRole.ROWS or policy.ttl_us is None:
            return False
        if self.oldest_us is None:
            # Only an inventory of the files tells their age.
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
        """Return when `is_removal_due` turns true without new rows; None: rows stay for ever."""
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
        """Return `debt`, which comes from the metadata, with this worker's notes added."""
        # Files that rounds have added since the last inventory are small.
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
        """Note that the snapshot with sequence number `at` has all of the plan's rewrites."""
        self.planned_at, self.planned_for, self.has_more = at, limits, plan.has_more

    def rewritten(self, *, began_s: float, ended_s: float) -> None:
        """Note how long a rewrite took."""
        self.rewrite_s, self.rewritten_at_s = ended_s - began_s, ended_s

    def looked(self, inventory: Inventory | None, *, now_ms: int, limits: RewriteLimits) -> None:
        """Note the files of the inventory; files of later rounds are younger than `now_ms`."""
        files = () if inventory is None else inventory.files
        timestamps_us = [
            f.last_timestamp_us
            for f in files
            if f.last_timestamp_us is not None and f.bucket is not None
        ]
        self.oldest_us = min(timestamps_us, default=now_ms * 1000)
        self.files = len(files)
        self.small_files = sum(not f.is_fixed and f.live_bytes < limits.full_bytes for f in files)
        self.least_files = least_files(files, limits)


def is_expiry_due(
    times_ms: Collection[int], *, now_ms: int, patience: int = 1, is_idle: bool = False
) -> bool:
    """Whether enough snapshots may be expired to pay for one more commit.

    `times_ms` are the times from which each snapshot may go. A table that `is_idle` gets no more
    snapshots: the commit is due once every snapshot of `times_ms` may go.
    """
    if is_idle and times_ms:
        return max(times_ms) <= now_ms
    return sum(time_ms <= now_ms for time_ms in times_ms) >= SNAPSHOTS_BETWEEN_EXPIRIES * patience


def are_orphans_due(head: Head, *, now_ms: int, idle_age_ms_min: int | None = None) -> bool:
    """Whether the last search for orphans of the table is a day old.

    An idle table passes `idle_age_ms_min`: a last search is due once files abandoned by workers of
    its rounds are that old.
    """
    if idle_age_ms_min is not None:
        idle_ms = _last_orphans_ms(head, idle_age_ms_min)
        return idle_ms is not None and idle_ms <= now_ms
    last_ms = head.orphans_removed_ms
    return last_ms is not None and last_ms + _ORPHANS_EVERY_MS < now_ms


def idle_due_ms(head: Head, times_ms: Collection[int], *, orphan_age_ms_min: int) -> int | None:
    """Return when a table without new rows has something to tidy again; None: never again.

    `times_ms` are the times from which each expirable snapshot may go.
    """
    times = (max(times_ms, default=None), _last_orphans_ms(head, orphan_age_ms_min))
    return min((time for time in times if time is not None), default=None)


def _last_orphans_ms(head: Head, age_ms_min: int) -> int | None:
    """Return when files that the last round's worker may have abandoned are old enough to go."""
    if head.committed_ms is None:
        return None
    last_ms = head.orphans_removed_ms or 0
    old_ms = head.committed_ms + age_ms_min
    return None if last_ms > old_ms else max(old_ms, last_ms + _ORPHANS_EVERY_MS) + 1
