"""`streamhouse shards`: the processes of a service; `move` moves a table to another shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich import box
from rich.table import Table
from rich.text import Text

from streamhouse.cli.command_group import CommandGroup
from streamhouse.cli.output import json_option, open_console, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.core.errors import UnavailableError

__all__ = ["command"]


@click.group("shards", cls=CommandGroup, invoke_without_command=True)
@endpoint_option
@token_file_option
@json_option
@click.pass_context
def command(
    context: click.Context, *, endpoint: str | None, token_file: Path | None, is_json: bool
) -> None:
    """Show the shards of a service: owner, load, and the state of the journal.

    A service with a journal has one shard or more. Standbys are not shown: they leave nothing in
    the store. "lag" is the age of the oldest change that the journal lacks, "lease" how long the
    owner may still answer, "saved" the age of the newest checkpoint.

    `streamhouse shards move TABLE --to SHARD` moves a table to another shard.
    """
    if context.invoked_subcommand is None:
        _show(endpoint, token_file, is_json=is_json)


@command.command("move")
@table_argument("table")
@click.option("--to", "shard", required=True, help="The shard that the table moves to.")
@endpoint_option
@token_file_option
@json_option
@click.pass_context
def move(
    context: click.Context,
    table: str,
    shard: str,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Move TABLE to another shard. Nobody reads or writes the table meanwhile; repeat the command
    if it is interrupted.
    """
    outer = context.parent
    assert outer is not None
    if outer.get_parameter_source("endpoint") is ParameterSource.COMMANDLINE:
        endpoint = outer.params["endpoint"]
    if outer.get_parameter_source("token_file") is ParameterSource.COMMANDLINE:
        token_file = outer.params["token_file"]
    with open_client(endpoint, token=read_token(token_file)) as client:
        client.move_table(table, shard)
    if is_json or outer.params["is_json"]:
        print_json({"table": table, "shard": shard})
    else:
        click.echo(f"table {table} is in shard {shard}")


def _show(endpoint: str | None, token_file: Path | None, *, is_json: bool) -> None:
    with open_client(endpoint, token=read_token(token_file)) as client:
        shards = client.shards()
    if is_json:
        print_json({"shards": shards})
    elif shards:
        open_console().print(_overview(shards))
    else:
        click.echo("the service has no journal: it is one process")
    gone = [shard["shard"] for shard in shards if not shard["is_live"]]
    if gone:
        raise UnavailableError(
            f"shard {', '.join(gone)} has no owner: its tables wait until a process serves it"
        )


def _overview(shards: list[dict[str, Any]]) -> Table:
    overview = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    overview.add_column("shard", overflow="fold")
    overview.add_column("answers at", no_wrap=True)
    overview.add_column("role")
    for heading in ("epoch", "tables", "cores", "lag", "lease", "saved"):
        overview.add_column(heading, justify="right")
    for shard in shards:
        overview.add_row(*_row(shard))
    return overview


def _row(shard: dict[str, Any]) -> tuple[str | Text, ...]:
    role = Text("owner") if shard["is_live"] else Text("no owner", style="red")
    return (
        str(shard["shard"]),
        str(shard["endpoint"] or ""),
        role,
        str(shard["epoch"]),
        f"{shard['table_count']:,}",
        f"{shard['load_millicores'] / 1000:.1f}",
        *_journal(shard.get("journal")),
    )


def _journal(journal: dict[str, Any] | None) -> tuple[str, str, str]:
    if journal is None:
        # The owner did not answer in time, or the shard has no owner.
        return "", "", ""
    return (
        f"{journal['lag_ms'] / 1000:.1f} s",
        f"{journal['lease_left_ms'] / 1000:.1f} s",
        f"{journal['checkpoint_age_ms'] / 60_000:.0f} min",
    )
