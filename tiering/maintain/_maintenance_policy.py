"""What maintenance of a table is to do, and under what: its policy, the claim, what readers keep.

The policy comes from the table's properties, or from somebody who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from streamhouse.core.model.table import TableInfo
from streamhouse.lake.commits.expiry import ExpiryRules
from streamhouse.tiering.maintain._maintenance_plan import RewriteLimits

__all__ = ["Claim", "MaintenancePolicy", "Pins"]

ON_DEMAND_BYTES_MAX: Final = 4 << 30
REWRITE_BYTES_MAX: Final = 512 << 20
# The table's rows wait while its files are rewritten: a slow core does so much in half a freshness.
REWRITE_BYTES_PER_S: Final = 8 << 20
# A file holds rows of about a slice of the time they stay, and old ones leave a slice at a time.
SLICES_PER_TTL: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenancePolicy:
    """What is worth doing to a table, and what must be left alone.

    Files of which all rows are older than `ttl_us` are removed, once one is so by `ttl_slack_us`.
    """

    rewrite: RewriteLimits
    expiry: ExpiryRules
    orphan_age_ms_min: int
    ttl_us: int | None = None
    ttl_slack_us: int = 0

    @classmethod
    def of(cls, table: TableInfo) -> MaintenancePolicy:
        """Return what a table's properties ask for."""
        properties = table.properties()
        ttl_ms = properties.datalake_ttl_ms
        # Rows by key do not leave by themselves: they are deleted, and rounds bring that.
        ttl_us = None if ttl_ms is None or table.is_primary_key_table else ttl_ms * 1000
        slice_us = None if ttl_us is None else max(1, ttl_us // SLICES_PER_TTL)
        return cls(
            ttl_us=ttl_us,
            ttl_slack_us=slice_us or 0,
            rewrite=RewriteLimits(
                target_bytes=properties.datalake_target_file_bytes,
                bytes_max=min(
                    REWRITE_BYTES_MAX,
                    REWRITE_BYTES_PER_S * properties.datalake_freshness_ms // 1000,
                ),
                slice_us=slice_us,
            ),
            expiry=ExpiryRules(
                age_ms_min=properties.datalake_snapshot_max_age_ms,
                count_min=properties.datalake_snapshot_min_count,
            ),
            orphan_age_ms_min=properties.datalake_orphan_min_age_ms,
        )

    def on_demand(self) -> MaintenancePolicy:
        """Return the policy of somebody who asked for it: all that helps, at any cost."""
        eager = replace(
            self.rewrite,
            files_min=2,
            deletes_min=2,
            deleted_share_min=0.05,
            bytes_max=ON_DEMAND_BYTES_MAX,
            is_eager=True,
        )
        return replace(self, rewrite=eager, ttl_slack_us=0)


class Pins(Protocol):
    """Where readers pin snapshots: the storage service."""

    def pinned_snapshots(self, path: str) -> dict[str, int]:
        """See `StorageClient.pinned_snapshots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim under which a table is maintained.

    `snapshot_id` is the one the service tells readers to use; it stays, whatever its age.
    `on_snapshot` is told of a snapshot that takes its place, `on_expired` of the offsets at which
    the table's rows begin from then on: it returns once every reader that plans goes by them.
    `expired_offsets` are those that the rows' own lake table says, for those beside it. No rows
    wait for a table that `is_idle`.
    """

    epoch: int
    snapshot_id: int | None
    check: Callable[[], None] = lambda: None
    is_cancelled: Callable[[], bool] = lambda: False
    on_snapshot: Callable[[int], None] = lambda _: None
    on_expired: Callable[[Mapping[int, int]], None] = lambda _: None
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    is_idle: bool = False
