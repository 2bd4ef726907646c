"""Fixtures of the tests of the lake room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.maintenance_world import MaintenanceWorld
from tests.support.tiering_world import TieringWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TieringWorld]:
    with TieringWorld(tmp_path) as opened:
        yield opened


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[MaintenanceWorld]:
    with MaintenanceWorld(tmp_path) as opened:
        yield opened
