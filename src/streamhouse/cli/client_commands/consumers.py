"""`streamhouse consumers`: the positions of the tables' readers, and their lag."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.table import Table
from rich.text import Text

from streamhouse.cli.option_values import age_text
from streamhouse.cli.output import json_option, open_console, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    TableDamagedError,
    UnavailableError,
    suggestion,
)

__all__ = ["command"]

_LEFT: Final = ("table", "consumer")
_RIGHT: Final = ("unread rows", "lag", "at risk", "reported")


@click.command("consumers")
@table_argument("path", metavar="[TABLE]", required=False)
@endpoint_option
@token_file_option
@json_option
@click.option("--forget", metavar="NAME", help="Forget a consumer that will not come back.")
def command(
    path: str | None,
    endpoint: str | None,
    token_file: Path | None,
    forget: str | None,
    is_json: bool,
) -> None:
    """Show how far the readers of all tables, or of TABLE, are: streams and subscriptions that
    report their position. At risk: unread rows that retention removes soon.
    """
    if forget is not None and path is None:
        raise click.UsageError("--forget needs the TABLE whose consumer it is")
    with open_client(endpoint, token=read_token(token_file)) as client:
        if forget is not None and path is not None:
            names = [str(consumer["name"]) for consumer in client.consumers(path)]
            if forget not in names:
                hint = suggestion(forget, names)
                raise click.ClickException(f"table '{path}' has no consumer '{forget}'{hint}")
            client.forget_consumer(path, forget)
            return
        paths = client.list_tables() if path is None else [path]
        consumers, troubles = _consumers_of(client, paths, is_single=path is not None)
    if is_json:
        print_json({"consumers": consumers, "not_served": troubles})
        return
    overview = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in _LEFT:
        overview.add_column(heading, overflow="fold")
    for heading in _RIGHT:
        overview.add_column(heading, justify="right", no_wrap=True)
    for consumer in consumers:
        overview.add_row(*_row(consumer))
    open_console().print(
        overview if consumers else "no reader has reported its position",
        *(Text(trouble, style="red") for trouble in troubles),
        sep="\n",
    )


def _consumers_of(
    client: StorageClient, paths: list[str], *, is_single: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    consumers, troubles = [], []
    for path in paths:
        try:
            consumers += [{"table": path, **consumer} for consumer in client.consumers(path)]
        except (TableDamagedError, UnavailableError) as error:
            if is_single:
                raise
            # One shard of several may be away: the tables of the other shards are shown.
            troubles.append(error.message)
    return consumers, troubles


def _row(consumer: dict[str, Any]) -> tuple[str, ...]:
    ago_ms = max(0.0, time.time() * 1e3 - consumer["reported_us"] / 1e3)
    lag_ms, at_risk = consumer["lag_ms"], consumer["rows_at_risk"]
    return (
        str(consumer["table"]),
        str(consumer["name"]),
        f"{consumer['lag_rows']:,}",
        "in the lake" if lag_ms is None else age_text(lag_ms),
        f"{at_risk:,}" if at_risk else "",
        f"{age_text(ago_ms)} ago",
    )
