"""The torture test of a service with a journal, short. `make torture` runs it for an hour."""

from __future__ import annotations

import pytest

from tests.support.journal_machines import StoreKind
from tests.torture.torture import torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("kind", "store"),
    [
        pytest.param("lost-disk", "file", marks=pytest.mark.long),
        ("takeover", "faulty s3"),
        pytest.param("disk-ack", "file", marks=pytest.mark.long),
        pytest.param("shards", "file", marks=pytest.mark.long),
        pytest.param("kafka", "file", marks=pytest.mark.long),
    ],
)
def test_what_was_acknowledged_survives_the_machine(kind: str, store: StoreKind) -> None:
    report = torture(seed=15, seconds=1, lives_per_era=2, kinds=[kind], stores=[store])

    assert report.deaths.total() >= 2
    assert report.rows_judged > 0


@pytest.mark.long
def test_clients_of_an_owner_and_two_standbys_never_go_back() -> None:
    report = torture(seed=1, seconds=1, lives_per_era=3, kinds=["standbys"], stores=["file"])

    assert report.deaths.total() == 3
    assert report.rows_judged > 0
    assert report.standby_answers.total() > 100
