"""Rounds for hours on end: files, manifests, snapshots and metadata stay few.

Shorter than a day here; `benchmarks/bench_maintenance.py` runs the whole 1,440 rounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.key_table_world import KeyTableWorld
from tests.support.lake_day import BUCKETS, live_day
from tests.support.log_table_world import LogTableWorld

pytestmark = pytest.mark.slow

ROUNDS = 80


def test_a_log_table_stays_tidy(tmp_path: Path) -> None:
    with LogTableWorld(tmp_path) as world:
        day = live_day(world, ROUNDS, max_age="50ms")

        world.check()
        assert max(day.data_files) <= 25 * BUCKETS
        assert max(day.snapshots) <= 40
        assert max(day.manifests) <= 40
        assert max(day.metadata_bytes) <= 60_000
        assert max(day.files_on_disk) <= 400


def test_a_primary_key_table_stays_tidy(tmp_path: Path) -> None:
    with KeyTableWorld(tmp_path) as world:
        day = live_day(world, ROUNDS, max_age="50ms")

        assert world.in_lake() == world.live
        assert max(day.data_files) <= 25 * BUCKETS
        assert max(day.delete_files) <= 25 * BUCKETS
        assert max(day.snapshots) <= 40
        assert max(day.manifests) <= 60
        assert max(day.metadata_bytes) <= 60_000
