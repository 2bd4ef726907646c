"""`streamhouse tables`: what is there, how far it is tiered, and the bytes it takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from streamhouse.cli.connection import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.extras import require
from streamhouse.storage_service.client import StorageClient
from streamhouse.storage_service.errors import (
    ForbiddenError,
    InvalidRequestError,
    TableDamagedError,
    UnavailableError,
)
from streamhouse.storage_service.model.lake.facts import LakeRole, LakeState, SideLakeState
from streamhouse.storage_service.model.schema import type_name
from streamhouse.storage_service.model.table_state import TableSizes, TableState

__all__ = ["command"]

_SIZE_HEADINGS: Final = ("hot", "cold", "doubled", "lake rows", "lake / log, a row")
_UNIT: Final = 1024
_PIPE_COLUMNS: Final = 10_000
_OF_KEY_TABLES: Final = (
    "Of a table with a primary key 'rows' counts rows, and the columns after it count changes."
)


@click.command("tables")
@click.argument("path", required=False)
@endpoint_option
@token_file_option
@click.option("--sizes", is_flag=True, help="Bytes on the service's disk and in the lake.")
def command(path: str | None, endpoint: str | None, token_file: Path | None, sizes: bool) -> None:
    """List all tables, or describe the one at PATH (database.table)."""
    if sizes and path is not None:
        raise InvalidRequestError("--sizes lists all tables: give no PATH with it")
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # In a pipe or a file nothing is cut off.
        console = Console(width=_PIPE_COLUMNS)
    with open_client(endpoint, token=read_token(token_file)) as client:
        if sizes:
            console.print(_sizes_overview(client, console))
        elif path is None:
            console.print(_overview(client, console))
        else:
            _describe(client, path, console)


def _frame(console: Console, frame: box.Box) -> box.Box | None:
    """Return a frame for a terminal; a program that reads the lines gets plain columns."""
    return frame if console.is_terminal else None


def _overview(client: StorageClient, console: Console) -> Group:
    rounds = _rounds(client)
    states, damaged = _states_of_tables(client)
    rows = [_row(client, state, rounds.get(str(state.table.path))) for state in states]
    headings = ("table", "buckets", "rows", "in the log", "in the lake", "untiered", "tiering")
    # Narrow: 80 columns are few. Names are folded when they must be, figures never.
    overview = Table(box=_frame(console, box.SIMPLE_HEAD), pad_edge=False, show_edge=False)
    for heading, cells in zip(headings, zip(*rows, strict=True) if rows else [()] * 7, strict=True):
        if heading == "table":
            overview.add_column(heading, overflow="fold")
        elif heading != "tiering":
            overview.add_column(heading, justify="right", min_width=max(map(len, cells), default=0))
        elif any(cells):
            overview.add_column(heading)
    for row in rows:
        overview.add_row(*row[: len(overview.columns)])
    has_keys = any(state.table.is_primary_key_table for state in states)
    notes = [Text(_OF_KEY_TABLES, style="dim")] if has_keys else []
    diverged = [Text(state.lake.diverged, style="red") for state in states if state.lake.diverged]
    return Group(overview, *notes, *damaged, *diverged)


def _states_of_tables(client: StorageClient) -> tuple[list[TableState], list[Text]]:
    """Return the tables that are served, and a sentence for each of those that are not."""
    states, damaged = [], []
    for path in client.list_tables():
        try:
            states.append(client.table_state(path))
        except (TableDamagedError, UnavailableError) as error:
            # One shard of several may be away: the others' tables are shown.
            damaged.append(Text(error.message, style="red"))
    return states, damaged


def _row(
    client: StorageClient, state: TableState, status: dict[str, Any] | None
) -> tuple[str, ...]:
    positions = state.positions.values()
    written = sum(p.high_watermark - p.first_offset for p in positions)
    is_keyed = state.table.is_primary_key_table
    tiered = sum(max(p.tiered_offset - p.first_offset, 0) for p in positions)
    return (
        str(state.table.path),
        str(state.table.bucket_count),
        f"{client.count(str(state.table.path)) if is_keyed else written:,}",
        f"{sum(p.high_watermark - p.log_start_offset for p in positions):,}",
        f"{tiered:,}",
        f"{written - tiered:,}",
        _tiering(status, is_tiered=state.table.properties().datalake_enabled),
    )


def _rounds(client: StorageClient) -> dict[str, dict[str, Any]]:
    """Return what is known of each table's rounds; nothing for a token that may not read it."""
    try:
        return {table["table"]: table["tiering"] for table in client.status()["tables"]}
    except ForbiddenError:
        return {}


def _tiering(status: dict[str, Any] | None, *, is_tiered: bool) -> str:
    """Return what a table's tiering does now, in a few words."""
    if not is_tiered or status is None:
        return "" if is_tiered else "off"
    if status["worker_id"]:
        progress = status["progress"]
        if progress["step"] == "writing" and progress["rows_planned"]:
            return f"writing {progress['rows_done'] / progress['rows_planned']:.0%}"
        return str(progress["step"] or "in a round")
    if status["failures"]:
        return f"failed {status['failures']} times"
    return ""


def _describe(client: StorageClient, path: str, console: Console) -> None:
    state = client.table_state(path)
    descriptor = state.table.descriptor
    frame = _frame(console, box.HEAVY_HEAD)
    edge = frame is not None
    title = str(descriptor.path)
    columns = Table("column", "type", "nullable", "comment", title=title, box=frame, pad_edge=edge)
    for column in descriptor.schema.columns:
        columns.add_row(
            column.name, type_name(column.type), "yes" if column.nullable else "no", column.comment
        )
    console.print(columns)
    facts = {
        "primary key": ", ".join(descriptor.primary_key),
        "bucket key": ", ".join(descriptor.effective_bucket_key) or "rows are spread evenly",
        "lake partitioning": ", ".join(str(f) for f in descriptor.partitioned_by),
        **descriptor.properties,
    }
    for name, value in facts.items():
        if value:
            console.print(f"{name}: {value}", highlight=False)
    buckets = Table("bucket", "log start", "high watermark", "tiered", box=frame, pad_edge=edge)
    for bucket, p in sorted(state.positions.items()):
        buckets.add_row(
            str(bucket), f"{p.log_start_offset:,}", f"{p.high_watermark:,}", f"{p.tiered_offset:,}"
        )
    console.print(buckets)
    if state.lake.diverged:
        console.print(Text(state.lake.diverged, style="red"))


def _sizes_overview(client: StorageClient, console: Console) -> Group:
    """Return every table's bytes, and what they come to."""
    overview = Table(
        box=_frame(console, box.HEAVY_HEAD),
        pad_edge=console.is_terminal,
        caption="hot: log and rows by key. cold: the lake. doubled: log that the lake has, and lake"
        " tables beside the rows' own.",
    )
    overview.add_column("table", no_wrap=True)
    for heading in _SIZE_HEADINGS:
        overview.add_column(heading, justify="right")
    totals = [0, 0, 0]
    states, damaged = _states_of_tables(client)
    for state in states:
        path = str(state.table.path)
        sizes = client.table_sizes(path)
        for name, known in _lake_tables(state):
            cold, rows = _in_lake(client, name, known)
            if name == path:
                bytes_of = (sizes.hot_bytes, cold, sizes.doubled_bytes)
            else:
                # Its rows are in the log or in the rows' own lake table, or were.
                bytes_of = (0, cold, cold)
            totals = [total + more for total, more in zip(totals, bytes_of, strict=True)]
            ratio = _ratio(state, sizes, cold, rows)
            overview.add_row(name, *(_text(size) for size in bytes_of), f"{rows:,}", ratio)
    overview.add_section()
    overview.add_row("all", *(_text(size) for size in totals), "", "")
    return Group(overview, *damaged)


def _lake_tables(state: TableState) -> list[tuple[str, LakeState | SideLakeState]]:
    """Return what is registered of each lake table, by its name; the rows' own first."""
    path, lake = str(state.table.path), state.lake
    sides = ((LakeRole.BATCH, lake.batch), (LakeRole.CHANGES, lake.changelog))
    beside = [(role.lake_name(path), known) for role, known in sides if known is not None]
    return [(path, lake), *beside]


def _in_lake(client: StorageClient, name: str, known: LakeState | SideLakeState) -> tuple[int, int]:
    """Return bytes and rows of the current lake snapshot, position deletes included."""
    if known.snapshot_id is None:
        return 0, 0
    # The lake library takes a second to import.
    require("lake", "'streamhouse tables --sizes'")
    from streamhouse.connector.lake.planner import open_lake_table

    lake = open_lake_table(client.lake_catalog(), name, table_uuid=known.table_uuid)
    for snapshot in lake.snapshots():
        if snapshot["is_current"]:
            properties = snapshot["properties"]
            return int(properties["total-files-size"]), int(properties["total-records"])
    return 0, 0


def _ratio(state: TableState, sizes: TableSizes, cold: int, lake_rows: int) -> str:
    """Return how large a row is in the lake, measured by one in the log."""
    log_rows = sum(p.high_watermark - p.log_start_offset for p in state.positions.values())
    log_bytes = sum(bucket.log_bytes for bucket in sizes.buckets.values())
    if not (log_rows and log_bytes and lake_rows):
        return ""
    return f"{cold / lake_rows / (log_bytes / log_rows):.2f}"


def _text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _UNIT:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= _UNIT
    return f"{size:,.1f} TiB"
