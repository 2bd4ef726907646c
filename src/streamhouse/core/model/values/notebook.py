"""The display of tables and rows in a notebook: HTML with every text escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

__all__ = ["html_of_rows", "html_of_schema", "html_table"]

ROWS_SHOWN_MAX: Final = 20
COLUMNS_SHOWN_MAX: Final = 50
_TEXT_SHOWN_MAX: Final = 100


def html_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a title above; all arguments are plain text and escaped here."""
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(title)}</caption><thead><tr>{_cells('th', header)}</tr>"
        f"</thead><tbody>{lines}</tbody></table>"
    )


def html_of_rows(title: str, rows: pa.RecordBatch) -> str:
    """Return the first rows and columns of a batch; a cut is noted in the title."""
    names = rows.schema.names[:COLUMNS_SHOWN_MAX]
    shown = rows.slice(0, ROWS_SHOWN_MAX)
    columns = [[_text(value) for value in shown.column(at)] for at in range(len(names))]
    cuts = [
        f"{kind}: the first {shown_max} of {count}"
        for kind, shown_max, count in (
            ("rows", ROWS_SHOWN_MAX, rows.num_rows),
            ("columns", COLUMNS_SHOWN_MAX, rows.num_columns),
        )
        if count > shown_max
    ]
    return html_table("; ".join((title, *cuts)), names, zip(*columns, strict=True))


def html_of_schema(title: str, schema: pa.Schema) -> str:
    """Return the columns with their types."""
    return html_table(title, ("column", "type"), ((f.name, str(f.type)) for f in schema))


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(_cut(text))}</{tag}>" for text in texts)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN_MAX else f"{text[: _TEXT_SHOWN_MAX - 1]}…"


def _text(value: pa.Scalar) -> str:
    try:
        shown: Any = value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        # A date or time outside of Python's years has the text of Arrow.
        is_nested = pa.types.is_nested(value.type)
        shown = value.type if is_nested else value.cast(pa.string()).as_py()
    return "null" if shown is None else str(shown)
