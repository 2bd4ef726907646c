"""When tables are due, and how long a failing one rests."""

from __future__ import annotations

import pytest

from streamhouse.storage_service.engine.tiering_desk._tiering_schedule import due


@pytest.mark.parametrize(
    ("age_ms", "last_round_ms", "wait_ms"),
    [
        # A fifth of the freshness is left for waiting until a worker is free.
        (0, 0, 48_000),
        (47_999, 0, 1),
        (48_000, 0, 0),
        (90_000, 0, 0),
        # A round that takes 10 s starts 10 s early, so that its rows arrive in time.
        (37_999, 10_000, 1),
        (38_000, 10_000, 0),
        # However long rounds take, they do not follow each other without a pause.
        (29_999, 500_000, 1),
    ],
)
def test_a_table_is_due_so_that_rows_arrive_within_its_freshness(
    age_ms: int, last_round_ms: int, wait_ms: int
) -> None:
    found = due(
        oldest_untiered_age_ms=age_ms,
        freshness_ms=60_000,
        last_round_ms=last_round_ms,
        since_last_round_ms=None,
    )

    assert found.wait_ms == wait_ms


def _urgency(age_ms: int, *, freshness_ms: int, since_last_round_ms: int | None = None) -> float:
    return due(
        oldest_untiered_age_ms=age_ms,
        freshness_ms=freshness_ms,
        last_round_ms=0,
        since_last_round_ms=since_last_round_ms,
    ).urgency


def test_tables_are_ranked_by_how_long_they_wait_measured_in_their_own_freshness() -> None:
    slow = _urgency(3_700_000, freshness_ms=3_600_000)
    fast = _urgency(6_000, freshness_ms=5_000)

    assert fast > slow


def test_a_backlog_waits_its_turn_after_each_of_its_rounds() -> None:
    backlog = _urgency(3_600_000, freshness_ms=60_000, since_last_round_ms=1_000)
    small = _urgency(50_000, freshness_ms=60_000, since_last_round_ms=50_000)

    assert small > backlog
