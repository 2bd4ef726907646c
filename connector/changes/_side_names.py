"""The names in clauses of a merge about rows without a match, where only one side has a row.

SQL gives such a clause the columns of the one side. `Merge` computes all clauses over both sides,
where a column without a qualifier is ambiguous, and a column of the other side is null. So Spark
first checks the expressions against the one side, and ambiguous columns get the side's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import sqlglot
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sqlglot import exp
from sqlglot.errors import SqlglotError

from streamhouse.connector.changes._statement_clauses import (
    MATCHED,
    NOT_MATCHED,
    MergeText,
    WhenText,
)
from streamhouse.connector.names._table_statement import tokens_of
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["side_clauses", "with_qualifiers"]


def side_clauses(
    text: MergeText, *, source: DataFrame, target: Callable[[], DataFrame]
) -> Iterator[WhenText]:
    """Yield the clauses of a merge, each with the names of its side; raise Spark's error."""
    for clause in text.clauses:
        alias = text.source_alias if clause.side == NOT_MATCHED else text.target_alias
        if clause.side == MATCHED or _is_plain(clause, source, alias):
            yield clause
        else:
            side, other = source, target()
            if clause.side != NOT_MATCHED:
                side, other = other, side
            # A column of the side that has the other side's alias is hidden by it, too.
            others = {n.lower() for n in (*other.columns, text.source_alias, text.target_alias)}
            shared = {n.lower() for n in side.columns} & others
            yield _of_side(clause, side.alias(alias), alias, shared)


def _is_plain(clause: WhenText, source: DataFrame, alias: str) -> bool:
    """Whether an insert only takes columns of the source, all with the source's name."""
    columns = {f"{alias}.{name}".lower() for name in source.columns}
    values = [value.replace("`", "").lower() for value in (clause.values or {}).values()]
    return clause.side == NOT_MATCHED and clause.condition is None and columns.issuperset(values)


def _of_side(clause: WhenText, rows: DataFrame, alias: str, shared: set[str]) -> WhenText:
    values = clause.values or {}
    expressions = [*values.values(), *([] if clause.condition is None else [clause.condition])]
    if not expressions:
        return clause
    rows.select(*map(F.expr, expressions)).schema  # noqa: B018 - Spark resolves the names here

    def qualified(expression: str) -> str:
        text = with_qualifiers(expression, alias, shared)
        if text != expression:
            try:
                rows.select(F.expr(text)).schema  # noqa: B018 - as above
            except PySparkException:
                return expression
        return text

    return replace(
        clause,
        condition=None if clause.condition is None else qualified(clause.condition),
        values=None if clause.values is None else {n: qualified(v) for n, v in values.items()},
    )


def with_qualifiers(expression: str, alias: str, names: set[str]) -> str:
    """Return an expression whose columns with these names (lower case) have a qualifier.

    Columns of subqueries stay as they are; an expression that sqlglot cannot parse, too.
    """
    if not names & {token.word.strip("`").lower() for token in tokens_of(expression)}:
        return expression
    try:
        tree = sqlglot.parse_one(expression, read="spark")
    except (SqlglotError, RecursionError):
        return expression
    starts = set()
    for column in tree.find_all(exp.Column):
        first = column.parts[0]
        is_named = first.name.lower() in names and first.name.lower() != alias.lower()
        if is_named and "start" in first.meta and column.find_ancestor(exp.Query) is None:
            starts.add(int(first.meta["start"]))
    pieces, end = [], 0
    for start in sorted(starts):
        pieces += [expression[end:start], f"{quoted(alias)}."]
        end = start
    return "".join([*pieces, expression[end:]])
