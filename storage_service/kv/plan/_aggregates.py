"""The aggregation merge engine: the rows of a chain of upserts, one column at a time.

The state of a column after a row depends on the stored value and the earlier rows of the chain
only, so each column is a running aggregate over segments: a segment is an initial state, if any,
followed by its values. A delete ends a segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.merge_engine import Aggregate, ColumnAggregate
from streamhouse.core.model.schema import type_name
from streamhouse.storage_service.kv.plan._segment_scan import (
    Segments,
    extreme_positions,
    latest_valid_positions,
    running_any,
    running_decimal_sums,
    running_float_sums,
    running_integer_sums,
    running_texts,
)

__all__ = ["States", "aggregate_column"]


@dataclass(frozen=True, slots=True)
class States:
    """The alignment of rows and their initial states.

    Each segment has a slot for its initial state, then one for each row: `row_slot` has the slots
    of rows, by place. `segments` are over slots. `has_state` marks segments with an initial state.
    """

    segments: Segments
    row_slot: npt.NDArray[np.int64]
    has_state: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, starts: npt.NDArray[np.bool_], has_state: npt.NDArray[np.bool_]) -> States:
        """Make the slots of rows; a segment starts at each of `starts`."""
        row_slot = np.arange(len(starts)) + np.cumsum(starts)
        return cls(
            Segments(row_slot[starts] - 1, len(starts) + len(has_state)), row_slot, has_state
        )

    def slots(self, states: pa.Array, values: pa.Array) -> pa.Array:
        """Return one value a slot: initial states, nulls for missing states, and row values."""
        from_ = np.empty(len(self.row_slot) + len(self.has_state), dtype=np.int64)
        from_[self.row_slot] = np.arange(len(values)) + len(states)
        from_[self.segments.starts] = np.cumsum(self.has_state) - 1
        missing = np.zeros(len(from_), dtype=np.bool_)
        missing[self.segments.starts] = ~self.has_state
        both = pa.concat_arrays([states, values]) if len(states) else values
        return both.take(pa.array(from_, mask=missing))

    def of_rows(self, slots: pa.Array) -> pa.Array:
        """Return the values of the rows' slots."""
        return slots.take(pa.array(self.row_slot))


def aggregate_column(
    states: pa.Array,
    values: pa.Array,
    slots: States,
    aggregate: ColumnAggregate,
    *,
    row_number: Callable[[int], int],
    where: str,
) -> pa.Array:
    """Return the column after each row, by place.

    `states` are the stored values of the segments with a state, `values` the rows' values.
    `row_number` and `where` are for errors: the caller's number of the row at a place, and the
    column's name.
    """
    function = aggregate.function
    if function is Aggregate.LAST_VALUE:
        return values
    both = slots.slots(states, values)
    segments = slots.segments
    match function:
        case Aggregate.FIRST_VALUE:
            first = segments.starts + ~slots.has_state
            return slots.of_rows(both.take(pa.array(first[segments.index])))
        case Aggregate.LAST_NON_NULL:
            latest = latest_valid_positions(_valid(both), segments)
            return slots.of_rows(both.take(pa.array(latest)))
        case Aggregate.MIN | Aggregate.MAX:
            best = extreme_positions(both, segments, greatest=function is Aggregate.MAX)
            return slots.of_rows(both.take(pa.array(best)))
        case Aggregate.BOOL_AND | Aggregate.BOOL_OR:
            return slots.of_rows(_boolean(both, segments, any_=function is Aggregate.BOOL_OR))
        case Aggregate.LISTAGG:
            return slots.of_rows(running_texts(both, segments, delimiter=aggregate.delimiter))
        case Aggregate.COUNT:
            # The count of only nulls is 0, not null.
            both = slots.slots(states, values.is_valid().cast(values.type))
    sums = _sums(both, segments)
    wrong = np.flatnonzero(sums.overflow[slots.row_slot])
    if len(wrong):
        raise InvalidRequestError(
            f"{where}: {function} overflows {type_name(values.type)} at row"
            f" {row_number(int(wrong[0]))};"
            " make the column wider"
        )
    return slots.of_rows(sums.values)


def _valid(values: pa.Array) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _boolean(values: pa.Array, segments: Segments, *, any_: bool) -> pa.Array:
    """Return whether any, or all, of the values so far are true; null before the first."""
    marks = values if any_ else pc.invert(values)
    any_marked = running_any(marks.fill_null(False).to_numpy(zero_copy_only=False), segments)
    seen = running_any(_valid(values), segments)
    return pa.array(any_marked if any_ else ~any_marked, mask=~seen)


@dataclass(frozen=True, slots=True)
class _Sums:
    values: pa.Array
    overflow: npt.NDArray[np.bool_]


def _sums(values: pa.Array, segments: Segments) -> _Sums:
    t = values.type
    unseen = ~running_any(_valid(values), segments)
    if pa.types.is_floating(t):
        # Adding minus zero changes nothing, not even the sign of a zero.
        zero = pa.scalar(-0.0, t)
        sums = running_float_sums(values.fill_null(zero).to_numpy(), segments)
        return _Sums(pa.array(sums, t, mask=unseen), np.zeros(len(sums), dtype=np.bool_))
    if pa.types.is_decimal(t):
        return _decimal_sums(values, segments, unseen)
    numbers = values.cast(pa.int64()).fill_null(0).to_numpy()
    integers, overflow = running_integer_sums(numbers, segments)
    if t.bit_width < 64:
        limit = 1 << (t.bit_width - 1)
        overflow |= (integers < -limit) | (integers >= limit)
    narrow = integers.astype(f"i{t.bit_width // 8}")
    return _Sums(pa.array(narrow, t, mask=unseen), overflow)


_LOW: Final = (1 << 64) - 1


def _decimal_sums(values: pa.Array, segments: Segments, unseen: npt.NDArray[np.bool_]) -> _Sums:
    """Add the unscaled integers as Python integers without a limit; then check the precision."""
    t = values.type
    filled = values.fill_null(pa.scalar(Decimal(0), t))
    limbs = np.frombuffer(filled.buffers()[1], "<u8")[2 * filled.offset :][: 2 * len(filled)]
    low, high = limbs[0::2], limbs[1::2].view("<i8")
    unscaled: npt.NDArray[Any] = high.astype(object) * (_LOW + 1) + low.astype(object)
    sums = running_decimal_sums(unscaled, segments)
    overflow = np.abs(sums) >= 10**t.precision
    safe_sums = np.where(overflow, 0, sums)
    out = np.empty(2 * len(safe_sums), dtype="<u8")
    out[0::2] = (safe_sums & _LOW).astype("<u8")
    out[1::2] = (safe_sums >> 64).astype("<i8").view("<u8")
    validity = pa.py_buffer(np.packbits(~unseen, bitorder="little"))
    array = pa.Array.from_buffers(t, len(safe_sums), [validity, pa.py_buffer(out)])
    return _Sums(array, overflow.astype(np.bool_))
