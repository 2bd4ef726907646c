"""Whole numbers that callers give, in any form that has only one meaning."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["whole_number"]


def whole_number(value: Any, *, least: int) -> int | None:
    """Return a whole number from `least` on, which may be numpy's; None if it is none.

    `True` and `1.0` are none.
    """
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number >= least else None
