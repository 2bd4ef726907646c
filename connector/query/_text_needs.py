"""The needs of a statement by the statement's text, where Spark's planner does not show them.

The text is used under Spark Connect, and for a statement that depends on the moment
(`current_date()`). Names are not resolved as in Spark; the result is a superset of the needs, or
None:

- a column is needed if its name occurs anywhere in the statement. All columns are needed if a use
  may omit the name: with `*`, NATURAL joins, PIVOT and the like
- rows are dropped by a comparison of the table's own columns with literals, in the WHERE of the
  SELECT whose FROM names the table. The option `where` must understand the comparison, and gives it
  Spark's meaning. No join of the SELECT may depend on missing rows
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sqlglot import exp

from streamhouse.connector.query._plan_needs import MOMENTS, PlanNeeds, ScanNeeds
from streamhouse.connector.query._query_text import QueryText, TableUse
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["TextTable", "needs_of_text"]

# Names in disguise: values of settings, names made of texts, and characters that match ASCII
# letters without regard to case.
_HIDING: Final = re.compile(
    r"\$\{|\|>|\b[iI][dD][eE][nN][tT][iI][fF][iI][eE][rR]\b|[\u017f\u212a\u0130\u0131]"
)
_UNLIKE_SPARK: Final = re.compile(r"[\\\"]|''")
"""Text that sqlglot may parse differently from Spark."""
_KINDS_OF_LEFT: Final = frozenset({"", "OUTER", "SEMI", "ANTI"})
_PLACES: Final = ("this", "table", "db", "catalog")
"""The arguments of sqlglot for the parts of a column's name, the last part first."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table in a statement: the key of the needs, and the columns."""

    key: str
    columns: tuple[str, ...]


def needs_of_text(
    statement: QueryText, tables: Mapping[tuple[str, ...], TextTable], *, has_usual_literals: bool
) -> PlanNeeds | None:
    """Return the needs of a statement; None if the text is not enough.

    `has_usual_literals` tells that the session reads literals like the option `where`; otherwise
    all rows are needed.
    """
    tree = statement.tree
    if tree is None or _hides_columns(tree, statement.text, tables):
        return None
    text = statement.text.lower()
    may_drop = has_usual_literals and _UNLIKE_SPARK.search(text) is None
    scans = []
    for use in statement.uses:
        table = tables.get(use.name)
        if table is None:
            continue
        if use.node.args.get("joins") or not isinstance(use.node.parent, exp.From | exp.Join):
            return None
        columns = tuple(column for column in table.columns if _is_named(column, text))
        conditions = tuple(_conditions(use, table)) if may_drop else ()
        scans.append(ScanNeeds(table.key, columns, conditions, bool(conditions)))
    counted = scans[0].key if len(scans) == 1 and _only_counts(tree) else None
    return PlanNeeds(tuple(scans), counted)


def _hides_columns(tree: exp.Query, text: str, tables: Mapping[tuple[str, ...], TextTable]) -> bool:
    """Whether the statement may use columns without their names."""
    if _HIDING.search(text):
        return True
    if any(not isinstance(star.parent, exp.Count) for star in tree.find_all(exp.Star)):
        return True
    if any(join.method for join in tree.find_all(exp.Join)) or tree.find(exp.Pivot):
        return True
    if any(
        alias.args.get("columns") and isinstance(alias.parent, exp.Table)
        for alias in tree.find_all(exp.TableAlias)
    ):
        return True
    # A session may read quoted names as patterns of names.
    names = {column.lower() for table in tables.values() for column in table.columns}
    names |= {part.lower() for name in tables for part in name}
    return any(
        not re.fullmatch(r"\w+", identifier.name) and identifier.name.lower() not in names
        for identifier in tree.find_all(exp.Identifier)
    )


def _is_named(column: str, text: str) -> bool:
    name = column.lower()
    if not re.fullmatch(r"\w+", name, re.ASCII):
        return not name.isascii() or name in text or quoted(name) in text
    return re.search(rf"(?<!\w){name}(?!\w)", text) is not None


def _only_counts(tree: exp.Query) -> bool:
    """Whether a query is exactly `SELECT count(*) FROM table`."""
    clauses = {name for name, value in tree.args.items() if value}
    if not isinstance(tree, exp.Select) or clauses != {"expressions", "from_"}:
        return False
    if len(tree.expressions) != 1 or tree.args["from_"].this.args.get("sample"):
        return False
    counted = tree.expressions[0].unalias()
    return isinstance(counted, exp.Count) and isinstance(counted.this, exp.Star)


def _conditions(use: TableUse, table: TextTable) -> Iterator[str]:
    """Yield conditions that hold for each row of the table with an effect on the SELECT."""
    clause = use.node.parent
    select = None if clause is None else clause.parent
    if not isinstance(select, exp.Select) or not _keeps_order(select, clause):
        return
    where = select.args.get("where")
    if where is None:
        return
    is_alone = not select.args.get("joins")
    predicate = where.this.unnest()
    for condition in predicate.flatten() if isinstance(predicate, exp.And) else (predicate,):
        text = _unqualified(condition, use, table, is_alone=is_alone)
        if text is not None and not MOMENTS.search(text):
            yield f"({text})"


def _keeps_order(select: exp.Select, clause: exp.Expr | None) -> bool:
    """Whether rows of a table in FROM can be dropped before the joins as well as after them."""
    if select.args.get("laterals") or select.find(exp.TableSample):
        return False
    joins = select.args.get("joins") or []
    return all(
        _is_inner(join) or (isinstance(clause, exp.From) and _is_left(join)) for join in joins
    )


def _is_inner(join: exp.Join) -> bool:
    return not join.side and join.kind.upper() in ("", "INNER", "CROSS")


def _is_left(join: exp.Join) -> bool:
    if not join.side:
        return join.kind.upper() in ("SEMI", "ANTI")
    return join.side.upper() == "LEFT" and join.kind.upper() in _KINDS_OF_LEFT


def _unqualified(
    condition: exp.Expr, use: TableUse, table: TextTable, *, is_alone: bool
) -> str | None:
    """Return a condition over the table's columns alone, without the table's name before them."""
    if condition.find(exp.Query, exp.Dot):
        return None
    copied = exp.Paren(this=condition.copy())
    for column in list(copied.find_all(exp.Column)):
        path = _path(column, use, table, is_alone=is_alone)
        if path is None:
            return None
        names = [exp.to_identifier(part, quoted=True) for part in reversed(path)]
        column.replace(exp.Column(**dict(zip(_PLACES, names, strict=False))))
    return str(copied.this.sql(dialect="spark", identify=True, comments=False))


def _path(
    column: exp.Column, use: TableUse, table: TextTable, *, is_alone: bool
) -> list[str] | None:
    """Return a column of the table, with the named fields in it; None for any other column."""
    if any(not isinstance(part, exp.Identifier) for part in column.parts):
        return None
    path = [part.name for part in column.parts]
    lowered = [part.lower() for part in path]
    columns = {name.lower() for name in table.columns}
    alias = use.node.alias_or_name.lower()
    has_alias = bool(use.node.args.get("alias"))
    full = [part.lower() for part in use.name]
    if alias in columns or full[0] in columns or len(path) > len(_PLACES):
        return path if len(path) == 1 and is_alone and lowered[0] in columns else None
    if lowered[0] == alias and len(path) > 1:
        path = path[1:]
    elif not has_alias and len(full) > 1 and lowered[: len(full)] == full:
        path = path[len(full) :]
    elif not is_alone:
        return None
    return path if path and path[0].lower() in columns else None
