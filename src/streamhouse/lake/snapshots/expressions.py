"""A reader's condition as an expression of Iceberg, for pruning manifests and partitions.

Invariant: an expression accepts every row meant by its constructor. Other rows may be accepted too:
a condition beyond Iceberg becomes "any row", or "any row with a value", and a reader applies the
condition to the rows. For the same reason no expression is negated as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa
from pyiceberg.expressions import (
    AlwaysFalse,
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNaN,
    IsNull,
    LessThan,
    LessThanOrEqual,
    NotEqualTo,
    NotIn,
    NotNaN,
    NotNull,
    NotStartsWith,
    Or,
    Reference,
    StartsWith,
    literals,
)

from streamhouse.core.model.values.calendar import days_of
from streamhouse.core.types.registry import type_of

__all__ = ["Expression", "FilterColumn", "all_of", "any_of", "any_row", "no_row"]

Expression = BooleanExpression
Comparison = Literal["=", "!=", "<", "<=", ">", ">="]

# pyiceberg ignores the values of a longer list: a longer list gets its range as well.
IN_VALUES_PRUNED_MAX: Final = 200

# Python's first day, and the day after its last.
_FIRST_DAY: Final = days_of(1, 1, 1)
_END_DAY: Final = days_of(10_000, 1, 1)

_COMPARISONS: Final[dict[Comparison, Callable[..., Expression]]] = {
    "=": EqualTo,
    "!=": NotEqualTo,
    "<": LessThan,
    "<=": LessThanOrEqual,
    ">": GreaterThan,
    ">=": GreaterThanOrEqual,
}
_LITERALS: Final[dict[str | None, Callable[[Any], literals.Literal[Any]]]] = {
    "boolean": literals.BooleanLiteral,
    "int": literals.LongLiteral,
    "long": literals.LongLiteral,
    "float": literals.FloatLiteral,
    "double": literals.DoubleLiteral,
    "string": literals.StringLiteral,
    "binary": literals.BinaryLiteral,
    "date": literals.DateLiteral,
    "timestamp": literals.TimestampLiteral,
    "timestamptz": literals.TimestampLiteral,
}
"""The class of a literal by Iceberg's name of a type; a decimal has a name with parameters."""


def any_row() -> Expression:
    """Accept every row."""
    return AlwaysTrue()


def no_row() -> Expression:
    """Accept no row."""
    return AlwaysFalse()


def all_of(expressions: Sequence[Expression]) -> Expression:
    """Accept rows accepted by every expression, of at least one."""
    return And(*expressions) if len(expressions) > 1 else expressions[0]


def any_of(expressions: Sequence[Expression]) -> Expression:
    """Accept rows accepted by any expression, of at least one."""
    return Or(*expressions) if len(expressions) > 1 else expressions[0]


@dataclass(frozen=True, slots=True)
class FilterColumn:
    """A column with its path of names, and its type in Arrow.

    Values are plain: a day or microseconds since 1970 is a number, NaN is compared with its own
    functions.
    """

    path: tuple[str, ...]
    type: pa.DataType

    @property
    def is_expressible(self) -> bool:
        """Whether Iceberg has expressions for the column."""
        # Iceberg's names of nested fields join the parts with dots, so a dot in one is ambiguous.
        return not pa.types.is_nested(self.type) and not any("." in part for part in self.path)

    def is_null(self) -> Expression:
        """Accept the rows without a value."""
        # A required field of an optional struct is NULL with the struct, which pyiceberg overlooks.
        return self._test(IsNull) if len(self.path) == 1 else any_row()

    def is_not_null(self) -> Expression:
        """Accept the rows with a value."""
        return self._test(NotNull)

    def is_nan(self) -> Expression:
        """Accept NaN."""
        return self._test(IsNaN)

    def is_not_nan(self) -> Expression:
        """Accept every value but NaN."""
        return self._test(NotNaN)

    def compare(self, operator: Comparison, value: Any) -> Expression:
        """Accept the values for which the comparison holds; Iceberg compares no NaN."""
        if type_of(self.type).day is not None:
            # The library's projections would do the same, and find the next value beyond the years
            # that they know.
            if operator == ">":
                operator, value = ">=", value + 1
            elif operator == "<":
                operator, value = "<=", value - 1
        if not self._has_known_years([value]):
            return self.is_not_null()
        return self._test(_COMPARISONS[operator], _literal(self.type, value))

    def is_in(self, values: Sequence[Any]) -> Expression:
        """Accept the values, which are never empty."""
        if len(values) == 1:
            return self.compare("=", values[0])
        if not self._has_known_years(values):
            return self.is_not_null()
        test = self._test(In, [_literal(self.type, value) for value in values])
        if len(values) <= IN_VALUES_PRUNED_MAX:
            return test
        return And(test, self.compare(">=", min(values)), self.compare("<=", max(values)))

    def is_not_in(self, values: Sequence[Any]) -> Expression:
        """Accept every value except `values`, which are never empty."""
        if len(values) == 1:
            return self.compare("!=", values[0])
        if not self._has_known_years(values):
            return self.is_not_null()
        return self._test(NotIn, [_literal(self.type, value) for value in values])

    def starts_with(self, prefix: str) -> Expression:
        """Accept the texts with this prefix."""
        return self._test(StartsWith, _literal(self.type, prefix))

    def does_not_start_with(self, prefix: str) -> Expression:
        """Accept the texts without this prefix."""
        return self._test(NotStartsWith, _literal(self.type, prefix))

    def _test(self, kind: Callable[..., Expression], *values: Any) -> Expression:
        return kind(Reference(".".join(self.path)), *values) if self.is_expressible else any_row()

    def _has_known_years(self, values: Sequence[Any]) -> bool:
        """Whether the library's transforms know these dates or timestamps, as Python does."""
        day = type_of(self.type).day
        return day is None or all(_FIRST_DAY * day <= value < _END_DAY * day for value in values)


def _literal(data_type: pa.DataType, value: Any) -> literals.Literal[Any]:
    """Return the literal class of the lake column's type: the library then converts nothing.

    Its conversions between classes guess (a number for a timestamp, a string for a date) or lose
    (infinity is "above" every float).
    """
    return _LITERALS.get(type_of(data_type).iceberg_name, literals.DecimalLiteral)(value)
