"""Decimals of more digits than their type, which services of the past let through in one case.

No type of Iceberg holds them, so they must not stop the rounds of their table: such a value becomes
null, and the log says where it was. Where null cannot be, the round says what to do.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.storage_service.errors import UnsupportedError
from streamhouse.storage_service.model.lake_values import decimal_limits

__all__ = ["without_overlong_decimals"]

_logger = logging.getLogger(__name__)


def without_overlong_decimals(
    column: pa.ChunkedArray, field: pa.Field, *, offsets: npt.NDArray[Any]
) -> pa.ChunkedArray:
    """Return the column with null for each decimal of too many digits; `offsets` are the rows'.

    Raises `UnsupportedError` naming column and offset where null cannot be.
    """
    limits = decimal_limits(field.name, column.type)
    if all(limit.keeps(chunk) for limit in limits for chunk in column.chunks):
        return column
    (limit, *_) = limits
    if pa.types.is_nested(column.type) or not field.nullable:
        rows = pa.concat_arrays(column.chunks)
        row = next(i for i in range(len(rows)) if not all(k.keeps(rows[i : i + 1]) for k in limits))
        raise UnsupportedError(
            f"column '{field.name}' has a value {limit.reason} at offset {int(offsets[row])}, and"
            " no null can take its place: delete or replace the row, or overwrite the table"
        )
    low, high = (pa.scalar(bound, column.type) for bound in (limit.lowest, limit.highest))
    is_wrong = pc.fill_null(pc.or_(pc.less(column, low), pc.greater(column, high)), False)
    for row in np.flatnonzero(np.asarray(is_wrong)).tolist():
        _logger.warning(
            "column %s has a value %s at offset %d: the lake gets null instead",
            field.name,
            limit.reason,
            int(offsets[row]),
        )
    return pc.if_else(is_wrong, pa.scalar(None, column.type), column)
