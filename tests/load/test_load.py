"""The load test, short. `make load` runs it in full size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load.crowd import Crowd, run_crowd
from tests.load.load import CROWD_BYTES_MAX, TABLE_BYTES_MAX
from tests.load.many_tables import run_many_tables

pytestmark = pytest.mark.slow

# What does not grow with the number of tables: threads, their heaps.
_FIXED_BYTES_MAX = 100 << 20


def test_a_crowd_is_served_in_bounded_memory(tmp_path: Path) -> None:
    outcome = run_crowd(tmp_path, Crowd(appends=2_000, connections=50, polls=200, bodies=2))
    assert outcome.resident_bytes_max < CROWD_BYTES_MAX


@pytest.mark.parametrize("is_keyed", [False, True])
def test_many_tables_outlive_a_kill_in_bounded_memory(tmp_path: Path, is_keyed: bool) -> None:
    seen = run_many_tables(tmp_path, tables=8, buckets=8, rows=100, is_keyed=is_keyed)
    bytes_max = _FIXED_BYTES_MAX + 64 * TABLE_BYTES_MAX[is_keyed]
    assert seen.bytes_written - seen.bytes_empty < bytes_max
    assert seen.bytes_restarted - seen.bytes_empty < bytes_max
