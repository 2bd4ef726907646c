"""What a DataFrame needs of each table, by its plan under Spark Connect, where nobody can be asked.

A plan there is a message: relations, with names that are not resolved. Nothing is resolved here
either; what is said is more than enough, or nothing:

- below a projection or an aggregation a column is needed if its name stands anywhere in the plan
- rows can be dropped by comparisons of columns with literals, where everything between the
  condition and the table passes rows on one by one. Each must be one that the option `where`
  understands, which gives it Spark's meaning
- a relation that is not known here may use anything
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
"""Relations that take each row as it is."""
_GATHERING: Final = (
    "deduplicate",
    "drop",
    "limit",
    "offset",
    "with_columns",
    "with_columns_renamed",
)
"""Relations that hand on the columns of their input, and whose rows may hang together."""
_HIDING: Final = re.compile(
    r"unresolved_(star|regex)|all_columns_as_keys: true|expression_string", re.ASCII
)
"""In a relation's text: what may mean all columns of the relation below."""
_UNREADABLE: Final = re.compile(
    r"\\|\$\{|`[^`]*[^\w`][^`]*`|[^\x00-\x7f]|(?<![\w])identifier(?!\w)", re.ASCII | re.IGNORECASE
)
"""In any text: what may mean a column, even far below, whose name does not stand in it."""
_QUOTED: Final = re.compile(r'"([^"]*)"')
_PLAIN: Final = re.compile(r"(streamhouse_[0-9a-f]{32}\.)?(\w+|`\w+`)", re.ASCII)
"""A column by its name alone: with another name before it, it may be a field of a struct."""
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
    """A table in a plan: the key of its needs, the name it has there, and its columns."""

    key: str
    alias: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Above:
    """What is known on the way down to a relation: what the relations above it do."""

    has_all_columns: bool = True
    conditions: tuple[Any, ...] = ()


def needs_of_relation(
    relation: Any, tables: Mapping[int, RelationTable], *, has_usual_literals: bool
) -> PlanNeeds | None:
    """Return what a plan needs of its tables, by the ids of their relations; None if unknown.

    `has_usual_literals` says that the session compares as the option `where` does; without it all
    rows are needed.
    """
    found: list[ScanNeeds] = []
    texts: list[str] = []
    if not _walk(relation, _Above(), tables, found, texts):
        return None
    # A name above one table may be meant for another.
    text = " ".join(texts)
    names = None
    if _UNREADABLE.search(text) is None:
        said = " ".join(_QUOTED.findall(text)).lower()
        names = frozenset(re.findall(r"\w+", said, re.ASCII))
    return PlanNeeds(tuple(_named(scan, names, has_usual_literals) for scan in found))


def _named(scan: ScanNeeds, names: frozenset[str] | None, has_usual_literals: bool) -> ScanNeeds:
    """Return a scan's needs with only the columns that are named; None is for any name."""
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
    found: list[ScanNeeds],
    texts: list[str],
) -> bool:
    """Add what each table below `relation` needs; False for a relation that is not known.

    Until all names are known, a scan has all columns, and `is_filtered` says that it needs them.
    """
    table = tables.get(relation.common.plan_id) if relation.HasField("common") else None
    if table is not None:
        made = [_condition(condition, table) for condition in above.conditions]
        conditions = tuple(text for text in made if text is not None)
        found.append(ScanNeeds(table.key, table.columns, conditions, above.has_all_columns))
        return True
    kind = relation.WhichOneof("rel_type")
    own = type(relation)()
    own.CopyFrom(relation)
    node = getattr(relation, kind)
    for name in ("input", "left", "right"):
        if name in node.DESCRIPTOR.fields_by_name:
            getattr(own, kind).ClearField(name)
    text = str(own)
    texts.append(text)
    if kind == "join":
        if _HIDING.search(text):
            above = replace(above, has_all_columns=True)
        below = replace(above, conditions=())
        return all(_walk(side, below, tables, found, texts) for side in (node.left, node.right))
    passed = _passed(kind, node, text, above)
    return passed is not None and _walk(node.input, passed, tables, found, texts)


def _passed(kind: str, node: Any, text: str, above: _Above) -> _Above | None:
    """Return what is known below a relation; None if it is not known here."""
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
        return [found for side in function.arguments for found in _conjuncts(side)]
    return [condition]


def _condition(node: Any, table: RelationTable) -> str | None:
    """Return an expression as text for the option `where`; None if it has no exact one."""
    if node.WhichOneof("expr_type") != "unresolved_function":
        return None
    function = node.unresolved_function
    if function.is_distinct or function.is_user_defined_function:
        return None
    name, given = function.function_name, function.arguments
    if name in ("and", "or", "not"):
        sides = [_condition(side, table) for side in given]
        if None in sides or len(sides) != (1 if name == "not" else 2):
            return None
        return f"(NOT {sides[0]})" if name == "not" else f"({sides[0]} {name.upper()} {sides[1]})"
    texts = [_column(side, table) or _literal(side) for side in given]
    if None in texts or not any(_column(side, table) for side in given):
        return None
    if name in _COMPARISONS and len(texts) == 2:
        return f"({texts[0]} {_COMPARISONS[name]} {texts[1]})"
    if name in ("isNull", "isNotNull") and len(texts) == 1:
        return f"{name.lower()}({texts[0]})"
    if name in _TEXT_TESTS and len(texts) == 2 and _literal(given[1]):
        return f"{_TEXT_TESTS[name]}({texts[0]}, {texts[1]})"
    if name == "in" and len(texts) > 1 and all(map(_literal, given[1:])):
        return f"({texts[0]} IN ({', '.join(map(str, texts[1:]))}))"
    return None


def _column(node: Any, table: RelationTable) -> str | None:
    if node.WhichOneof("expr_type") != "unresolved_attribute":
        return None
    name = node.unresolved_attribute.unparsed_identifier
    name = name.removeprefix(f"{table.alias}.")
    inner = name[1:-1] if name.startswith("`") and name.endswith("`") else name
    known = {column.lower() for column in table.columns}
    return quoted(inner) if _SIMPLE.fullmatch(inner) and inner.lower() in known else None


def _literal(node: Any) -> str | None:
    if node.WhichOneof("expr_type") != "literal":
        return None
    kind = node.literal.WhichOneof("literal_type")
    if kind == "decimal":
        found = node.literal.decimal
        return literal_text(found.value, f"decimal({found.precision},{found.scale})")
    if kind not in _LITERALS:
        return None
    value = getattr(node.literal, kind)
    # Text that Spark would read as a time of the moment holds only now.
    if kind == "string" and MOMENTS.search(value):
        return None
    return literal_text(value, _LITERALS[kind])
