"""The attack, short. `make attack` runs it for an hour."""

from __future__ import annotations

import pytest

from tests.attack.attack import attack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_answer_is_right_or_refused_whatever_is_damaged_and_whoever_asks() -> None:
    report = attack(seed=20261122, seconds=0, cases_min=5, requests_each=2)
    assert report.directories.cases == 5
    assert report.directories.answers > 150
    assert report.requests.requests > 100
