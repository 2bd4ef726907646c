"""Where a SQL statement names tables, and its text with DataFrames in their place.

sqlglot reads the statement; nothing of it is generated anew. Only the characters of a table's name
are replaced, and everything else stays the user's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from streamhouse.reading.options.quoted_names import quoted

__all__ = ["Statement", "TableUse"]

# What may be said of a table between its name and its alias: an alias cannot be put after it.
_BEFORE_ALIAS = ("sample", "version", "when", "hints", "changes", "partition", "pivots")


@dataclass(frozen=True, slots=True, eq=False)
class TableUse:
    """One place where a query names a table, as sqlglot has it."""

    name: tuple[str, ...]
    node: exp.Table


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """A query's text, and the names of tables in it: two or more parts, or one, in no CTE.

    `names` are the table names as the statement spells them, each once; `uses` are all places that
    have one. `tree` is None for what is no query, or cannot be read.
    """

    text: str
    names: tuple[tuple[str, ...], ...]
    tree: exp.Query | None
    uses: tuple[TableUse, ...]
    _places: tuple[_Place, ...]

    @classmethod
    def of(cls, text: str) -> Statement:
        """Read a statement; one that is no query, or that sqlglot cannot read, names no table."""
        root = _parsed(text)
        if root is None:
            return cls(text, (), None, (), ())
        found = list(_named_tables(root, text))
        tables = [
            _table_place(parts, has_alias=bool(table.args.get("alias"))) for table, parts in found
        ]
        qualifiers = _qualifiers(root, [table for table, _ in found], text)
        places = tuple(sorted([*tables, *qualifiers], key=lambda place: place.start))
        uses = tuple(TableUse(_name(parts), table) for table, parts in found)
        return cls(text, tuple(dict.fromkeys(place.name for place in places)), root, uses, places)

    def template(self, fields: Mapping[tuple[str, ...], str]) -> str:
        """Return the text as a format string, as `spark.sql` takes it: `fields` for tables."""
        pieces, end = [], 0
        for place in self._places:
            if place.name in fields:
                pieces += [_escaped(self.text[end : place.start]), place.text(fields[place.name])]
                end = place.end
        return "".join([*pieces, _escaped(self.text[end:])])


@dataclass(frozen=True, slots=True)
class _Place:
    """Characters [start, end) that name a table, or that go before a column's own name."""

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
    """Yield each use of a table that another can take the place of, with its name's parts."""
    ctes = {cte.alias.lower() for cte in root.find_all(exp.CTE)}
    for table in root.find_all(exp.Table):
        parts = _identifiers(table.parts, text)
        is_cte = len(parts) == 1 and parts[0].name.lower() in ctes
        if parts and not is_cte:
            has_alias = bool(table.args.get("alias"))
            if has_alias or not any(table.args.get(key) for key in _BEFORE_ALIAS):
                yield table, parts


def _table_place(parts: Sequence[exp.Identifier], *, has_alias: bool) -> _Place:
    own = parts[-1].name

    def named(field: str) -> str:
        # A name keeps working before a column's.
        return f"{{{field}}}" if has_alias else f"{{{field}}} AS {_escaped(quoted(own))}"

    return _Place(_start(parts[0]), _end(parts[-1]), _name(parts), named)


def _nothing(_field: str) -> str:
    return ""


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _qualifiers(root: exp.Query, tables: Sequence[exp.Table], text: str) -> Iterator[_Place]:
    """Yield where a column is given as `db.table.column`, of which `db.` must go."""
    known = {_lower(table.parts): tuple(part.name for part in table.parts) for table in tables}
    sources = {table.alias_or_name.lower() for table in root.find_all(exp.Table)}
    for column in root.find_all(exp.Column, exp.Dot):
        if isinstance(column.parent, exp.Dot):
            continue
        parts = list(column.parts)  # type: ignore[attr-defined]  # both have parts
        named = known.get(_lower(parts[:2])) if len(parts) > 2 else None
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
    """Return the parts, or none if one is not just the name that the text has at its place."""
    found = []
    for part in parts:
        if not isinstance(part, exp.Identifier) or part.meta.get("start") is None:
            return []
        written = text[_start(part) : _end(part)]
        if written != part.name and written != quoted(part.name):
            return []
        found.append(part)
    return found


def _start(part: exp.Expr) -> int:
    return int(part.meta["start"])


def _end(part: exp.Expr) -> int:
    return int(part.meta["end"]) + 1
