"""The tables that a SQL statement names, and the statement's text with DataFrames in their place.

sqlglot parses the statement, and generates no text. Only the characters of table names are
replaced; the remaining text stays the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from streamhouse.connector.names._table_statement import tokens_of
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["QueryText", "TableUse"]

# Clauses between a table's name and its alias: an alias cannot be inserted after the name.
_BEFORE_ALIAS = ("version", "when", "hints", "changes", "partition", "pivots")


@dataclass(frozen=True, slots=True, eq=False)
class TableUse:
    """One place where a query names a table, as a node of sqlglot."""

    name: tuple[str, ...]
    node: exp.Table


@dataclass(frozen=True, slots=True, eq=False)
class QueryText:
    """A query's text, and the names of tables in it: two or more parts, or one, in no CTE.

    `names` are the distinct table names as the statement spells them; `uses` are all their places.
    `tree` is None if the statement is no query or sqlglot cannot parse the text.
    """

    text: str
    names: tuple[tuple[str, ...], ...]
    tree: exp.Query | None
    uses: tuple[TableUse, ...]
    _places: tuple[_Place, ...]

    @classmethod
    def of(cls, text: str) -> QueryText:
        """Parse a statement; any statement but a readable query names no table."""
        root = _parsed(text)
        if root is None:
            return cls(text, (), None, (), ())
        named_tables = list(_named_tables(root, text))
        tables = [place for named in named_tables for place in _table_places(*named, text)]
        qualifiers = _qualifiers(root, [table for table, _ in named_tables], text)
        places = tuple(sorted([*tables, *qualifiers], key=lambda place: place.start))
        uses = tuple(TableUse(_name(parts), table) for table, parts in named_tables)
        return cls(text, tuple(dict.fromkeys(place.name for place in places)), root, uses, places)

    def template(self, fields: Mapping[tuple[str, ...], str]) -> str:
        """Return the text as a format string for `spark.sql`, with `fields` in place of tables."""
        pieces, end = [], 0
        for place in self._places:
            if place.name in fields:
                pieces += [_escaped(self.text[end : place.start]), place.text(fields[place.name])]
                end = place.end
        return "".join([*pieces, _escaped(self.text[end:])])


@dataclass(frozen=True, slots=True)
class _Place:
    """Characters [start, end) of a table's name, or of the qualifier of a column."""

    start: int
    end: int
    name: tuple[str, ...]
    text: Callable[[str], str]


def _parsed(text: str) -> exp.Query | None:
    try:
        parsed = sqlglot.parse(text, read="spark")
    except (SqlglotError, RecursionError):
        return None
    if len(parsed) != 1 or not isinstance(parsed[0], exp.Query):
        return None
    return parsed[0]


def _named_tables(root: exp.Query, text: str) -> Iterator[tuple[exp.Table, list[exp.Identifier]]]:
    """Yield each replaceable use of a table, with the parts of its name."""
    ctes = {cte.alias.lower() for cte in root.find_all(exp.CTE)}
    for table in root.find_all(exp.Table):
        parts = _identifiers(table.parts, text)
        is_cte = len(parts) == 1 and parts[0].name.lower() in ctes
        if parts and not is_cte:
            has_alias = bool(table.args.get("alias"))
            if has_alias or not any(table.args.get(key) for key in _BEFORE_ALIAS):
                yield table, parts


def _table_places(table: exp.Table, parts: Sequence[exp.Identifier], text: str) -> Iterator[_Place]:
    """Yield the place of a table's name, and of its alias: the name stays a qualifier."""
    start, end, name = _start(parts[0]), _end(parts[-1]), _name(parts)
    yield _Place(start, end, name, lambda field: f"{{{field}}}")
    if not table.args.get("alias"):
        behind = _sample_end(text, end) if table.args.get("sample") else end
        yield _Place(behind, behind, name, lambda _: f" AS {_escaped(quoted(name[-1]))}")


def _sample_end(text: str, start: int) -> int:
    """Return the end of `TABLESAMPLE (...) [REPEATABLE (...)]` behind a table's name."""
    tokens, depth = tokens_of(text[start:]), 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        is_last = following is None or following.word != "REPEATABLE"
        if token.text == ")" and not depth and is_last:
            return start + token.end
    return len(text)


def _nothing(_field: str) -> str:
    return ""


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _qualifiers(root: exp.Query, tables: Sequence[exp.Table], text: str) -> Iterator[_Place]:
    """Yield the places of columns like `db.table.column`, whose `db.` must be removed."""
    table_names = {
        _lower(table.parts): tuple(part.name for part in table.parts) for table in tables
    }
    sources = {table.alias_or_name.lower() for table in root.find_all(exp.Table)}
    for column in root.find_all(exp.Column, exp.Dot):
        if isinstance(column.parent, exp.Dot):
            continue
        parts = list(column.parts)  # type: ignore[attr-defined]  # both have parts
        named = table_names.get(_lower(parts[:2])) if len(parts) > 2 else None
        if named is None or len(named) != 2 or parts[0].name.lower() in sources:
            continue
        first, second = parts[:2]
        if len(_identifiers([first, second], text)) == 2:
            start, end = _start(first), _start(second)
            yield _Place(start, end, named, _nothing)


def _lower(parts: Sequence[exp.Expr]) -> tuple[str, ...]:
    return tuple(part.name.lower() for part in parts)


def _name(parts: Sequence[exp.Identifier]) -> tuple[str, ...]:
    return tuple(part.name for part in parts)


def _identifiers(parts: Sequence[exp.Expr], text: str) -> list[exp.Identifier]:
    """Return the parts; nothing if a part differs from the text at its place."""
    identifiers = []
    for part in parts:
        if not isinstance(part, exp.Identifier) or part.meta.get("start") is None:
            return []
        written = text[_start(part) : _end(part)]
        if written != part.name and written != quoted(part.name):
            return []
        identifiers.append(part)
    return identifiers


def _start(part: exp.Expr) -> int:
    return int(part.meta["start"])


def _end(part: exp.Expr) -> int:
    return int(part.meta["end"]) + 1
