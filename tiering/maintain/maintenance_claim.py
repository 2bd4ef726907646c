"""Under what a lake table is maintained: the claim of its table, and what readers keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Claim", "Pins"]


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
