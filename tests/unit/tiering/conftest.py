"""A world whose table may have a primary key, for rounds of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiering_world import KeyTieringWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KeyTieringWorld]:
    with KeyTieringWorld(tmp_path) as opened:
        yield opened
