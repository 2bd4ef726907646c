"""What every test needs. Fixtures of one part live beside that part's tests."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests.support.areas import AREAS, is_of
from tests.support.python_process import end_forking, fork_from_now_on

_ROOT: Final = Path(__file__).parent

# Workers (`--numprocesses 2`) take the next file when they have run one: what takes long comes
# first, so that they end together. Folders that are not named come last.
_LONG_FIRST: Final = (
    "integration", "tests/service", "tests/attack", "tests/torture", "tests/load",
    "tests/simulation", "tests/property",
)  # fmt: skip

# What `make test` runs of tests/, but for what is slow, and the one file of integration/.
_NEWCOMER: Final = ("tests/unit", "tests/golden", "tests/architecture")
_NEWCOMER_END_TO_END: Final = _ROOT / "integration" / "test_spark_batch.py"

# No deadline: two shared cores make one slow example likely, and it says nothing about the code.
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=2000,
    suppress_health_check=[HealthCheck.too_slow],
)
# The same examples each time: a change is judged by what it changed. `make thorough` draws others.
settings.register_profile(
    "default", parent=settings.get_profile("thorough"), max_examples=20, derandomize=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Spark's workers run `python3` from PATH unless told otherwise, and a session reads this only
# when it starts.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# Processes of tests write as they do on a new machine: a line that is not flushed waits.
os.environ.pop("PYTHONUNBUFFERED", None)
# A Spark that lives for seconds spends them on its own start: a third less without the compiler
# and the collector that pay after minutes.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop that runs a test that is a coroutine."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--area", choices=sorted(AREAS), help="only the files of this area: tests/support/areas.py"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of other areas; `None` leaves the decision to pytest."""
    area = config.getoption("area")
    if area is None or not collection_path.name.startswith("test_"):
        return None
    is_left_out = not is_of(area, collection_path.relative_to(_ROOT).as_posix())
    return is_left_out or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(_ROOT / "integration"):
        item.add_marker(pytest.mark.integration)
    if item.path == _NEWCOMER_END_TO_END:
        is_newcomer = item.get_closest_marker("end_to_end") is not None
    else:
        is_quick = item.get_closest_marker("slow") is None
        is_newcomer = is_quick and any(item.path.is_relative_to(_ROOT / at) for at in _NEWCOMER)
    if is_newcomer:
        item.add_marker(pytest.mark.newcomer)


# Before pytest looks at the marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_out(items)
    # What the others leave is read there.
    items.sort(key=lambda item: item.path == _ROOT / "integration" / "test_every_lake.py")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    folders = (rank for rank, at in enumerate(_LONG_FIRST) if item.path.is_relative_to(_ROOT / at))
    # The syntax trees of all files, which those tests keep, slow whatever comes after them.
    is_last = item.path.is_relative_to(_ROOT / "tests" / "architecture")
    return next(folders, len(_LONG_FIRST) + is_last)


def _leave_out(items: list[pytest.Item]) -> None:
    """Leave cases of tests that are `one_of` so many to `make long`, the same ones each time."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_of") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, all_of_it in cases.items():
        mark = all_of_it[0].get_closest_marker("one_of")
        assert mark is not None
        kept_count = -(-len(all_of_it) // mark.args[0])
        for item in Random(test).sample(all_of_it, len(all_of_it) - kept_count):
            item.add_marker("long")


def pytest_collection_finish() -> None:
    # All that lives as long as the process: no collection looks at it again.
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    fork_from_now_on()


def pytest_unconfigure() -> None:
    end_forking()
