"""A bucket with a log that survives crashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kv_world import LoggedBucket, simple_rules


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[LoggedBucket]:
    bucket = LoggedBucket(tmp_path / "kv", simple_rules())
    yield bucket
    bucket.tablet.close()
