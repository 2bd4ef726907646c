"""The obvious row-by-row model of predicates, and hypothesis strategies for rows and predicates.

The model computes in plain Python values: True, False or None a row. The vectorised evaluation,
the pruning and the lake expression are all judged by it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cmp_to_key
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from streamhouse.reading.where._evaluation import filter_batch
from streamhouse.reading.where.predicate import (
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

TYPES: dict[str, pa.DataType] = {
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "small": pa.int16(),
    "number": pa.int32(),
    "big": pa.int64(),
    "price": pa.decimal128(9, 2),
    "wide": pa.decimal128(38, 10),
    "ratio": pa.float32(),
    "amount": pa.float64(),
    "name": pa.string(),
    "other": pa.string(),
    "raw": pa.binary(),
    "day": pa.date32(),
    "at": pa.timestamp("us", tz="UTC"),
    "local": pa.timestamp("us"),
}
COLUMNS = {name: PredicateColumn((name,), data_type) for name, data_type in TYPES.items()}
NESTED = PredicateColumn(("place", "zone"), pa.int32())
# The first day that Python has, and the one after the last.
PYTHON_DAYS = (-719_162, 2_932_897)
OPERATORS: tuple[Operator, ...] = ("=", "!=", "<", "<=", ">", ">=")

_float64 = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.5, 3.25, math.inf, -math.inf, math.nan, 1e300]), st.floats()
)
_text = st.one_of(
    st.sampled_from(["", "a", "ab", "abc", "b%", "a_c", "é", "😀", "a\nb", "\uffff", "\\", "(a+)"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)


def integers(bits: int) -> st.SearchStrategy[int]:
    half = 1 << (bits - 1)
    return st.one_of(
        st.integers(-3, 3),
        st.sampled_from([-half, half - 1, half // 2]),
        st.integers(-half, half - 1),
    )


def decimals(t: pa.DataType) -> st.SearchStrategy[Decimal]:
    most = 10**t.precision - 1
    unscaled = st.one_of(st.integers(-300, 300), st.integers(-most, most))
    return unscaled.map(lambda n: scaled(n, t.scale))


def scaled(unscaled: int, scale: int) -> Decimal:
    digits = tuple(int(digit) for digit in str(abs(unscaled)))
    return Decimal((int(unscaled < 0), digits, -scale))


def values(t: pa.DataType) -> st.SearchStrategy[Any]:
    """Plain values of a type, with many near each other so that comparisons meet."""
    if pa.types.is_boolean(t):
        return st.booleans()
    if pa.types.is_signed_integer(t):
        return integers(t.bit_width)
    if pa.types.is_decimal(t):
        return decimals(t)
    if pa.types.is_float32(t):
        with np.errstate(over="ignore"):
            return _float64.map(_float32)
    if pa.types.is_float64(t):
        return _float64
    if pa.types.is_string(t):
        return _text
    if pa.types.is_binary(t):
        return st.binary(max_size=3)
    if pa.types.is_date32(t):
        return st.one_of(
            st.integers(-2, 2), _near(*PYTHON_DAYS), st.integers(-700_000, 2_900_000), integers(32)
        )
    day = 86_400_000_000
    near = st.integers(-2, 2).flatmap(lambda d: st.integers(-2, 2).map(lambda us: d * day + us))
    ends = _near(*(n * day for n in PYTHON_DAYS))
    return st.one_of(near, ends, st.integers(-(10**16), 10**17), integers(64))


def _near(*numbers: int) -> st.SearchStrategy[int]:
    return st.builds(operator.add, st.sampled_from(numbers), st.integers(-2, 2))


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def literals(t: pa.DataType) -> st.SearchStrategy[Any]:
    """Values as the parser makes them: without -0.0."""
    found = values(t)
    return found.map(lambda v: v + 0.0) if pa.types.is_floating(t) else found


@st.composite
def rows(draw: st.DrawFn, *, size_max: int = 12, only: str | None = None) -> list[dict[str, Any]]:
    """Rows of all columns, with NULLs; some columns of some batches are wholly NULL.

    With `only`, the other columns are NULL.
    """
    count = draw(st.integers(0, size_max))
    columns: dict[str, list[Any]] = {}
    for name, data_type in TYPES.items():
        if only not in (None, name) or draw(st.integers(0, 9)) == 0:
            columns[name] = [None] * count
        else:
            column = st.one_of(st.none(), values(data_type), values(data_type))
            columns[name] = draw(st.lists(column, min_size=count, max_size=count))
    zone = st.one_of(st.none(), st.just({"zone": None}), integers(32).map(lambda n: {"zone": n}))
    if only is not None:
        zone = st.none()
    columns["place"] = draw(st.lists(zone, min_size=count, max_size=count))
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def to_batch(table_rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Return the Arrow form of rows of plain values."""
    arrays = []
    for name, data_type in TYPES.items():
        column = [row[name] for row in table_rows]
        if pa.types.is_date32(data_type):
            arrays.append(pa.array(column, pa.int32()).cast(data_type))
        elif pa.types.is_timestamp(data_type):
            arrays.append(pa.array(column, pa.int64()).cast(data_type))
        else:
            arrays.append(pa.array(column, data_type))
    place = pa.array([row["place"] for row in table_rows], pa.struct([("zone", pa.int32())]))
    return pa.record_batch([*arrays, place], names=[*TYPES, "place"])


def leaves_of(column: PredicateColumn) -> st.SearchStrategy[Node]:
    """Conditions on one column, plain or negated."""
    listed = st.lists(literals(column.type), max_size=4, unique_by=repr).map(tuple)
    found: list[st.SearchStrategy[Node]] = [
        st.builds(Compare, st.just(column), st.sampled_from(OPERATORS), literals(column.type)),
        st.builds(In, st.just(column), listed),
        st.just(IsNull(column)),
    ]
    if pa.types.is_string(column.type):
        found.append(st.builds(Like, st.just(column), like_parts()))
    plain = st.one_of(found)
    return st.one_of(plain, st.builds(Not, plain))


def leaves() -> st.SearchStrategy[Node]:
    """Conditions on one column or on two that can be compared."""
    pairs = [
        (left, right)
        for left in COLUMNS.values()
        for right in COLUMNS.values()
        if comparison_type(left.type, right.type) is not None
    ]
    operators = st.sampled_from(OPERATORS)
    columns = st.sampled_from([*COLUMNS.values(), NESTED])
    return st.one_of(
        st.builds(Constant, st.sampled_from([True, False, None])),
        columns.flatmap(leaves_of),
        columns.flatmap(leaves_of),
        leaves_of(COLUMNS["name"]),
        st.sampled_from(pairs).flatmap(
            lambda pair: st.builds(CompareColumns, st.just(pair[0]), operators, st.just(pair[1]))
        ),
    )


def like_parts() -> st.SearchStrategy[tuple[str | int | None, ...]]:
    part = st.one_of(st.none(), st.integers(1, 2), _text.filter(bool))

    def canonical(parts: list[str | int | None]) -> tuple[str | int | None, ...]:
        found: list[str | int | None] = []
        for p in parts:
            if not found or type(found[-1]) is not type(p):
                found.append(p)
        return tuple(found)

    return st.lists(part, min_size=1, max_size=4).map(canonical)


def nodes() -> st.SearchStrategy[Node]:
    """Trees of conditions."""
    return st.recursive(
        leaves(),
        lambda children: st.one_of(
            st.builds(Not, children),
            st.builds(And, st.lists(children, min_size=1, max_size=3).map(tuple)),
            st.builds(Or, st.lists(children, min_size=1, max_size=3).map(tuple)),
        ),
        max_leaves=6,
    )


def evaluate(node: Node, row: Mapping[str, Any]) -> bool | None:
    """Return the truth of `node` for one row of plain values."""
    match node:
        case Constant(value):
            return value
        case Not(child):
            inner = evaluate(child, row)
            return None if inner is None else not inner
        case And(children):
            found = [evaluate(child, row) for child in children]
            return False if False in found else None if None in found else True
        case Or(children):
            found = [evaluate(child, row) for child in children]
            return True if True in found else None if None in found else False
        case CompareColumns(left, operator, right):
            one, other = _read(left, row), _read(right, row)
            if one is None or other is None:
                return None
            common = comparison_type(left.type, right.type)
            return compare(
                _cast(one, left.type, common), operator, _cast(other, right.type, common)
            )
    value = _read(node.column, row)
    if isinstance(node, IsNull):
        return value is None
    if value is None:
        return None
    if isinstance(node, Compare):
        return compare(value, node.operator, node.value)
    if isinstance(node, In):
        return any(compare(value, "=", one) for one in node.values)
    pattern = "".join(
        ".*" if p is None else "." * p if isinstance(p, int) else re.escape(p) for p in node.parts
    )
    return re.fullmatch(pattern, value, re.DOTALL) is not None


def _read(column: PredicateColumn, row: Mapping[str, Any]) -> Any:
    value: Any = row
    for name in column.path:
        value = None if value is None else value[name]
    return value


def _cast(value: Any, t: pa.DataType, common: pa.DataType) -> Any:
    if pa.types.is_floating(common):
        return float(value)
    if pa.types.is_date32(t) and pa.types.is_timestamp(common):
        return value * 86_400_000_000
    return value


def truth_values(predicate: Predicate, batch: pa.RecordBatch) -> list[bool | None]:
    """Return what the vectorised evaluation finds of every row: its NOT keeps the FALSE ones."""
    positions = pa.array(range(batch.num_rows), pa.int64())
    numbered = batch.append_column("__position", positions)

    def kept(root: Node) -> set[int]:
        return set(filter_batch(Predicate(root), numbered)["__position"].to_pylist())

    true, false = kept(predicate.root), kept(Not(predicate.root))
    assert true.isdisjoint(false)
    return [True if i in true else False if i in false else None for i in range(batch.num_rows)]


def order(left: Any, right: Any) -> int:
    """Spark's total order of two values of one type: negative, zero or positive."""
    if isinstance(left, float) and (math.isnan(left) or math.isnan(right)):
        return int(math.isnan(left)) - int(math.isnan(right))
    if isinstance(left, str):
        left, right = left.encode(), right.encode()
    return int(left > right) - int(left < right)


def compare(left: Any, operator: Operator, right: Any) -> bool:
    """Compare two non-NULL values of one type."""
    sign = order(left, right)
    return {
        "=": sign == 0,
        "!=": sign != 0,
        "<": sign < 0,
        "<=": sign <= 0,
        ">": sign > 0,
        ">=": sign >= 0,
    }[operator]


SORT_KEY = cmp_to_key(order)
