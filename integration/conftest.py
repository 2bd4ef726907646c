"""Real processes: the service, Spark, Iceberg on disk, other engines as judges.

Tests here run by `make integration`; those marked `end_to_end` are part of `make test` too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.python_process import end_forking, fork_from_now_on

# Spark's workers run `python3` from PATH unless told otherwise, and a session reads this only
# when it starts.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# A Spark that lives for seconds spends them on its own start: a third less without the compiler
# and the collector that pay after minutes.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.integration)
    # What the others leave is read there.
    items.sort(key=lambda item: item.path == _HERE / "test_every_lake.py")


def pytest_configure() -> None:
    fork_from_now_on()


def pytest_unconfigure() -> None:
    end_forking()
