"""Which rows of an Arrow batch a predicate keeps: exactly those for which Spark finds it TRUE.

Invariants:
- SQL's three-valued logic: a row for which the predicate is NULL is dropped
- Spark's order of values: NaN equals NaN and is above every number, -0.0 equals 0.0, strings and
  binaries compare bytewise
- vectorised `pyarrow.compute` only, no row is touched in Python, and `pyarrow.dataset` is not
  imported (it is slow to load on executors)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError, UnknownColumnError
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.core.model.values.numpy_arrays import (
    boolean_array,
    integer_array,
    integer_values,
)
from streamhouse.core.model.values.zone import Zone
from streamhouse.reading.where._row_evaluation import NotByRowError, truth_of_row
from streamhouse.reading.where.predicate import (
    FLIPPED_OPERATOR,
    And,
    Compare,
    CompareColumns,
    Constant,
    In,
    IsNull,
    Like,
    Node,
    Not,
    Operator,
    Or,
    Predicate,
    PredicateColumn,
    comparison_type,
)

__all__ = [
    "false_rows",
    "filter_batch",
    "filtered",
]

# One truth value a row, or one for all rows.
_Truth: TypeAlias = pa.BooleanArray | pa.BooleanScalar

_FUNCTIONS: Final[dict[Operator, Callable[..., _Truth]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_REGEX_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$]")
# Not `pa.scalar`, which imports pandas: every executor imports this module.
_NULL: Final = pa.nulls(1, pa.bool_())[0]


def filter_batch(predicate: Predicate, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of `batch` for which `predicate` is TRUE, in order, all columns kept.

    The batch must have every column of `predicate.columns`; other columns are not looked at.
    """
    truth = _evaluate(predicate.root, batch)
    if isinstance(truth, pa.Scalar):
        return batch if truth.as_py() is True else batch.slice(0, 0)
    if truth.true_count == batch.num_rows:
        return batch
    return filtered(batch, truth)


def false_rows(predicate: Predicate, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
    """Mark the rows of `batch` for which `predicate` is FALSE; None if there are none.

    NULL is not FALSE. The batch has the columns that `filter_batch` needs.
    """
    if batch.num_rows == 1:
        try:
            is_broken = truth_of_row(predicate.root, batch) is False
        except NotByRowError:
            pass
        else:
            return np.ones(1, dtype=np.bool_) if is_broken else None
    truth = _evaluate(predicate.root, batch)
    if isinstance(truth, pa.Scalar):
        is_false = truth.as_py() is False and batch.num_rows > 0
        return np.ones(batch.num_rows, dtype=np.bool_) if is_false else None
    if not truth.false_count:
        return None
    mask: npt.NDArray[np.bool_] = ~truth.fill_null(True).to_numpy(zero_copy_only=False)
    return mask


def _evaluate(node: Node, batch: pa.RecordBatch) -> _Truth:
    match node:
        case Constant(value):
            return pa.scalar(value, pa.bool_())
        case Compare(column, operator, value):
            return _compare(_read(column, batch), operator, value)
        case CompareColumns():
            return _compare_columns(node, batch)
        case In():
            return _in(node, batch)
        case IsNull(column):
            return pc.is_null(_read(column, batch))
        case Like(column, parts):
            return _like(_read(column, batch), parts)
        case Not(child):
            return pc.invert(_evaluate(child, batch))
        case And(children):
            return _all(children, batch, pc.and_kleene)
        case Or(children):
            return _all(children, batch, pc.or_kleene)


def _all(
    children: tuple[Node, ...], batch: pa.RecordBatch, combine: Callable[..., _Truth]
) -> _Truth:
    truth = _evaluate(children[0], batch)
    for child in children[1:]:
        truth = combine(truth, _evaluate(child, batch))
    return truth


def _read(column: PredicateColumn, batch: pa.RecordBatch) -> pa.Array:
    """Return the column as an array of its table type; a field of a NULL struct is NULL."""
    index = batch.schema.get_field_index(column.path[0])
    if index < 0:
        raise UnknownColumnError(
            f"a batch has no column '{column.path[0]}', which the where expression reads"
            f" (columns: {', '.join(batch.schema.names)})"
        )
    array = batch.column(index)
    for name in column.path[1:]:
        position = array.type.get_field_index(name) if pa.types.is_struct(array.type) else -1
        if position < 0:
            raise UnknownColumnError(f"a batch has no field '{column}', which where reads")
        array = pc.struct_field(array, [position])
    if array.type == column.type or pa.types.is_nested(column.type):
        return array
    try:
        return array.cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaMismatchError(
            f"column '{column}' arrived as {type_name(array.type)} and is not the"
            f" {type_name(column.type)} that the where expression was made for: {error}"
        ) from error


def _compare(array: pa.Array, operator: Operator, value: object) -> _Truth:
    compare = _FUNCTIONS[operator]
    if not isinstance(value, float):
        return compare(array, pa.scalar(value, array.type))
    if not math.isnan(value):
        mask = compare(array, pa.scalar(value, array.type))
        return pc.or_(mask, pc.is_nan(array)) if operator in (">", ">=") else mask
    match operator:
        case "=" | ">=":
            return pc.is_nan(array)
        case "!=" | "<":
            return pc.invert(pc.is_nan(array))
        case "<=" | ">":
            return _if_valid(array, value=operator == "<=")


def _compare_columns(node: CompareColumns, batch: pa.RecordBatch) -> _Truth:
    common = comparison_type(node.left.type, node.right.type)
    assert common is not None, node
    if node.needs_zone:
        return _compare_in_zone(node, batch)
    if pa.types.is_timestamp(common) and pa.types.is_date32(node.left.type):
        return _compare_day_and_time(node.operator, node.left, node.right, batch)
    if pa.types.is_timestamp(common) and pa.types.is_date32(node.right.type):
        flipped = FLIPPED_OPERATOR[node.operator]
        return _compare_day_and_time(flipped, node.right, node.left, batch)
    # Spark rounds integers and decimals to doubles too, so an unsafe cast is the exact one here.
    left_values = _read(node.left, batch).cast(common, safe=not pa.types.is_floating(common))
    right_values = _read(node.right, batch).cast(common, safe=not pa.types.is_floating(common))
    mask = _FUNCTIONS[node.operator](left_values, right_values)
    if not pa.types.is_floating(common):
        return mask
    left_nan, right_nan = pc.is_nan(left_values), pc.is_nan(right_values)
    match node.operator:
        case "=":
            return pc.or_(mask, pc.and_(left_nan, right_nan))
        case "!=":
            return pc.and_not(mask, pc.and_(left_nan, right_nan))
        case "<":
            return pc.or_(mask, pc.and_not(right_nan, left_nan))
        case "<=":
            return pc.or_(mask, right_nan)
        case ">":
            return pc.or_(mask, pc.and_not(left_nan, right_nan))
        case ">=":
            return pc.or_(mask, left_nan)


def _compare_day_and_time(
    operator: Operator, day: PredicateColumn, time: PredicateColumn, batch: pa.RecordBatch
) -> _Truth:
    """Compare a date, as its midnight, with a timestamp: as days, since most have no timestamp."""
    days, times = _read(day, batch), _read(time, batch)
    microseconds = integer_values(times.view(pa.int64()).fill_null(0))
    midnights, day_us = np.divmod(microseconds, DAY_US)
    if operator in ("<", ">="):
        # The first midnight from the time on; the others ask about the last one up to it.
        midnights += day_us != 0
    numbers = days.view(pa.int32()).cast(pa.int64())
    mask = _FUNCTIONS[operator](numbers, integer_array(midnights, pa.int64()))
    if operator == "=":
        mask = pc.and_(mask, boolean_array(day_us == 0))
    elif operator == "!=":
        mask = pc.or_(mask, boolean_array(day_us != 0))
    return pc.if_else(pc.and_(days.is_valid(), times.is_valid()), mask, _NULL)


def _compare_in_zone(node: CompareColumns, batch: pa.RecordBatch) -> _Truth:
    """Compare moments with dates or wall clock times: days in UTC first, times of a day second."""
    sides = [_read(column, batch) for column in (node.left, node.right)]
    (left_days, left_rest), (right_days, right_rest) = (_moments(side, node.zone) for side in sides)
    is_same_day = left_days == right_days
    less = (left_days < right_days) | (is_same_day & (left_rest < right_rest))
    equal = is_same_day & (left_rest == right_rest)
    masks = {
        "=": equal,
        "!=": ~equal,
        "<": less,
        "<=": less | equal,
        ">": ~(less | equal),
        ">=": ~less,
    }[node.operator]
    are_valid = pc.and_(sides[0].is_valid(), sides[1].is_valid())
    return pc.if_else(are_valid, boolean_array(masks), _NULL)


def _moments(array: pa.Array, zone: Zone) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if pa.types.is_date32(array.type):
        days = array.view(pa.int32()).cast(pa.int64()).fill_null(0)
        return zone.midnights(integer_values(days))
    microseconds = integer_values(array.view(pa.int64()).fill_null(0))
    if array.type.tz is None:
        return zone.moments(microseconds)
    days_in_utc, day_us = np.divmod(microseconds, DAY_US)
    return days_in_utc, day_us


def _in(node: In, batch: pa.RecordBatch) -> _Truth:
    array = _read(node.column, batch)
    if not node.values:
        return _if_valid(array, value=False)
    if not pa.types.is_floating(array.type):
        mask = pc.is_in(array, value_set=pa.array(node.values, array.type))
        return pc.if_else(pc.is_valid(array), mask, _NULL)
    # Arrow's hash tables tell -0.0 from 0.0; adding 0.0 makes one of the two.
    numbers = [v for v in node.values if isinstance(v, float) and not math.isnan(v)]
    mask = pc.is_in(
        pc.add(array, pa.scalar(0.0, array.type)), value_set=pa.array(numbers, array.type)
    )
    if len(numbers) < len(node.values):
        mask = pc.or_(mask, pc.is_nan(array))
    return pc.if_else(pc.is_valid(array), mask, _NULL)


def _like(array: pa.Array, parts: tuple[str | int | None, ...]) -> _Truth:
    match parts:
        case (None,):
            return _if_valid(array, value=True)
        case (str(text), None):
            return pc.starts_with(array, text)
        case (None, str(text)):
            return pc.ends_with(array, text)
        case (None, str(text), None):
            return pc.match_substring(array, text)
    return pc.match_substring_regex(array, r"(?s)\A" + "".join(map(_regex, parts)) + r"\z")


def _regex(part: str | int | None) -> str:
    if part is None:
        return ".*"
    return _REGEX_SPECIAL.sub(r"\\\g<0>", part) if isinstance(part, str) else "." * part


def _if_valid(array: pa.Array, *, value: bool) -> pa.BooleanArray:
    """Return `value` for every row, but NULL where the column is NULL."""
    return pc.if_else(pc.is_valid(array), pa.scalar(value), _NULL)


def filtered(batch: pa.RecordBatch, mask: pa.BooleanArray) -> pa.RecordBatch:
    """Return the rows of `batch` for which `mask` is true.

    `RecordBatch.filter` turns the mask into row numbers and takes rows one by one. If most rows
    stay, and five columns are strings, the price is twice that of copying each column's runs.
    """
    if not batch.num_columns:
        return batch.filter(mask)
    arrays = [column.filter(mask) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
