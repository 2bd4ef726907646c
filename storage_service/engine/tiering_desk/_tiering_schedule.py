"""When a table is due for its next tiering round, and which of those due goes first. Pure.

A round is due so early that rows reach the lake within the table's freshness: when the oldest row
that is not there is as old as the freshness less what the last round took and some slack, for the
other rounds that it waits for. Of those due, the one that has waited longest goes first, measured
in its own freshness. A round ends its table's wait, whatever it left behind: a backlog of any size
takes its turns like everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TableDue", "due"]

_LEAD_SHARE_MAX: Final = 0.5
_SLACK_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDue:
    """How urgent one table is: `wait_ms` until it is due (0: now), `urgency` to rank it."""

    wait_ms: int
    urgency: float


def due(
    *,
    oldest_untiered_age_ms: int,
    freshness_ms: int,
    last_round_ms: int,
    since_last_round_ms: int | None,
) -> TableDue:
    """Return when a table whose oldest untiered row has this age should be tiered.

    `since_last_round_ms` is None when the table had no round yet.
    """
    slack_ms = int(freshness_ms * _SLACK_SHARE)
    lead_ms = min(last_round_ms + slack_ms, int(freshness_ms * _LEAD_SHARE_MAX))
    overdue_ms = oldest_untiered_age_ms - (freshness_ms - lead_ms)
    waited_ms = overdue_ms if since_last_round_ms is None else min(overdue_ms, since_last_round_ms)
    return TableDue(wait_ms=max(0, -overdue_ms), urgency=waited_ms / freshness_ms)
