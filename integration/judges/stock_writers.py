"""A pytest plugin for one run: a test in which stock pyiceberg has to write version 3 is skipped.

pyiceberg 0.12 reads tables of format version 3 and writes none; in many tests it is the other
engine that changes a lake table.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import pytest

__all__ = ["pytest_runtest_makereport"]

_REFUSALS: Final = (
    "Cannot write manifest for table version: 3",
    "Cannot write manifest list for table version: 3",
    "Writing V3 is not yet supported",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and _is_refusal(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "Skipped: stock pyiceberg writes no version 3")
    return report


def _is_refusal(error: BaseException | None) -> bool:
    """Whether pyiceberg has refused to write, also behind errors that came of it."""
    while error is not None:
        if any(refusal in str(error) for refusal in _REFUSALS):
            return True
        error = error.__cause__ or error.__context__
    return False
