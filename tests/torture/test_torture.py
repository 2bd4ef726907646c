"""The torture test, short. `make torture` runs it for an hour."""

from __future__ import annotations

import pytest

from tests.torture.torture import torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_lookups_beside_kills_of_readers_and_owner_are_linearizable() -> None:
    report = torture(seed=1, seconds=1, lives_per_era=3, kinds=["readers"])
    assert report.deaths["kill beside readers"] == 2
    assert report.rows_judged > 2_000


def test_what_was_acknowledged_survives_kills_of_service_and_worker() -> None:
    report = torture(seed=228, seconds=1, lives_per_era=4, kinds=["disk"])
    assert report.deaths.total() == 4
    assert report.rows_judged > 0
    assert report.cuts_judged > 0
    assert report.rows_aged > 0
