"""The torture test, short. `make torture` runs it for an hour."""

from __future__ import annotations

import pytest

from tests.torture.torture import torture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_acknowledged_survives_kills_of_service_and_worker(seed: int) -> None:
    report = torture(seed=seed, seconds=1, lives_per_era=5)
    assert report.kills.total() == 5
    assert report.rows_judged > 0
    assert report.cuts_judged > 0
