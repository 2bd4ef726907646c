"""`streamhouse shards`: the processes that a service consists of."""

from __future__ import annotations

from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from streamhouse.cli.connection import endpoint_option
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import UnavailableError

__all__ = ["command"]


@click.command("shards")
@endpoint_option
def command(endpoint: str | None) -> None:
    """Show the shards of a service: where each answers, how many tables it has, and its load."""
    console = Console()
    with StorageClient(endpoint) as client:
        shards = client.shards()
    if not shards:
        console.print("the service is one process: it has no shards")
        return
    overview = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("shard", "answers at", "role"):
        overview.add_column(heading, overflow="fold")
    for heading in ("epoch", "tables", "load"):
        overview.add_column(heading, justify="right")
    for shard in shards:
        overview.add_row(*_row(shard))
    console.print(overview)
    gone = [shard["shard"] for shard in shards if not shard["is_live"]]
    if gone:
        raise UnavailableError(
            f"shard {', '.join(gone)} has no owner: its tables wait until a process serves it"
        )


def _row(shard: dict[str, Any]) -> tuple[str | Text, ...]:
    role = Text("owner") if shard["is_live"] else Text("no owner", style="red")
    return (
        str(shard["shard"]),
        str(shard["endpoint"] or ""),
        role,
        str(shard["epoch"]),
        f"{shard['table_count']:,}",
        f"{shard['load_millicores'] / 1000:.1f} cores",
    )
