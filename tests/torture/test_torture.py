"""The torture test, short. `make torture` runs it for an hour."""

from __future__ import annotations

import pytest

from tests.torture.torture import torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_what_was_acknowledged_survives_kills_of_service_and_worker() -> None:
    report = torture(seed=228, seconds=1, lives_per_era=4, kinds=["disk"])
    assert report.deaths.total() == 4
    assert report.rows_judged > 0
    assert report.cuts_judged > 0
    assert report.rows_aged > 0
