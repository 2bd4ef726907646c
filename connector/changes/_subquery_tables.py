"""The tables of the service that subqueries of a row statement name.

Spark resolves the names in conditions and values, and does not know the service's tables. So a
subquery reads a temporary view of such a table. The view ends with the statement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from streamhouse.connector.changes._bound_text import temporary_views
from streamhouse.connector.changes._statement_clauses import MergeText, RowText, subqueries_of
from streamhouse.connector.query._query_text import QueryText
from streamhouse.connector.query.sql_query import service_table

__all__ = ["SubqueryTables", "subquery_tables"]


class SubqueryTables:
    """Puts views in place of the service's tables, in the subqueries of a statement's clauses."""

    def __init__(self, view_of: Callable[[tuple[str, ...]], str | None]) -> None:
        self._view_of = view_of

    def rows(self, text: RowText) -> RowText:
        """Return an `UPDATE` or a `DELETE` that Spark can resolve."""
        return replace(text, where=self._optional(text.where), values=self._values(text.values))

    def merge(self, text: MergeText) -> MergeText:
        """Return a `MERGE` that Spark can resolve; the source stays as it is."""
        clauses = (
            replace(
                clause,
                condition=self._optional(clause.condition),
                values=self._values(clause.values),
            )
            for clause in text.clauses
        )
        return replace(text, on=self._expression(text.on), clauses=tuple(clauses))

    def _values(self, values: dict[str, str] | None) -> dict[str, str] | None:
        return values and {name: self._expression(value) for name, value in values.items()}

    def _optional(self, expression: str | None) -> str | None:
        return None if expression is None else self._expression(expression)

    def _expression(self, expression: str) -> str:
        pieces, end = [], 0
        for start, stop in subqueries_of(expression):
            pieces += [expression[end:start], self._query(expression[start:stop])]
            end = stop
        return "".join([*pieces, expression[end:]])

    def _query(self, text: str) -> str:
        query = QueryText.of(text)
        views = {name: view for name in query.names if (view := self._view_of(name)) is not None}
        if not views:
            return text
        return query.template(views).format(**{view: view for view in views.values()})


@contextlib.contextmanager
def subquery_tables(spark: Any, options: Mapping[str, str]) -> Iterator[SubqueryTables]:
    """Return the tables by name; `options` are those of a read, and the views end with the block.

    A table or view of Spark goes before the service's table of the same name, as in a query.
    """
    with temporary_views() as view_of_frame:
        views: dict[tuple[str, ...], str | None] = {}

        def view_of(name: tuple[str, ...]) -> str | None:
            if name not in views:
                table = service_table(spark, name, options)
                views[name] = None if table is None else view_of_frame(table.plain)
            return views[name]

        yield SubqueryTables(view_of)
