"""The REST catalog over the lake of a test's world."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rest_world import RestWorld
from tests.support.tiering_world import TieringWorld


@pytest.fixture
def rest(world: TieringWorld) -> Iterator[RestWorld]:
    with RestWorld(world) as opened:
        yield opened
