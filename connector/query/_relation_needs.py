"""The needs of a DataFrame by its plan under Spark Connect, where Spark's planner is out of reach.

The plan is a message: relations, with unresolved names. Nothing is resolved here either. The result
is a superset of the needs, or None:

- below a projection or an aggregation a column is needed if its name occurs anywhere in the plan
- rows are dropped by comparisons of columns with literals, if every relation between the condition
  and the table passes rows on one by one. The option `where` must understand the comparison, and
  gives it Spark's meaning
- an unknown relation may need any column and row
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from streamhouse.connector.query._plan_needs import (
    MOMENTS,
    PlanNeeds,
    ScanNeeds,
    literal_text,
)
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["RelationTable", "needs_of_relation"]

_PASSING: Final = ("hint", "repartition", "sort", "subquery_alias")
"""Relations that pass on each row unchanged."""
_GATHERING: Final = (
    "deduplicate",
    "drop",
    "limit",
    "offset",
    "with_columns",
    "with_columns_renamed",
)
"""Relations that pass on the columns of their input, and whose rows may depend on each other."""
_HIDING: Final = re.compile(
    r"unresolved_(star|regex)|all_columns_as_keys: true|expression_string", re.ASCII
)
"""In a relation's text: a part that may mean all columns of the relation below."""
_UNREADABLE: Final = re.compile(
    r"\\|\$\{|`[^`]*[^\w`][^`]*`|[^\x00-\x7f]|(?<![\w])identifier(?!\w)", re.ASCII | re.IGNORECASE
)
"""In any text: a part that may mean a column, even far below, without the column's name."""
_QUOTED: Final = re.compile(r'"([^"]*)"')
_PLAIN: Final = re.compile(r"(streamhouse_[0-9a-f]{32}\.)?(\w+|`\w+`)", re.ASCII)
"""A column by its name alone: after a further name it may be a field of a struct."""
_SIMPLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_COMPARISONS: Final = {"==": "=", "<=>": "<=>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_TEXT_TESTS: Final = {"startsWith": "startswith", "endsWith": "endswith", "contains": "contains"}
_LITERALS: Final = {
    "boolean": "boolean",
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
}


@dataclass(frozen=True, slots=True)
class RelationTable:
    """A table in a plan: the key of the needs, the name in the plan, and the columns."""

    key: str
    alias: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Above:
    """The effects of the relations above, on the way down to a relation."""

    has_all_columns: bool = True
    conditions: tuple[Any, ...] = ()


def needs_of_relation(
    relation: Any, tables: Mapping[int, RelationTable], *, has_usual_literals: bool
) -> PlanNeeds | None:
    """Return the needs of a plan by the ids of its tables' relations; None if unknown.

    `has_usual_literals` tells that the session compares like the option `where`; otherwise all rows
    are needed.
    """
    scans: list[ScanNeeds] = []
    texts: list[str] = []
    if not _walk(relation, _Above(), tables, scans, texts):
        return None
    # A name above one table may be a column of a different table.
    text = " ".join(texts)
    names = None
    if _UNREADABLE.search(text) is None:
        quoted_names = " ".join(_QUOTED.findall(text)).lower()
        names = frozenset(re.findall(r"\w+", quoted_names, re.ASCII))
    return PlanNeeds(tuple(_named(scan, names, has_usual_literals) for scan in scans))


def _named(scan: ScanNeeds, names: frozenset[str] | None, has_usual_literals: bool) -> ScanNeeds:
    """Return a scan's needs with only the named columns; None stands for any name."""
    conditions = scan.conditions if has_usual_literals else ()
    is_whole = scan.is_filtered or names is None
    columns = tuple(
        name
        for name in scan.columns
        if is_whole or not _SIMPLE.fullmatch(name) or name.lower() in (names or ())
    )
    return replace(scan, columns=columns, conditions=conditions, is_filtered=bool(conditions))


def _walk(
    relation: Any,
    above: _Above,
    tables: Mapping[int, RelationTable],
    scans: list[ScanNeeds],
    texts: list[str],
) -> bool:
    """Add the needs of each table below `relation`; return False for an unknown relation.

    Before all names are collected, a scan has all columns, and `is_filtered` marks a scan that
    needs every column.
    """
    table = tables.get(relation.common.plan_id) if relation.HasField("common") else None
    if table is not None:
        condition_texts = [_condition(condition, table) for condition in above.conditions]
        conditions = tuple(text for text in condition_texts if text is not None)
        scans.append(ScanNeeds(table.key, table.columns, conditions, above.has_all_columns))
        return True
    kind = relation.WhichOneof("rel_type")
    relation_alone = type(relation)()
    relation_alone.CopyFrom(relation)
    node = getattr(relation, kind)
    for name in ("input", "left", "right"):
        if name in node.DESCRIPTOR.fields_by_name:
            getattr(relation_alone, kind).ClearField(name)
    text = str(relation_alone)
    texts.append(text)
    if kind == "join":
        if _HIDING.search(text):
            above = replace(above, has_all_columns=True)
        below = replace(above, conditions=())
        return all(_walk(side, below, tables, scans, texts) for side in (node.left, node.right))
    passed = _passed(kind, node, text, above)
    return passed is not None and _walk(node.input, passed, tables, scans, texts)


def _passed(kind: str, node: Any, text: str, above: _Above) -> _Above | None:
    """Return the effects on the relations below; None for an unknown relation."""
    is_open = _HIDING.search(text) is not None
    has_all = above.has_all_columns or is_open
    if kind == "filter":
        conditions = (*above.conditions, *_conjuncts(node.condition))
        return _Above(has_all_columns=has_all, conditions=conditions)
    if kind in _PASSING:
        return _Above(has_all_columns=has_all, conditions=above.conditions)
    if kind in _GATHERING:
        return _Above(has_all_columns=has_all)
    if kind == "project":
        is_plain = all(
            _PLAIN.fullmatch(each.unresolved_attribute.unparsed_identifier)
            for each in node.expressions
        )
        return _Above(has_all_columns=is_open, conditions=above.conditions if is_plain else ())
    return _Above(has_all_columns=is_open) if kind == "aggregate" else None


def _conjuncts(condition: Any) -> list[Any]:
    function = condition.unresolved_function
    if condition.WhichOneof("expr_type") == "unresolved_function" and (
        function.function_name == "and"
    ):
        return [conjunct for side in function.arguments for conjunct in _conjuncts(side)]
    return [condition]


def _condition(node: Any, table: RelationTable) -> str | None:
    """Return an expression as text for the option `where`; None without an exact text."""
    if node.WhichOneof("expr_type") != "unresolved_function":
        return None
    function = node.unresolved_function
    if function.is_distinct or function.is_user_defined_function:
        return None
    name, arguments = function.function_name, function.arguments
    if name in ("and", "or", "not"):
        sides = [_condition(side, table) for side in arguments]
        if None in sides or len(sides) != (1 if name == "not" else 2):
            return None
        return f"(NOT {sides[0]})" if name == "not" else f"({sides[0]} {name.upper()} {sides[1]})"
    texts = [_column(side, table) or _literal(side) for side in arguments]
    if None in texts or not any(_column(side, table) for side in arguments):
        return None
    if name in _COMPARISONS and len(texts) == 2:
        return f"({texts[0]} {_COMPARISONS[name]} {texts[1]})"
    if name in ("isNull", "isNotNull") and len(texts) == 1:
        return f"{name.lower()}({texts[0]})"
    if name in _TEXT_TESTS and len(texts) == 2 and _literal(arguments[1]):
        return f"{_TEXT_TESTS[name]}({texts[0]}, {texts[1]})"
    if name == "in" and len(texts) > 1 and all(map(_literal, arguments[1:])):
        return f"({texts[0]} IN ({', '.join(map(str, texts[1:]))}))"
    return None


def _column(node: Any, table: RelationTable) -> str | None:
    if node.WhichOneof("expr_type") != "unresolved_attribute":
        return None
    name = node.unresolved_attribute.unparsed_identifier
    name = name.removeprefix(f"{table.alias}.")
    inner = name[1:-1] if name.startswith("`") and name.endswith("`") else name
    column_names = {column.lower() for column in table.columns}
    return quoted(inner) if _SIMPLE.fullmatch(inner) and inner.lower() in column_names else None


def _literal(node: Any) -> str | None:
    if node.WhichOneof("expr_type") != "literal":
        return None
    kind = node.literal.WhichOneof("literal_type")
    if kind == "decimal":
        decimal = node.literal.decimal
        return literal_text(decimal.value, f"decimal({decimal.precision},{decimal.scale})")
    if kind not in _LITERALS:
        return None
    value = getattr(node.literal, kind)
    # Spark may read this text as the current time or date.
    if kind == "string" and MOMENTS.search(value):
        return None
    return literal_text(value, _LITERALS[kind])
