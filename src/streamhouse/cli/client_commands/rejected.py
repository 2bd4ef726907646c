"""`streamhouse rejected`: shows a table's rejected rows, and replays the rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from streamhouse.cli.command_group import CommandGroup
from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_reader,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.core.errors import TableNotFoundError

__all__ = ["command"]


@click.group("rejected", cls=CommandGroup)
def command() -> None:
    """Rows that did not fit a table, in DB.TABLE$rejected."""


@command.command("show")
@table_argument("table", metavar="DB.TABLE")
@endpoint_option
@token_file_option
@json_option
def show(*, table: str, endpoint: str | None, token_file: Path | None, is_json: bool) -> None:
    """Count the rejected rows of DB.TABLE by column and reason, the most frequent first."""
    with open_reader(endpoint, token=read_token(token_file)) as client:
        client.describe_table(table)
        try:
            rows = client.read(f"{table}$rejected", columns=["column", "reason"]).to_pylist()
        except TableNotFoundError:
            rows = []
    counts = Counter((row["column"] or "-", row["reason"]) for row in rows)
    if is_json:
        print_json(
            {
                "table": table,
                "row_count": len(rows),
                "reasons": [
                    {"column": None if column == "-" else column, "reason": reason, "count": count}
                    for (column, reason), count in counts.most_common()
                ],
            }
        )
        return
    for (column, reason), count in counts.most_common():
        click.echo(f"{count}\t{column}\t{reason}")
    if not rows:
        click.echo(f"{table} has no rejected rows")


@command.command("replay")
@table_argument("table", metavar="DB.TABLE")
@endpoint_option
@token_file_option
@json_option
def replay(*, table: str, endpoint: str | None, token_file: Path | None, is_json: bool) -> None:
    """Write the rejected rows of DB.TABLE that fit the table now, each once."""
    with open_reader(endpoint, token=read_token(token_file)) as client:
        result = client.replay_rejected(table)
    if is_json:
        print_json({"table": table, "moved": result.moved, "left": result.left})
        return
    click.echo(f"{result.moved} rows moved to {table}, {result.left} left in {table}$rejected")
