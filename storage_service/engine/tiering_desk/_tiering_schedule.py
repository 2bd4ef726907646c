"""The time of a table's next tiering round, and the order of due tables. Pure.

A round is due early enough to bring rows to the lake within the table's freshness: when the age of
the oldest missing row reaches the freshness, less the duration of the last round and some slack for
waiting. Among due tables the longest wait goes first, measured in the table's own freshness. A
round ends the table's wait, whatever rows remain: a large backlog gets turns like any other table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TableDue", "due"]

_LEAD_SHARE_MAX: Final = 0.5
_SLACK_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDue:
    """The urgency of one table: `wait_ms` until due (0: now), and `urgency` for the order."""

    wait_ms: int
    urgency: float


def due(
    *,
    oldest_untiered_age_ms: int,
    freshness_ms: int,
    last_round_ms: int,
    since_last_round_ms: int | None,
) -> TableDue:
    """Return the due time of a table with an oldest untiered row of this age.

    `since_last_round_ms` is None before the first round.
    """
    slack_ms = int(freshness_ms * _SLACK_SHARE)
    lead_ms = min(last_round_ms + slack_ms, int(freshness_ms * _LEAD_SHARE_MAX))
    overdue_ms = oldest_untiered_age_ms - (freshness_ms - lead_ms)
    waited_ms = overdue_ms if since_last_round_ms is None else min(overdue_ms, since_last_round_ms)
    return TableDue(wait_ms=max(0, -overdue_ms), urgency=waited_ms / freshness_ms)
