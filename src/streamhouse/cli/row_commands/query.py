"""`streamhouse query`: a SELECT over the tables, by DuckDB."""

from __future__ import annotations

from pathlib import Path

import click

from streamhouse.cli.output import json_option, open_console
from streamhouse.cli.row_output import print_rows
from streamhouse.cli.service_options import (
    endpoint_option,
    open_reader,
    read_token,
    token_file_option,
)

__all__ = ["command"]


@click.command("query")
@click.argument("statement", metavar='"SELECT ..."')
@click.option(
    "-n",
    "--rows",
    "rows_max",
    type=click.IntRange(min=1),
    default=1_000,
    show_default=True,
    help="On a terminal: show at most so many rows.",
)
@click.option("--memory-limit", metavar="SIZE", help="Of DuckDB, as in 8GB. Default: 2GB.")
@endpoint_option
@token_file_option
@json_option
def command(
    *,
    statement: str,
    rows_max: int,
    memory_limit: str | None,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Run a SELECT of DuckDB over tables, named database.table, lake and log together.

    Without a terminal: the names of the columns, then a row a line, with tabs between the fields.
    With --json: a JSON object a line.
    """
    console = open_console()
    with open_reader(endpoint, token=read_token(token_file)) as client:
        result = client.query(statement, memory_limit=memory_limit)
    count = print_rows(
        result.schema,
        result.to_batches(),
        is_json=is_json,
        console=console,
        table_rows_max=rows_max,
    )
    if count < result.num_rows:
        click.echo(f"{count:,} of {result.num_rows:,} rows; --rows shows more", err=True)
