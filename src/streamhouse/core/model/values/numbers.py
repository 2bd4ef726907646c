"""Whole numbers of callers, in any form with only one meaning."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["whole_number"]


def whole_number(value: Any, *, least: int | None = None) -> int | None:
    """Return a whole number from `least` on, of Python or numpy; None for any other value.

    `True` and `1.0` are not whole numbers here.
    """
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if least is None or number >= least else None
