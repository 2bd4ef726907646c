"""Python values for columns, and the refusals of values of other types."""

from __future__ import annotations

import datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from streamhouse.core.types.logical_type import LogicalType

__all__ = ["UnfitError", "UnknownFieldError", "python_value_of", "wrong_type"]

_NO_VALUES: Final = frozenset(("NAType", "NaTType"))


class UnfitError(ValueError):
    """A value that its column cannot hold; the message names the value and what to give instead."""


class UnknownFieldError(UnfitError):
    """A struct with a field that its column does not have."""


def python_value_of(value: Any, t: LogicalType) -> Any:
    """Return a value of Python, numpy, pandas or Arrow for `pa.array`; raises `UnfitError`."""
    value = _python(value)
    return None if value is None else t.of_python(value)


def _python(value: Any) -> Any:
    """Return a value wrapped by numpy, pandas or Arrow as a plain Python value."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    if type(value).__name__ in _NO_VALUES:
        return None
    if isinstance(value, np.datetime64):
        if np.isnat(value):
            return None
        exact = value.astype("datetime64[us]")
        if exact != value:
            raise UnfitError(f"{value} has parts of a microsecond, which no table keeps")
        return exact.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime.datetime) and getattr(value, "nanosecond", False):
        raise UnfitError(f"{value} has parts of a microsecond, which no table keeps")
    return value


def wrong_type(value: Any, t: LogicalType, instead: str = "") -> UnfitError:
    """Return the refusal of a value of another type; `instead` says what to give."""
    if isinstance(value, list | tuple | np.ndarray):
        instead = "; a dict is one row: whole columns are written as pa.table({...})"
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return UnfitError(f"{shown} is a {type(value).__name__}, no {t.name}{instead}")
