"""Fixtures of the REST catalog's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rest_world import RestWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RestWorld]:
    with RestWorld(tmp_path) as opened:
        yield opened
