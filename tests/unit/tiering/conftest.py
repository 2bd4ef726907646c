"""A primary key table in a world of tiering; `world` is that of all unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.key_table_world import KeyTableWorld


@pytest.fixture
def key_world(tmp_path: Path) -> Iterator[KeyTableWorld]:
    with KeyTableWorld(tmp_path) as opened:
        yield opened
