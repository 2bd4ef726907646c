"""The drill, short: an owner's machine is lost under a writer and a Spark stream."""

from __future__ import annotations

import pytest

from integration.drill import drill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_writer_and_stream_go_on_when_the_machine_of_the_owner_is_lost() -> None:
    outcome = drill(lease_ms=1_500, seconds=3.0)

    assert outcome.rows_acknowledged > 0
    assert (outcome.lost, outcome.twice, outcome.wrong_copies) == (0, 0, 0)
    assert "rows lost                            0" in list(outcome.lines())
