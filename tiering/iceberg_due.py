"""When maintenance of a lake table is worth its while: from metadata that is there anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyiceberg.table import Table

from streamhouse.tiering.iceberg_expiry import ExpiryRules, expirable_snapshots
from streamhouse.tiering.iceberg_inventory import Inventory, InventoryReader, head_of

__all__ = ["ORPHANS_PROPERTY", "TableMemory", "are_orphans_due", "is_expiry_due"]

# A round adds a file a bucket and partition, so there is nothing to merge before that many.
ROUNDS_BETWEEN_PLANS: Final = 8
SNAPSHOTS_BETWEEN_EXPIRIES: Final = 10
_ORPHANS_EVERY_MS: Final = 86_400_000
ORPHANS_PROPERTY: Final = "streamhouse.orphans-removed-ms"


@dataclass
class TableMemory:
    """What a worker knows of a lake table between two maintenances; losing it costs a look.

    `oldest_us` is when the newest row of the oldest file was written.
    """

    reader: InventoryReader
    planned_at: int | None = None
    has_more: bool = False
    oldest_us: int | None = None
    failures: int = 0
    paused_until_s: float = 0.0

    def is_rewrite_due(self, table: Table, patience: int = 1) -> bool:
        """Whether so many rounds came since the last plan that there may be files to merge."""
        head = head_of(table)
        if self.planned_at is not None:
            rounds = head.sequence_number - self.planned_at
            is_cut_off = self.has_more and patience == 1
            return is_cut_off or rounds >= ROUNDS_BETWEEN_PLANS * patience
        return head.file_count >= ROUNDS_BETWEEN_PLANS * patience

    def is_removal_due(self, table: Table, before_us: int | None) -> bool:
        """Whether a file may have no row written since `before_us`; None: rows stay for ever."""
        if before_us is None:
            return False
        if self.oldest_us is None:
            # Nothing but a look at the files tells how old they are.
            return head_of(table).file_count > 0
        return self.oldest_us < before_us

    def looked(self, inventory: Inventory | None, *, now_ms: int) -> None:
        """Remember how old the files are; those of later rounds are younger than `now_ms`."""
        files = () if inventory is None else inventory.files
        known = [f.last_timestamp_us for f in files if f.last_timestamp_us is not None]
        self.oldest_us = min(known, default=now_ms * 1000)


def is_expiry_due(table: Table, rules: ExpiryRules, *, now_ms: int, patience: int = 1) -> bool:
    """Whether there are enough snapshots to expire for one more commit."""
    found = expirable_snapshots(table.metadata, rules, now_ms=now_ms)
    return len(found) >= SNAPSHOTS_BETWEEN_EXPIRIES * patience


def are_orphans_due(table: Table, *, now_ms: int) -> bool:
    """Whether a day has passed since somebody looked for orphans of the table."""
    last_ms = table.metadata.properties.get(ORPHANS_PROPERTY)
    return last_ms is not None and int(last_ms) + _ORPHANS_EVERY_MS < now_ms
