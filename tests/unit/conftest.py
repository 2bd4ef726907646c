"""The worlds of tests that tier to a lake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.log_table_world import LogTableWorld
from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TieringWorld]:
    with TieringWorld(tmp_path) as opened:
        yield opened


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[LogTableWorld]:
    with LogTableWorld(tmp_path) as opened:
        yield opened


@pytest.fixture
def rest(world: TieringWorld) -> Iterator[RestWorld]:
    """The REST catalog over the lake of a test's world."""
    with RestWorld(world) as opened:
        yield opened
