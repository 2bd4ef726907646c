"""The needs of a query by Spark's planner: the columns and the rows of each table that can matter.

Spark plans the query over stand-ins: empty Parquet tables with the columns of our tables. The plan
shows the read of each stand-in, and a plan is right for any rows that the tables may have. Unread
columns, and rows dropped by the plan's scans, do not affect the query's answer, so our tables are
read no further. Outer joins, subqueries, windows and names are resolved by Spark.

The planner must be within reach, in the driver's JVM: not under Spark Connect
(`_relation_needs.py`).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from streamhouse.reading.options.quoted_names import quoted

__all__ = [
    "KEY_OPTION",
    "MOMENTS",
    "PlanNeeds",
    "ScanNeeds",
    "each",
    "literal_text",
    "needs_of",
]

KEY_OPTION: Final = "streamhouse"
"""The option that identifies a stand-in's scan."""

_COMPARISONS: Final = {
    "EqualTo": "=",
    "EqualNullSafe": "<=>",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_TEXT_TESTS: Final = {"StartsWith": "startswith", "EndsWith": "endswith", "Contains": "contains"}
_WHOLE_NUMBERS: Final = {"tinyint": "Y", "smallint": "S", "int": "", "bigint": "L"}
_DIGITS: Final = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_MOMENTS: Final = frozenset({"date", "timestamp", "timestamp_ntz"})
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
# Spark replaces these words by the current time or date when it plans.
MOMENTS: Final = re.compile(r"\b(now|today|tomorrow|yesterday)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ScanNeeds:
    """The read of one scan of a table: its columns, and the rows for which all conditions are true.

    `is_filtered` tells that Spark would drop rows; `conditions` are the filters with a text.
    """

    key: str
    columns: tuple[str, ...]
    conditions: tuple[str, ...]
    is_filtered: bool


@dataclass(frozen=True, slots=True)
class PlanNeeds:
    """The reads of all scans; `counted` is the key of a table whose rows are only counted."""

    scans: tuple[ScanNeeds, ...]
    counted: str | None = None


def needs_of(frame: DataFrame) -> PlanNeeds | None:
    """Return the needs of a DataFrame over stand-ins; None if the plan does not tell."""
    executed = getattr(frame, "_jdf", None)
    if executed is None:
        return None
    try:
        query = executed.queryExecution()
        if _is_of_the_moment(query.analyzed(), frame):
            return None
        scans = tuple(_scans(query.executedPlan()))
        return PlanNeeds(scans, _counted(query.optimizedPlan(), scans))
    except (Py4JError, PySparkException):
        return None


def _is_of_the_moment(analyzed: Any, frame: DataFrame) -> bool:
    """Whether the plan depends on the moment: the date, the user, a session's variables."""
    jvm: Any = frame.sparkSession._jvm
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    text = analyzed.toString()
    return (
        analyzed.containsPattern(patterns.CURRENT_LIKE())
        # Spark 4.0 has no pattern for variables.
        or "variablereference(" in text
        or MOMENTS.search(text) is not None
    )


def _scans(plan: Any) -> Iterator[ScanNeeds]:
    """Yield the stand-ins' scans of a physical plan, also in subqueries."""
    name = plan.getClass().getSimpleName()
    if name == "AdaptiveSparkPlanExec":
        yield from _scans(plan.initialPlan())
        return
    if name == "FileSourceScanExec":
        key = plan.relation().options().get(KEY_OPTION)
        if key.isDefined():
            yield _scan(key.get(), plan)
    for child in (*each(plan.children()), *each(plan.subqueries())):
        yield from _scans(child)


def _scan(key: str, scan: Any) -> ScanNeeds:
    filters = [*each(scan.dataFilters()), *each(scan.partitionFilters())]
    texts = [_condition(predicate) for predicate in filters]
    columns = tuple(scan.requiredSchema().fieldNames())
    return ScanNeeds(key, columns, tuple(t for t in texts if t is not None), bool(filters))


def _counted(plan: Any, scans: tuple[ScanNeeds, ...]) -> str | None:
    """Return the key of the table whose rows an optimized plan only counts."""
    if len(scans) != 1 or scans[0].columns or scans[0].is_filtered:
        return None
    if plan.getClass().getSimpleName() != "Aggregate" or plan.groupingExpressions().size():
        return None
    results = each(plan.aggregateExpressions())
    if len(results) != 1 or not _is_count(results[0]):
        return None
    below = plan.child()
    while below.getClass().getSimpleName() == "Project":
        below = below.child()
    return scans[0].key if below.getClass().getSimpleName() == "LogicalRelation" else None


def _is_count(result: Any) -> bool:
    if result.getClass().getSimpleName() != "Alias":
        return False
    aggregate = result.child()
    if aggregate.getClass().getSimpleName() != "AggregateExpression":
        return False
    function = aggregate.aggregateFunction()
    return (
        function.getClass().getSimpleName() == "Count"
        and not aggregate.isDistinct()
        and aggregate.filter().isEmpty()
        and all(_literal(child) is not None for child in each(function.children()))
    )


def each(sequence: Any) -> list[Any]:
    """Return the elements of a JVM sequence."""
    return [sequence.apply(index) for index in range(sequence.size())]


def _condition(node: Any) -> str | None:
    """Return an expression as text for the option `where`; None without an exact text."""
    name = node.getClass().getSimpleName()
    if name in ("And", "Or"):
        sides = [_condition(node.left()), _condition(node.right())]
        return None if None in sides else f"({sides[0]} {name.upper()} {sides[1]})"
    if name == "Not":
        child = _condition(node.child())
        return None if child is None else f"(NOT {child})"
    if name in ("IsNull", "IsNotNull"):
        column = _column(node.child())
        return None if column is None else f"{name.lower()}({column})"
    if name in _COMPARISONS:
        first, second = _operand(node.left()), _operand(node.right())
        if first is None or second is None:
            return None
        return f"({first} {_COMPARISONS[name]} {second})"
    if name in _TEXT_TESTS:
        column, text = _column(node.left()), _literal(node.right())
        return None if column is None or text is None else f"{_TEXT_TESTS[name]}({column}, {text})"
    if name in ("In", "InSet"):
        return _in(node, is_set=name == "InSet")
    if name == "Literal" and node.dataType().catalogString() == "boolean":
        return _literal(node)
    return _column(node) if node.dataType().catalogString() == "boolean" else None


def _in(node: Any, *, is_set: bool) -> str | None:
    column = _column(node.child() if is_set else node.value())
    if column is None:
        return None
    if is_set:
        data_type = (node.child()).dataType().catalogString()
        values = [literal_text(value, data_type) for value in _iterated(node.set())]
    else:
        values = [_literal(value) for value in each(node.list())]
    return (
        None if None in values or not values else f"({column} IN ({', '.join(map(str, values))}))"
    )


def _iterated(collection: Any) -> Iterator[Any]:
    iterator = collection.iterator()
    while iterator.hasNext():
        yield iterator.next()


def _operand(node: Any) -> str | None:
    return _literal(node) or _column(node)


def _column(node: Any) -> str | None:
    """Return a column, or a field of a struct, without casts that change no comparison."""
    name = node.getClass().getSimpleName()
    if name == "AttributeReference":
        return quoted(node.name())
    if name == "GetStructField":
        column = _column(node.child())
        return None if column is None else f"{column}.{quoted(node.extractFieldName())}"
    if name == "Cast":
        source_type = node.child().dataType().catalogString()
        if _is_lossless(source_type, node.dataType().catalogString()):
            return _column(node.child())
    return None


def _is_lossless(source: str, target: str) -> bool:
    """Whether the cast of a number type keeps every value and every inequality."""
    if source == "float":
        return target == "double"
    wide, narrow = _DECIMAL.fullmatch(target), _DECIMAL.fullmatch(source)
    if source in _DIGITS:
        if wide is not None:
            return int(wide[1]) - int(wide[2]) >= _DIGITS[source]
        return target in _DIGITS and _DIGITS[target] >= _DIGITS[source]
    if wide is None or narrow is None:
        return False
    holds_whole_digits = int(wide[1]) - int(wide[2]) >= int(narrow[1]) - int(narrow[2])
    return holds_whole_digits and int(wide[2]) >= int(narrow[2])


def _literal(node: Any) -> str | None:
    if node.getClass().getSimpleName() != "Literal":
        return None
    return literal_text(node.value(), node.dataType().catalogString())


def literal_text(value: Any, data_type: str) -> str | None:
    """Return a value of Spark's as a literal with its type; None without an exact literal.

    Texts and decimals are Python's or the JVM's, dates are days and times microseconds.
    """
    if value is None:
        return None
    if data_type in _WHOLE_NUMBERS:
        return f"{int(value)}{_WHOLE_NUMBERS[data_type]}"
    if data_type == "boolean":
        return "TRUE" if value else "FALSE"
    if data_type in ("float", "double"):
        return f"CAST('{value!r}' AS {data_type.upper()})"
    if data_type == "string":
        return _string(_text_of(value))
    if data_type == "binary":
        return f"X'{bytes(value).hex()}'"
    if _DECIMAL.fullmatch(data_type):
        return f"{Decimal(_text_of(value)):f}BD"
    # Structs, arrays and texts with a collation are no literals of a predicate.
    return _moment(int(value), data_type) if data_type in _MOMENTS else None


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else str(value.toString())


def _string(text: str) -> str:
    for character, escape in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(character, escape)
    return f"'{text}'"


def _moment(value: int, data_type: str) -> str | None:
    # The literal has a zone, so the session's zone does not matter.
    try:
        if data_type == "date":
            day = (_EPOCH + datetime.timedelta(days=value)).date()
            return f"DATE '{day.isoformat()}'"
        at = _EPOCH + datetime.timedelta(microseconds=value)
    except OverflowError:
        return None
    shown = at.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds")
    if data_type == "timestamp":
        return f"TIMESTAMP '{shown}+00:00'"
    return f"TIMESTAMP_NTZ '{shown}'"
