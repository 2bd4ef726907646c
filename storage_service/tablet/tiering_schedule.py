"""When a table is due for its next tiering round. Pure: times come in as arguments.

A round is due so early that rows reach the lake within the table's freshness: when the oldest row
that is not there is as old as the freshness less what the last round took.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TableDue", "backoff_ms", "due"]

_LAST_ROUND_SHARE_MAX: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDue:
    """How urgent one table is: `wait_ms` until it is due (0: now), `lag_ratio` to rank it."""

    wait_ms: int
    lag_ratio: float


def due(*, oldest_untiered_age_ms: int, freshness_ms: int, last_round_ms: int) -> TableDue:
    """Return when a table whose oldest untiered row has this age should be tiered."""
    ahead_ms = min(last_round_ms, int(freshness_ms * _LAST_ROUND_SHARE_MAX))
    wait_ms = max(0, freshness_ms - ahead_ms - oldest_untiered_age_ms)
    return TableDue(wait_ms=wait_ms, lag_ratio=oldest_untiered_age_ms / freshness_ms)


def backoff_ms(failures: int, *, backoff_ms_min: int, backoff_ms_max: int) -> int:
    """Return the pause after the n-th failed round in a row: doubling, bounded."""
    if failures == 0:
        return 0
    return min(backoff_ms_max, backoff_ms_min << min(failures - 1, 30))
