"""A world whose table may have a primary key, for rounds of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.key_table_world import KeyTableWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KeyTableWorld]:
    with KeyTableWorld(tmp_path) as opened:
        yield opened
