"""`ALTER TABLE` on an attached name, as changes of the table itself.

Spark alone would change only the columns in its catalog.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamhouse.connector.names._constraints import (
    AddedConstraint,
    DroppedConstraint,
    constraint_of,
    dropped_constraint,
    is_constraint,
    listed,
    refuse_clauses,
)
from streamhouse.connector.names._table_statement import TableStatement, Token, name_at, unquoted
from streamhouse.core.errors import UnsupportedError

__all__ = ["Alteration", "alteration_of", "commented"]

_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CAN: Final = (
    "ADD COLUMNS (name type DEFAULT value, column.field type), DROP COLUMN name, RENAME COLUMN"
    " old TO new, ALTER COLUMN name[.field] TYPE type, ALTER COLUMN name COMMENT 'text', ALTER"
    " COLUMN name DROP NOT NULL, ADD CONSTRAINT name CHECK (condition), DROP CONSTRAINT name, SET"
    " TBLPROPERTIES, UNSET TBLPROPERTIES"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """The change: of the schema, in the form of `alter_schema`, of properties, or a constraint."""

    changes: tuple[dict[str, Any], ...] = ()
    updates: dict[str, str] = field(default_factory=dict)
    removals: tuple[str, ...] = ()
    constraint: AddedConstraint | DroppedConstraint | None = None


def alteration_of(statement: TableStatement, *, type_of: Callable[[str], Any]) -> Alteration:
    """Return the alteration of an `ALTER TABLE`; `type_of` parses a type in Spark's spelling.

    Raise `UnsupportedError` for an impossible alteration, with the possible ones.
    """
    words = [token.word for token in statement.tokens]
    tokens = list(statement.tokens)
    if words[:1] == ["ADD"] and words[1:2] in (["COLUMN"], ["COLUMNS"]):
        specs = list(listed(tokens[2:]))
        return Alteration(changes=tuple(_added(spec, statement, type_of=type_of) for spec in specs))
    where = f"ALTER TABLE {'.'.join(statement.name)}"
    if words[:1] == ["ADD"] and is_constraint(tokens[1:]):
        added = constraint_of(tokens[1:], text=statement.text, where=where)
        return Alteration(constraint=added)
    if words[:2] == ["DROP", "CONSTRAINT"]:
        return Alteration(constraint=dropped_constraint(tokens[2:], where=where))
    if _is_of_field(tokens, words):
        raise UnsupportedError(
            f"ALTER TABLE {'.'.join(statement.name)} {' '.join(words[:2])}: a field inside a column"
            " can be added and widened, and nothing else; add one more field or column, and write"
            " the values there"
        )
    if words[:1] == ["DROP"] and words[1:2] in (["COLUMN"], ["COLUMNS"]):
        names = [spec[0] for spec in listed(tokens[2:]) if len(spec) == 1]
        if names and len(names) == len(list(listed(tokens[2:]))):
            return Alteration(
                changes=tuple({"drop": unquoted(n), "confirm": unquoted(n)} for n in names)
            )
    if words[:2] == ["RENAME", "COLUMN"] and len(words) == 5 and words[3] == "TO":
        return Alteration(changes=({"rename": unquoted(tokens[2]), "to": unquoted(tokens[4])},))
    if words[:1] in (["ALTER"], ["CHANGE"]):
        return Alteration(changes=(_column(tokens[1:], statement, type_of=type_of),))
    if words[:2] in (["SET", "TBLPROPERTIES"], ["UNSET", "TBLPROPERTIES"]):
        properties = list(listed(tokens[2:]))
        if words[0] == "SET":
            pairs = (_property(spec, statement) for spec in properties)
            return Alteration(updates=dict(pairs))
        return Alteration(removals=tuple("".join(map(unquoted, spec)) for spec in properties))
    raise _cannot(statement)


def commented(column: str, statement: TableStatement) -> Alteration:
    """Return the alteration of a `COMMENT ON COLUMN ... IS 'text' | NULL`."""
    tokens = [token for token in statement.tokens if token.text != ";"]
    if (
        len(tokens) != 2
        or tokens[0].word != "IS"
        or not (tokens[1].is_string or tokens[1].word == "NULL")
    ):
        raise UnsupportedError(
            f"COMMENT ON COLUMN {'.'.join(statement.name)}: write IS 'text', or IS NULL"
        )
    text = unquoted(tokens[1]) if tokens[1].is_string else ""
    return Alteration(changes=({"comment": column, "to": text},))


def _is_of_field(tokens: Sequence[Token], words: Sequence[str]) -> bool:
    """Whether a statement alters, drops or renames a field without widening its type.

    The name of a field has a dot outside of backticks.
    """
    if words[:1] not in (["ALTER"], ["CHANGE"], ["DROP"], ["RENAME"]):
        return False
    at = 2 if words[1:2] in (["COLUMN"], ["COLUMNS"]) else 1
    at += words[at : at + 1] == ["("]
    path, behind = name_at(tokens, at)
    return len(path) > 1 and words[behind : behind + 1] != ["TYPE"]


def _cannot(statement: TableStatement) -> UnsupportedError:
    words = " ".join(token.text for token in statement.tokens[:3])
    return UnsupportedError(
        f"ALTER TABLE {'.'.join(statement.name)} {words} ...: that cannot be done to a Streamhouse"
        f" table; what can be is {_CAN}"
    )


def _added(
    spec: list[Token], statement: TableStatement, *, type_of: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the change for `name[.field] type` and what may follow, in any order.

    This is `[DEFAULT literal] [COMMENT 'text'] [FIRST | AFTER column]`.
    """
    end = len(spec)
    change: dict[str, Any] = {}
    while end > 2:
        words = [token.word for token in spec[:end]]
        if words[-1] == "FIRST":
            change["first"], end = True, end - 1
        elif words[-2] == "AFTER":
            change["after"], end = unquoted(spec[end - 1]), end - 2
        elif words[-2] == "COMMENT":
            change["comment"], end = unquoted(spec[end - 1]), end - 2
        elif "DEFAULT" in words[2:] and (given := _literal(spec[words.index("DEFAULT") + 1 : end])):
            end = words.index("DEFAULT")
            change |= {} if given[0] is None else {"default": given[0]}
        else:
            break
    words = [token.word for token in spec[:end]]
    path, behind = name_at(spec[:end], 0) if end > 2 and words[1] == "." else ((), 0)
    name: str | list[str] = list(path)
    if not path and spec:
        name, behind = unquoted(spec[0]), 1
    where = f"ALTER TABLE {'.'.join(statement.name)}"
    if "DEFAULT" in words[behind + 1 :] and "GENERATED" not in words:
        default = _text(spec[words.index("DEFAULT") : end], statement)
        raise UnsupportedError(
            f"{where}: {default} is no literal: a default is one value, which earlier rows get, as"
            " DEFAULT 0 or DEFAULT 'none'"
        )
    refuse_clauses(spec[behind - 1 : end], where=where)
    if end <= behind or words[-2:] == ["NOT", "NULL"]:
        raise _cannot(statement)
    return {"add": name, "type": type_of(_text(spec[behind:end], statement)), **change}


def _literal(tokens: Sequence[Token]) -> tuple[str | None] | None:
    """Return the value of a literal as a text, or None for NULL; None for another expression."""
    words, text = [token.word for token in tokens], "".join(token.text for token in tokens)
    if words == ["NULL"]:
        return (None,)
    if len(tokens) == 1 and tokens[0].is_string:
        return (unquoted(tokens[0]),)
    if len(tokens) == 2 and words[0] in ("DATE", "TIMESTAMP", "X") and tokens[1].is_string:
        return (unquoted(tokens[1]),)
    is_plain = words in (["TRUE"], ["FALSE"]) or _NUMBER.fullmatch(text)
    return (text,) if is_plain else None


def _column(
    tokens: list[Token], statement: TableStatement, *, type_of: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the change for `[COLUMN] name TYPE type | COMMENT 'text' | DROP NOT NULL`.

    A field's type can be changed, too: `name.field`.
    """
    if tokens and tokens[0].word == "COLUMN":
        tokens = tokens[1:]
    words = [token.word for token in tokens]
    path, behind = name_at(tokens, 0)
    if words[behind : behind + 1] == ["TYPE"] and len(tokens) > behind + 1:
        widened = path[0] if len(path) == 1 else list(path)
        return {"widen": widened, "to": type_of(_text(tokens[behind + 1 :], statement))}
    if words[1:2] == ["COMMENT"] and len(tokens) == 3:
        return {"comment": unquoted(tokens[0]), "to": unquoted(tokens[2])}
    if words[1:3] in (["SET", "DEFAULT"], ["DROP", "DEFAULT"]):
        refuse_clauses([tokens[0], tokens[2]], where=f"ALTER TABLE {'.'.join(statement.name)}")
    if words[1:] == ["DROP", "NOT", "NULL"]:
        return {"drop_not_null": unquoted(tokens[0])}
    raise _cannot(statement)


def _property(spec: list[Token], statement: TableStatement) -> tuple[str, str]:
    """Return the pair of `'key' = 'value'`; the key may be written without quotes."""
    texts = [token.text for token in spec]
    if "=" not in texts:
        raise _cannot(statement)
    at = texts.index("=")
    return "".join(map(unquoted, spec[:at])), "".join(map(unquoted, spec[at + 1 :]))


def _text(tokens: Sequence[Token], statement: TableStatement) -> str:
    return statement.text[tokens[0].start : tokens[-1].end]
