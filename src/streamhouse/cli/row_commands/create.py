"""`streamhouse create`: makes a table."""

from __future__ import annotations

from pathlib import Path

import click

from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.cli.table_options import TableOptions, columns_text, table_options

__all__ = ["command"]


@click.command("create")
@table_argument("path", is_new=True)
@click.argument("columns", metavar='"COLUMN TYPE, ..."')
@table_options
@click.option("--if-not-exists", is_flag=True, help="Accept an existing table of this definition.")
@endpoint_option
@token_file_option
@json_option
def command(
    *,
    path: str,
    columns: str,
    options: TableOptions,
    if_not_exists: bool,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Create TABLE (database.table), and its database if missing, with columns in Spark's DDL.

    \b
    streamhouse create shop.orders "id bigint not null, item string, at timestamp"
    streamhouse create shop.stock "item string, left int" --primary-key item

    Rows are appended to a table without a primary key, and upserted into a table with one.
    """
    with open_client(endpoint, token=read_token(token_file)) as client:
        table = client.create_table(
            path, columns, if_not_exists=if_not_exists, **options.arguments()
        )
    if is_json:
        print_json(table.to_json())
    else:
        click.echo(f"{table.path}: {columns_text(table)}")
