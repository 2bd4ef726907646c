"""`streamhouse head`: some rows of a table, from lake and log."""

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
from streamhouse.cli.table_names import columns_option, table_argument

__all__ = ["command"]


@click.command("head")
@table_argument("path")
@click.option(
    "-n",
    "--rows",
    "rows_max",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="At most so many rows.",
)
@columns_option
@click.option("--where", metavar="CONDITION", help="Only these rows, as in \"item = 'tea'\".")
@endpoint_option
@token_file_option
@json_option
def command(
    *,
    path: str,
    rows_max: int,
    columns: list[str] | None,
    where: str | None,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Show some rows of TABLE, in no particular order.

    Without a terminal: the names of the columns, then a row a line, with tabs between the fields.
    With --json: a JSON object a line.
    """
    console = open_console()
    with (
        open_reader(endpoint, token=read_token(token_file)) as client,
        client.scan(path, columns=columns, where=where, limit=rows_max) as rows,
    ):
        print_rows(rows.schema, rows, is_json=is_json, console=console)
