"""Attached names as DataFrames: `spark.table`, `changes`, and CHANGES in a statement.

Spark plans the relation of a SQL name once, so a kept DataFrame has the rows of its first use for
good. Every statement plans a load of our format afresh. Therefore `spark.table` and
`spark.read.table` return a load, with the name's options and under the name.

Spark 4.2 and later parse the clause and ask the catalog for changes, which Spark's own catalog
refuses for every table. So the relation `name CHANGES ...` of our tables is replaced in the text by
a DataFrame of `db.table$changes`, for a query of any Spark version. The grammar is Spark's:

    name CHANGES FROM bound [TO bound] [WITH (options)] [[AS] alias]
    STREAM name CHANGES [FROM bound] [WITH (options)] [[AS] alias]
    bound: VERSION number-or-string | TIMESTAMP string, with INCLUSIVE or EXCLUSIVE
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamhouse.connector.names._attached_names import (
    AttachedName,
    attached_as_written,
    is_cached,
)
from streamhouse.connector.names._option_uses import named_at, pairs
from streamhouse.connector.names._shared_options import is_name_of_view
from streamhouse.connector.names._table_statement import (
    Token,
    name_parts,
    tokens_of,
    unquoted,
)
from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.options.connection import CHANGELOG, CHANGES, LOG
from streamhouse.reading.options.options import BATCH, FORMAT, STREAM, applicable
from streamhouse.reading.options.quoted_names import quoted

__all__ = [
    "changes_of_name",
    "has_changes_of_view",
    "load_changes",
    "load_of_name",
    "replace_changes",
    "with_changes",
]

_SIDES: Final = {"FROM": "starting", "TO": "ending"}
_BOUNDS: Final = {
    "VERSION": "Version",
    "SYSTEM_VERSION": "Version",
    "TIMESTAMP": "Timestamp",
    "SYSTEM_TIME": "Timestamp",
}
_AFTER_RELATION: Final = re.compile(
    "ANTI|CLUSTER|CROSS|DISTRIBUTE|EXCEPT|FULL|GROUP|HAVING|INNER|INTERSECT|JOIN|LATERAL|LEFT|LIMIT"
    "|MINUS|NATURAL|OFFSET|ON|ORDER|PIVOT|QUALIFY|RIGHT|SEMI|SORT|TABLESAMPLE|UNION|UNPIVOT|USING"
    "|WHERE|WINDOW"
)
"""The keywords behind a relation without an alias."""
_RELATION_FOLLOWS: Final = ("FROM", "JOIN", "USING", ",", "(")
_KEPT: Final = ("FUNCTION", "VIEW")
"""Definitions that keep a text with a query."""
_EXPRESSION_BEGINS: Final = (":", "?", "(", "{", "-", "+")
_FIELD: Final = "streamhouse_changes_"

Load = Callable[["ChangesUse"], Any]
"""Returns the DataFrame of a use; None leaves the use to Spark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesUse:
    """Characters [start, end) of a relation with changes, without its alias.

    Without `is_literal` a bound is an expression, and the options and the end are not known.
    """

    start: int
    end: int
    name: tuple[str, ...]
    options: Mapping[str, str]
    is_stream: bool
    has_alias: bool
    is_literal: bool = True


def load_of_name(spark: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the load of an attached name; None leaves the call to Spark.

    `options` are the reader's, in addition to the name's.
    """
    parts = name_parts(name)
    name_of_table = attached_as_written(spark, parts)
    # Cached rows stay.
    if name_of_table is None or is_cached(spark, name):
        return None
    reader_keys = {key.lower() for key in options}
    name_options = {
        key: value
        for key, value in applicable(name_of_table.options, uses=(BATCH,)).items()
        if key.lower() not in reader_keys
    }
    frame = spark.read.format(FORMAT).options(**name_options, **options).load()
    return frame.alias(parts[-1])


def with_changes(spark: Any, text: str, *, is_template: bool = False) -> tuple[str, dict[str, Any]]:
    """Return a statement for `spark.sql`, with DataFrames for the changes of attached names.

    Without such changes the text stays as it is. A template has DataFrames of its caller, too.
    """
    replaced, frames = replace_changes(
        text, lambda use: changes_of_name(spark, use.name, use.options, is_stream=use.is_stream)
    )
    if not frames:
        return text, {}
    if not is_template:
        replaced = replaced.replace("{", "{{").replace("}", "}}")
    for field in frames:
        replaced = re.sub(rf"\b{field}\b", f"{{{field}}}", replaced)
    return replaced, frames


def replace_changes(text: str, load: Load, *, prefix: str = _FIELD) -> tuple[str, dict[str, Any]]:
    """Return the text with a name in place of each use that `load` has a DataFrame for.

    A name is the prefix and a number. Raise `UnsupportedError` for a bound that is an expression,
    and for a view or a function: its text would outlive the DataFrame.
    """
    frames: dict[str, Any] = {}
    pieces, end = [], 0
    for use in _uses(text):
        frame = load(use)
        if frame is None:
            continue
        _refuse_kept(text, use)
        if not use.is_literal:
            raise UnsupportedError(
                f"CHANGES of '{'.'.join(use.name)}': bounds are numbers or texts, as in FROM"
                " VERSION 7, or TIMESTAMP '2026-11-21 10:00:00'; for a parameter or an expression"
                " use streamhouse.changes(spark, 'database.table', startingVersion=...)"
            )
        field = f"{prefix}{len(frames)}"
        frames[field] = frame
        alias = "" if use.has_alias else f" AS {quoted(use.name[-1])}"
        pieces += [text[end : use.start], field, alias]
        end = use.end
    return "".join([*pieces, text[end:]]), frames


def _refuse_kept(text: str, use: ChangesUse) -> None:
    words = [token.word for token in tokens_of(text[: use.start])]
    for at, word in enumerate(words):
        kept = [each for each in words[at + 1 : at + 6] if each in _KEPT]
        if word in ("ALTER", "CREATE") and kept:
            raise UnsupportedError(
                f"{word} {kept[0]}: Spark would keep the text of the query, and has CHANGES of"
                f" '{'.'.join(use.name)}' in queries only; use streamhouse.changes(spark,"
                " 'database.table', ...).createOrReplaceTempView(...)"
            )


def has_changes_of_view(spark: Any, text: str) -> bool:
    """Whether a statement asks for the changes of a view, which has none."""
    return any(is_name_of_view(spark, use.name) for use in _uses(text))


def changes_of_name(
    spark: Any, parts: Sequence[str], options: Mapping[str, Any], *, is_stream: bool
) -> Any:
    """Return the changes of an attached name, with the name's options; None for any other name."""
    name = attached_as_written(spark, parts)
    if name is None:
        return None
    return load_changes(spark, _path(name), _options(name, options), is_stream=is_stream)


def load_changes(spark: Any, path: str, options: Mapping[str, Any], *, is_stream: bool) -> Any:
    """Return the changes of a table as Spark's `changes` shows them: no updates by default."""
    reader = spark.readStream if is_stream else spark.read
    own = {str(key).lower(): value for key, value in options.items()}
    return reader.format(FORMAT).options(**{"computeupdates": "false"} | own).load(path)


def _path(name: AttachedName) -> str:
    table = name.connection.name
    if table.part not in ("", LOG, CHANGELOG, CHANGES):
        raise UnsupportedError(
            f"'{name.sql_name}' stands for '{table}', which has no changes; ask for the changes of"
            f" '{table.path}'"
        )
    return f"{table.path}${CHANGES}"


def _options(name: AttachedName, options: Mapping[str, Any]) -> dict[str, Any]:
    own = applicable(name.options, uses=(BATCH, STREAM))
    dropped = {"table", *(key.lower() for key in options)}
    return {k: v for k, v in own.items() if k.lower() not in dropped} | dict(options)


def _uses(text: str) -> Iterator[ChangesUse]:
    """Yield the relations with changes in a statement, in order."""
    if not re.search(r"\bCHANGES\b", text, re.IGNORECASE):
        return
    tokens = tokens_of(text)
    for start, name, end in named_at(tokens):
        is_stream = _word(tokens, start - 1) == "STREAM"
        before = _word(tokens, start - 1 - is_stream)
        if _word(tokens, end) != "CHANGES" or before not in _RELATION_FOLLOWS:
            continue
        options, at, is_literal = _clause(tokens, end + 1)
        if is_literal and not options and not is_stream:
            # Without FROM it is an alias of the table.
            continue
        if _word(tokens, at) == "WITH" and _word(tokens, at + 1) == "(":
            options |= dict(pairs(tokens[at + 2 :]))
            while tokens[at].text != ")" or tokens[at].is_string:
                at += 1
            at += 1
        word = _word(tokens, at)
        is_name = bool(re.match(r"[\w`]", word))
        yield ChangesUse(
            start=tokens[start - is_stream].start,
            end=tokens[at - 1].end,
            name=name,
            options=options,
            is_stream=is_stream,
            has_alias=is_name and not _AFTER_RELATION.fullmatch(word),
            is_literal=is_literal,
        )


def _clause(tokens: Sequence[Token], at: int) -> tuple[dict[str, str], int, bool]:
    """Return the bounds at a position as options, and the position behind them.

    The last value is False if a bound is an expression.
    """
    options: dict[str, str] = {}
    for word, side in _SIDES.items():
        kind = _BOUNDS.get(_word(tokens, at + 1))
        if _word(tokens, at) != word or kind is None:
            continue
        at += 2
        if _word(tokens, at) == "TIMESTAMP" and kind == "Timestamp":
            at += 1
        # A parameter of a statement that changes rows arrives as `(7)`.
        is_wrapped = _word(tokens, at) == "(" and _word(tokens, at + 2) == ")"
        at += is_wrapped
        is_value = at < len(tokens) and (tokens[at].is_string or tokens[at].text.isdigit())
        if not is_value:
            # Else it is a table of this name, as in SELECT a, b changes FROM version.
            is_call = _word(tokens, at + 1) == "(" and _word(tokens, at).isidentifier()
            is_expression = is_wrapped or is_call or _word(tokens, at) in _EXPRESSION_BEGINS
            return {}, at, not is_expression
        options[f"{side}{kind}".lower()] = unquoted(tokens[at])
        at += 1 + is_wrapped
        if _word(tokens, at) in ("INCLUSIVE", "EXCLUSIVE"):
            is_inclusive = _word(tokens, at) == "INCLUSIVE"
            options[f"{side}boundinclusive"] = str(is_inclusive).lower()
            at += 1
    return options, at, True


def _word(tokens: Sequence[Token], at: int) -> str:
    return tokens[at].word if 0 <= at < len(tokens) else ""
