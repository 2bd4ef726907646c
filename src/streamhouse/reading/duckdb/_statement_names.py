"""Which tables and columns a statement of DuckDB's SQL names, in the tree of DuckDB's parser."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Final, TypeAlias

__all__ = ["NameOfTable", "columns_named", "has_joins", "tables_named"]

NameOfTable: TypeAlias = tuple[str, str]
"""A database, or nothing for the default one, and a table."""

_NAME: Final = re.compile(r"\w+(\$\w+)?")
_STARS: Final = ("STAR", "POSITIONAL_REFERENCE")
_EXISTS: Final = ("EXISTS", "NOT_EXISTS")
_NO_TABLES: Final = ("COLUMN_DATA", "EMPTY", "EXPRESSION_LIST", "SUBQUERY", "TABLE_FUNCTION")
"""What may stand behind FROM and has no columns of the tables but those that it names."""


def tables_named(tree: Any) -> list[NameOfTable]:
    """Return all possible names of tables, each once."""
    names = [
        (node["schema_name"], node["table_name"])
        for node in _nodes(tree)
        # A name alone may also be a CTE's, which goes first, or a file's.
        if node.get("type") == "BASE_TABLE"
        and not node["catalog_name"]
        and (node["schema_name"] or _NAME.fullmatch(node["table_name"]))
    ]
    return list(dict.fromkeys(names))


def has_joins(tree: Any) -> bool:
    """Whether the statement joins anything, subqueries of its conditions included."""
    return any(
        node.get("type") == "JOIN" or node.get("class") == "SUBQUERY" for node in _nodes(tree)
    )


def columns_named(tree: Any, tables: Collection[NameOfTable]) -> dict[NameOfTable, set[str] | None]:
    """Return the names, in lower case, by which the statement can mean columns of each table.

    None for a table whose columns the statement can mean without a name: by a star, by position, or
    as a part of the row.
    """
    named: set[str] = set()
    whole = _starred_tables(tree)
    rows: set[str] = set()
    databases = {database.lower() or "main" for database, _ in tables}
    for node in _nodes(tree):
        if node.get("class") == "COLUMN_REF":
            parts = [part.lower() for part in node["column_names"]]
            named.update(parts)
            if len(parts) == 1 or parts[-2] in databases:
                # The name of a table in the place of a column is the whole row.
                rows.add(parts[-1])
        elif node.get("class") == "STAR":
            rows.add(node["relation_name"].lower())
        elif node.get("type") == "JOIN":
            named.update(name.lower() for name in node["using_columns"])
    for node in _nodes(tree):
        if node.get("type") == "BASE_TABLE" and rows & {
            node["table_name"].lower(),
            node["alias"].lower() or node["table_name"].lower(),
        }:
            whole |= _tables_behind(node)
    return {table: None if table in whole else named for table in tables}


def _starred_tables(tree: Any) -> set[NameOfTable]:
    """Return the tables of which the statement may mean every column, or a column by position."""
    whole: set[NameOfTable] = set()
    # Whether a row exists does not depend on what is selected.
    exists = {id(n["subquery"]["node"]) for n in _nodes(tree) if n.get("subquery_type") in _EXISTS}
    for node in _nodes(tree):
        kind = node.get("type")
        if (kind == "BASE_TABLE" and node["column_name_alias"]) or (
            kind == "JOIN" and node["ref_type"] == "NATURAL"
        ):
            whole |= _tables_behind(node)
        elif kind in ("PIVOT", "SHOW_REF"):
            whole |= set(tables_named(node))
        elif kind == "SELECT_NODE" and id(node) not in exists and _has_star(node):
            whole |= _tables_behind(node["from_table"])
    return whole


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for part in tree.values():
            yield from _nodes(part)
    elif isinstance(tree, list):
        for part in tree:
            yield from _nodes(part)


def _tables_behind(source: dict[str, Any]) -> set[NameOfTable]:
    """Return the tables directly behind FROM, without the tables of subqueries."""
    kind = source["type"]
    if kind == "JOIN":
        return _tables_behind(source["left"]) | _tables_behind(source["right"])
    return set() if kind in _NO_TABLES else set(tables_named(source))


def _has_star(part: Any, *, is_top: bool = True) -> bool:
    """Whether a SELECT, without its subqueries, has an expression that stands for columns."""
    if isinstance(part, list):
        return any(_has_star(inner, is_top=False) for inner in part)
    if not isinstance(part, dict) or (part.get("type") == "SELECT_NODE" and not is_top):
        return False
    is_star = part.get("class") in _STARS
    return is_star or any(_has_star(inner, is_top=False) for inner in part.values())
