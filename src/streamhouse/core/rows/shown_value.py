"""A value of a row as messages show it: as in SQL, and cut if long."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from streamhouse.core.model.values.calendar import python_value

__all__ = ["shown_value"]

_CHARACTERS_MAX: Final = 80


def shown_value(value: Any) -> str:
    """Return the text of a value of Python or Arrow, also of a time before the year 1."""
    if isinstance(value, pa.Scalar):
        value = python_value(value)
    if value is None:
        return "NULL"
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return f"{text[:_CHARACTERS_MAX]}..." if len(text) > _CHARACTERS_MAX else text
