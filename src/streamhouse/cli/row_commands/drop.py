"""`streamhouse drop`: drops tables, or an empty database."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import DATABASE, table_argument
from streamhouse.client import StorageClient
from streamhouse.core.errors import NotFoundError
from streamhouse.core.model.table import TablePath

__all__ = ["command"]


@click.command("drop")
@table_argument("paths", metavar="[TABLE]...", nargs=-1)
@click.option("--database", type=DATABASE, help="Drop this database, which must be empty.")
@click.option("--if-exists", is_flag=True, help="Pass over tables that do not exist.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@endpoint_option
@token_file_option
@json_option
def command(
    *,
    paths: tuple[str, ...],
    database: str | None,
    if_exists: bool,
    yes: bool,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Drop the tables TABLE (database.table), after a question.

    The rows in the log go with the table; the lake table stays in the catalog. If one of the tables
    does not exist, none is dropped.
    """
    if bool(paths) == (database is not None):
        raise click.UsageError("name the tables to drop, or a database with --database")
    with open_client(endpoint, token=read_token(token_file)) as client:
        if database is not None:
            _ask(f"database {database}", yes=yes, is_json=is_json)
            client.drop_database(database)
            dropped = [database]
        else:
            dropped = _existing(client, paths, if_exists=if_exists)
            if dropped:
                _ask(", ".join(dropped), yes=yes, is_json=is_json)
            for path in dropped:
                client.drop_table(path, if_exists=if_exists)
    if is_json:
        print_json({"dropped": dropped})
    else:
        click.echo(f"dropped {', '.join(dropped)}" if dropped else "there was nothing to drop")


def _existing(client: StorageClient, paths: tuple[str, ...], *, if_exists: bool) -> list[str]:
    """Return the full names of the tables, each once."""
    names: dict[str, None] = {}
    for path in paths:
        try:
            names[str(client.describe_table(path).path)] = None
        except NotFoundError:
            if not if_exists:
                raise
            TablePath.parse(path)
    return list(names)


def _ask(what: str, *, yes: bool, is_json: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"nobody can be asked here whether to drop {what}: give --yes")
    click.confirm(f"Drop {what}?", abort=True, err=is_json)
