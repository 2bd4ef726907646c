"""Rows as a command prints them: a table on a terminal, a line of tabs in a pipe, JSON by `--json`.

Values have the texts of the HTTP API. All texts are made by whole columns; only the table of a
terminal, which has few rows, is made row by row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import click
import pyarrow as pa
import pyarrow.compute as pc
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamhouse.core.text.rows_as_json import joined, row_texts
from streamhouse.core.types.registry import type_of

__all__ = ["header_line", "print_lines", "print_rows"]

NULL: Final = "NULL"
_BATCH_ROWS: Final = 10_000
_COLUMN_CHARACTERS_MIN: Final = 8


def print_rows(
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    is_json: bool,
    console: Console,
    table_rows_max: int | None = None,
) -> int:
    """Print rows; return the number of printed rows.

    On a terminal at most `table_rows_max` rows are printed, and read.
    """
    if console.is_terminal and not is_json:
        return _print_table(schema, batches, console, table_rows_max)
    if not is_json:
        click.echo(header_line(schema))
    return sum(print_lines(batch, is_json=is_json) for batch in batches)


def print_lines(batch: pa.RecordBatch, *, is_json: bool) -> int:
    """Print a line for each row: a JSON object, or fields with tabs between; return the number."""
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        rows = batch.slice(start, _BATCH_ROWS)
        lines = row_texts(rows) if is_json else _tabbed(rows)
        click.echo(joined(lines, separator="\n").to_pybytes())
    return int(batch.num_rows)


def header_line(schema: pa.Schema) -> str:
    """Return the names of the columns with tabs between."""
    return "\t".join(schema.names)


def _tabbed(rows: pa.RecordBatch) -> pa.Array:
    if not rows.num_columns:
        return pa.array([""] * rows.num_rows, pa.large_string())
    return pc.binary_join_element_wise(
        *map(_texts, rows.columns), pa.scalar("\t", pa.large_string())
    )


def _texts(column: pa.Array) -> pa.LargeStringArray:
    """Return the values as texts on one line each: as in JSON, without quotes around a text."""
    texts = type_of(column.type).json_texts(column)
    inner = pc.replace_substring(pc.utf8_slice_codeunits(texts, 1, -1), '\\"', '"')
    if pa.types.is_timestamp(column.type):
        inner = pc.replace_substring_regex(inner, r"\+00:00$", "Z")
    return pc.if_else(pc.starts_with(texts, '"'), inner, texts).fill_null(NULL)


def _print_table(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], console: Console, rows_max: int | None
) -> int:
    rows = _first_rows(schema, batches, rows_max)
    columns = [_texts(column).to_pylist() for column in rows.columns]
    if schema.names and console.width < len(schema.names) * _COLUMN_CHARACTERS_MIN:
        _print_upright(schema.names, columns, console)
        return int(rows.num_rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for field in schema:
        is_number = "sum" in type_of(field.type).aggregates
        table.add_column(
            Text(field.name), justify="right" if is_number else "left", overflow="fold"
        )
    for values in zip(*columns, strict=True):
        table.add_row(*map(Text, values))
    console.print(table)
    return int(rows.num_rows)


def _print_upright(names: list[str], columns: list[list[str]], console: Console) -> None:
    """Print a line for each value: a row with many columns does not fit a line."""
    width = max(map(len, names))
    for number, values in enumerate(zip(*columns, strict=True), 1):
        console.print(Text(f"row {number}", style="bold"))
        for name, value in zip(names, values, strict=True):
            console.print(Text(f"  {name.ljust(width)}  {value}"))


def _first_rows(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], rows_max: int | None
) -> pa.RecordBatch:
    parts, remaining = [], rows_max
    for batch in batches:
        part = batch if remaining is None else batch.slice(0, remaining)
        parts.append(part)
        if remaining is not None:
            remaining -= part.num_rows
            if not remaining:
                break
    if not parts:
        return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
    return pa.concat_batches(parts)
