"""`CREATE TABLE ... USING streamhouse`: what is made, and how it is named.

Spark would make an entry of its catalog that knows no table: it hands OPTIONS, TBLPROPERTIES and
LOCATION of such a statement to no reader and no writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamhouse.connector.names._statement import Statement, Token, unquoted
from streamhouse.core.errors import UnsupportedError

__all__ = ["Definition", "definition_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a `CREATE TABLE` says: `columns` and `query` as SQL text, options by key."""

    name: tuple[str, ...]
    only_if_absent: bool
    columns: str | None
    query: str | None
    options: dict[str, str] = field(default_factory=dict)


def definition_of(statement: Statement) -> Definition:
    """Return what a `CREATE TABLE ... USING streamhouse` says.

    Raises `UnsupportedError` for a clause that means nothing for a Streamhouse table.
    """
    text, rest = statement.text, list(statement.rest)
    columns = query = None
    options: dict[str, str] = {}
    at = 0
    if rest and rest[0].text == "(":
        end = _closing(rest, 0)
        columns = text[rest[0].end : rest[end].start]
        at = end + 1
    while at < len(rest):
        word = rest[at].word
        following = rest[at + 1].text.upper() if at + 1 < len(rest) else ""
        if word in ("AS", "SELECT", "WITH"):
            query = text[rest[at].end if word == "AS" else rest[at].start :].strip().rstrip(";")
            break
        if word == "USING":
            at += 2
        elif word in ("OPTIONS", "TBLPROPERTIES") and following == "(":
            end = _closing(rest, at + 1)
            options |= _pairs(rest[at + 2 : end])
            at = end + 1
        elif word == "PARTITIONED" and following == "BY":
            end = _closing(rest, at + 2)
            options["partitioned.by"] = text[rest[at + 2].end : rest[end].start]
            at = end + 1
        elif rest[at].text == ";":
            at += 1
        else:
            raise UnsupportedError(
                f"CREATE TABLE {'.'.join(statement.name)} ... {rest[at].text}: USING streamhouse"
                " takes columns, OPTIONS or TBLPROPERTIES, PARTITIONED BY and AS SELECT; leave the"
                " rest out"
            )
    before = text[: rest[0].start] if rest else text
    return Definition(
        name=statement.name,
        only_if_absent="IF NOT EXISTS" in " ".join(before.upper().split()),
        columns=columns,
        query=query,
        options=options,
    )


def _closing(tokens: list[Token], at: int) -> int:
    """Return where the parenthesis at a position is closed."""
    depth = 0
    for position in range(at, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[position].text, 0)
        if not depth:
            return position
    raise UnsupportedError("CREATE TABLE: a parenthesis is not closed")


def _pairs(tokens: list[Token]) -> dict[str, str]:
    """Return `key = 'value'` pairs; the sign may be left out, and a key may be dotted."""
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
