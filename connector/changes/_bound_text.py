"""The text of a statement with its parameters, as `spark.sql` takes them, in place.

`:name` and `?` become literals; `{name}` becomes a literal, or the name of a view of a DataFrame.
A relation with CHANGES becomes the name of a view of the changes.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from pyspark.sql import Column

from streamhouse.connector.names._name_loads import Load, replace_changes
from streamhouse.connector.names._row_changes import Arguments
from streamhouse.connector.names._table_statement import tokens_of
from streamhouse.core.errors import InvalidRequestError, UnsupportedError

__all__ = ["bound_text", "temporary_views"]

_ViewOf = Callable[..., str]


@contextlib.contextmanager
def bound_text(text: str, arguments: Arguments, load: Load = lambda _use: None) -> Iterator[str]:
    """Return the text with all parameters in place; the views of DataFrames end with the block.

    `load` has the DataFrames of changes.
    """
    with temporary_views() as view_of:
        bound = _with_parameters(_with_values(text, arguments.values, view_of), arguments.args)
        complete, changes = replace_changes(bound, load, prefix=f"{_new_view()}_")
        for view, frame in changes.items():
            view_of(frame, view)
        yield complete


@contextlib.contextmanager
def temporary_views() -> Iterator[_ViewOf]:
    """Return the way from a DataFrame to the name of a view; the views end with the block."""
    views: dict[str, Any] = {}

    def view_of(frame: Any, name: str | None = None) -> str:
        name = name or _new_view()
        frame.createOrReplaceTempView(name)
        views[name] = frame
        return name

    try:
        yield view_of
    finally:
        for name, frame in views.items():
            frame.sparkSession.catalog.dropTempView(name)


def _new_view() -> str:
    return f"streamhouse_{uuid.uuid4().hex}"


def _with_values(text: str, values: Mapping[str, Any], view_of: _ViewOf) -> str:
    if not values:
        return text
    texts = {}
    for name, value in values.items():
        if hasattr(value, "createOrReplaceTempView"):
            texts[name] = view_of(value)
        else:
            texts[name] = _literal(value, f"{{{name}}}")
    try:
        return text.format(**texts)
    except (AttributeError, KeyError, IndexError, ValueError) as error:
        raise InvalidRequestError(
            f"a placeholder of the statement has no value ({error!r}); {{name}} takes a DataFrame"
            " or a plain value, and a brace of the text is written twice"
        ) from None


def _with_parameters(text: str, args: Mapping[str, Any] | Sequence[Any] | None) -> str:
    if not args:
        return text
    tokens = tokens_of(text)
    pieces, end, position = [], 0, 0
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.is_string:
            continue
        if isinstance(args, Mapping):
            if token.text != ":" or following is None or following.start != token.end:
                continue
            # A type behind `::` is no parameter.
            if text[: token.start].endswith(":"):
                continue
            if following.text not in args:
                continue
            value, behind = args[following.text], following.end
            name = f":{following.text}"
        else:
            if token.text != "?":
                continue
            position += 1
            if position > len(args):
                break
            value, behind, name = args[position - 1], token.end, f"parameter {position}"
        pieces += [text[end : token.start], _literal(value, name)]
        end = behind
    if not isinstance(args, Mapping) and position != len(args):
        raise InvalidRequestError(
            f"the statement has {position if position < len(args) else f'more than {len(args)}'}"
            f" parameters '?', and args has {len(args)} values"
        )
    return "".join([*pieces, text[end:]])


def _literal(value: Any, name: str) -> str:
    """Return the literal of a value, of the type that Spark gives the value."""
    match value:
        case None:
            return "NULL"
        case bool():
            return str(value).upper()
        # The parentheses keep a sign behind `-` from beginning a comment. A member of an Enum is
        # its value, as for Spark.
        case int():
            return f"({int.__repr__(value)})"
        case float() if not math.isfinite(value):
            return f"CAST('{float.__repr__(value)}' AS DOUBLE)"
        case float():
            return f"({float.__repr__(value)}D)"
        case Decimal():
            return f"({value:f}BD)"
        case str():
            plain = not set(value) & set("'\\$\n")
            value_text = str.__str__(value)
            return f"'{value_text}'" if plain else f"CAST(X'{value_text.encode().hex()}' AS STRING)"
        case bytes() | bytearray():
            return f"X'{value.hex()}'"
        case datetime():
            whole = round(value.replace(microsecond=0).timestamp()) * 1_000_000
            return f"timestamp_micros({whole + value.microsecond}L)"
        case date():
            return f"DATE '{value.isoformat()}'"
    kind = "column" if isinstance(value, Column) else type(value).__name__
    raise UnsupportedError(
        f"{name} is a {kind}: a statement that changes rows takes plain values (numbers, texts,"
        " dates, times, bytes) and DataFrames; write the expression into the statement, or use"
        " streamhouse.Table, which takes columns"
    )
