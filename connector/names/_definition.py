"""`CREATE TABLE ... USING streamhouse`: the definition of the table, and its name.

Spark alone would make a catalog entry without a table: Spark passes OPTIONS, TBLPROPERTIES and
LOCATION of the statement to no reader and no writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamhouse.connector.names._constraints import (
    constraint_of,
    is_constraint,
    listed,
    refuse_clauses,
)
from streamhouse.connector.names._table_statement import TableStatement, Token, unquoted
from streamhouse.core.errors import UnsupportedError

__all__ = ["Definition", "definition_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The parts of a `CREATE TABLE`: `columns` and `query` as SQL text, options by key."""

    name: tuple[str, ...]
    only_if_absent: bool
    columns: str | None
    query: str | None
    options: dict[str, str] = field(default_factory=dict)


def definition_of(statement: TableStatement) -> Definition:
    """Return the parts of a `CREATE TABLE ... USING streamhouse`.

    Raise `UnsupportedError` for a clause without a meaning for a Streamhouse table.
    """
    text, tokens = statement.text, list(statement.tokens)
    columns = query = None
    options: dict[str, str] = {}
    at = 0
    if tokens and tokens[0].text == "(":
        end = _closing(tokens, 0)
        columns, options = _columns(tokens[: end + 1], statement)
        at = end + 1
    while at < len(tokens):
        word = tokens[at].word
        following = tokens[at + 1].text.upper() if at + 1 < len(tokens) else ""
        if word in ("AS", "SELECT", "WITH"):
            query = text[tokens[at].end if word == "AS" else tokens[at].start :].strip().rstrip(";")
            break
        if word == "USING":
            at += 2
        elif word in ("OPTIONS", "TBLPROPERTIES") and following == "(":
            end = _closing(tokens, at + 1)
            options |= _pairs(tokens[at + 2 : end])
            at = end + 1
        elif word == "PARTITIONED" and following == "BY":
            end = _closing(tokens, at + 2)
            options["partitioned.by"] = text[tokens[at + 2].end : tokens[end].start]
            at = end + 1
        elif tokens[at].text == ";":
            at += 1
        else:
            raise UnsupportedError(
                f"CREATE TABLE {'.'.join(statement.name)} ... {tokens[at].text}: USING streamhouse"
                " takes columns, OPTIONS or TBLPROPERTIES, PARTITIONED BY and AS SELECT; leave the"
                " rest out"
            )
    head = text[: tokens[0].start] if tokens else text
    return Definition(
        name=statement.name,
        only_if_absent="IF NOT EXISTS" in " ".join(head.upper().split()),
        columns=columns,
        query=query,
        options=options,
    )


def _columns(tokens: list[Token], statement: TableStatement) -> tuple[str, dict[str, str]]:
    """Return the columns as text without the constraints, and the constraints as options."""
    text, where = statement.text, f"CREATE TABLE {'.'.join(statement.name)}"
    columns: list[str] = []
    options: dict[str, str] = {}
    for part in listed(tokens):
        if is_constraint(part):
            options |= constraint_of(part, text=text, where=where).properties()
            continue
        refuse_clauses(part, where=where)
        columns.append(text[part[0].start : part[-1].end])
    return ", ".join(columns), options


def _closing(tokens: list[Token], at: int) -> int:
    """Return the position of the closing parenthesis."""
    depth = 0
    for position in range(at, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[position].text, 0)
        if not depth:
            return position
    raise UnsupportedError("CREATE TABLE: a parenthesis is not closed")


def _pairs(tokens: list[Token]) -> dict[str, str]:
    """Return `key = 'value'` pairs; the sign may be missing, and a key may be dotted."""
    pairs: dict[str, str] = {}
    key: list[str] = []
    for position, token in enumerate(tokens):
        is_last = position + 1 == len(tokens) or tokens[position + 1].text == ","
        if token.text in (",", "="):
            continue
        if is_last:
            pairs["".join(key)] = unquoted(token)
            key = []
        else:
            key.append(unquoted(token))
    return pairs
