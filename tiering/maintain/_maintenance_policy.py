"""The settings of a table's maintenance: the policy and the claim.

The policy comes from the table's properties, or from a call on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from streamhouse.core.model.table import TableInfo
from streamhouse.lake.commits.expiry import ExpiryRules
from streamhouse.tiering.maintain._maintenance_plan import RewriteLimits

__all__ = [
    "Claim",
    "MaintenancePolicy",
]

ON_DEMAND_BYTES_MAX: Final = 4 << 30
REWRITE_BYTES_MAX: Final = 512 << 20
# Rows of the table wait during a rewrite: a slow core rewrites this much in half a freshness.
REWRITE_BYTES_PER_S: Final = 8 << 20
# A file holds rows of about one slice of the time to live; old rows leave a slice at a time.
SLICES_PER_TTL: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenancePolicy:
    """When files of a table are rewritten, expired and removed.

    A file goes when all its rows are older than `ttl_us`; a removal begins once some file is older
    by `ttl_slack_us` as well.
    """

    rewrite: RewriteLimits
    expiry: ExpiryRules
    orphan_age_ms_min: int
    ttl_us: int | None = None
    ttl_slack_us: int = 0

    @classmethod
    def of(cls, table: TableInfo) -> MaintenancePolicy:
        """Return the policy of a table's properties."""
        properties = table.properties()
        ttl_ms = properties.datalake_ttl_ms
        # Rows of a primary key table do not expire in the lake: rounds bring their deletes.
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
        """Return the policy for a call on demand: every helpful rewrite, at any cost."""
        eager = replace(
            self.rewrite,
            files_min=2,
            deletes_min=2,
            deleted_share_min=0.05,
            bytes_max=ON_DEMAND_BYTES_MAX,
            is_eager=True,
        )
        return replace(self, rewrite=eager, ttl_slack_us=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim under which a table is maintained.

    Readers use the snapshot `snapshot_id`, which stays at any age. `on_snapshot` gets the
    snapshot that replaces `snapshot_id`. `on_expired` gets the new first offsets of the table's
    rows and the time of the newest row below, and returns once every reader that plans uses the
    offsets. `expired_offsets` are the offsets in the rows' own lake table, for the side tables. No
    rows wait for a table that `is_idle`.
    """

    epoch: int
    snapshot_id: int | None
    check: Callable[[], None] = lambda: None
    is_cancelled: Callable[[], bool] = lambda: False
    on_snapshot: Callable[[int], None] = lambda _: None
    on_expired: Callable[[Mapping[int, int], int], None] = lambda *_: None
    expired_offsets: Mapping[int, int] = field(default_factory=dict)
    is_idle: bool = False
