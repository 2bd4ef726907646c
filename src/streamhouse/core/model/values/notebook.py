"""What a notebook shows of tables and of their rows: HTML in which every text is escaped."""

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
    """Return a table with its title above; all of it is text, and escaped here."""
    lines = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(title)}</caption><thead><tr>{_cells('th', header)}</tr>"
        f"</thead><tbody>{lines}</tbody></table>"
    )


def html_of_rows(title: str, rows: pa.RecordBatch) -> str:
    """Return the first rows and columns of a batch; the title says how many there are."""
    names = rows.schema.names[:COLUMNS_SHOWN_MAX]
    shown = rows.slice(0, ROWS_SHOWN_MAX)
    columns = [[_text(value) for value in shown.column(at)] for at in range(len(names))]
    left = [
        f"{what}: the first {shown_max} of {count}"
        for what, shown_max, count in (
            ("rows", ROWS_SHOWN_MAX, rows.num_rows),
            ("columns", COLUMNS_SHOWN_MAX, rows.num_columns),
        )
        if count > shown_max
    ]
    return html_table("; ".join((title, *left)), names, zip(*columns, strict=True))


def html_of_schema(title: str, schema: pa.Schema) -> str:
    """Return columns with their types."""
    return html_table(title, ("column", "type"), ((f.name, str(f.type)) for f in schema))


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{html.escape(_cut(text))}</{tag}>" for text in texts)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN_MAX else f"{text[: _TEXT_SHOWN_MAX - 1]}…"


def _text(value: pa.Scalar) -> str:
    try:
        found: Any = value.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        # A date or time that Python does not have: Arrow's own words.
        is_nested = pa.types.is_nested(value.type)
        found = value.type if is_nested else value.cast(pa.string()).as_py()
    return "null" if found is None else str(found)
