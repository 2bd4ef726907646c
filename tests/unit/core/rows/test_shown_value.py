"""Messages show a value in one form, wherever the value comes from."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.rows.shown_value import shown_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (7, "7"),
        ("tea", "'tea'"),
        (b"\xff", "b'\\xff'"),
        (decimal.Decimal("1.50"), "1.50"),
        (datetime.date(2026, 1, 31), "2026-01-31"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_a_value_of_python_and_of_arrow_is_shown_alike(value: Any, text: str) -> None:
    assert shown_value(value) == text
    assert shown_value(pa.scalar(value)) == text


def test_a_long_value_is_cut_and_a_time_that_python_lacks_is_shown() -> None:
    assert shown_value("x" * 200) == "'" + "x" * 79 + "..."
    assert "-" in shown_value(pa.scalar(-(2**60), pa.timestamp("us")))
