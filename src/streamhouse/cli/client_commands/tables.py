"""`streamhouse tables`: the tables, their tiering, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from streamhouse.cli.option_values import age_text, size_text
from streamhouse.cli.output import (
    filter_option,
    json_option,
    largest_first,
    matches,
    open_console,
    print_json,
    sort_option,
)
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    ForbiddenError,
    TableDamagedError,
    UnavailableError,
)
from streamhouse.core.extras import require
from streamhouse.core.model.lake.facts import (
    SCATTERED_ADVICE,
    LakeRole,
    LakeState,
    SideLakeState,
)
from streamhouse.core.model.schema import type_name
from streamhouse.core.model.table_state import TableSizes, TableState

__all__ = ["command"]

_SIZE_HEADINGS: Final = ("hot", "cold", "doubled", "lake rows", "lake / log, a row")
_FIGURES: Final[dict[str, Callable[[dict[str, Any]], float]]] = {
    "rows": lambda line: line["row_count"],
    "log": lambda line: line["log_rows"],
    "lake": lambda line: line["lake_rows"],
    "untiered": lambda line: line["untiered_rows"],
    "lag": lambda line: -1 if line["lag_ms"] is None else line["lag_ms"],
}
"""The figures that `--sort` can order by, besides the name."""
_NO_ROUND: Final[dict[str, Any]] = {"step": None, "rows_done": None, "rows_planned": None}
_OF_KEY_TABLES: Final = (
    "Of a table with a primary key 'rows' counts rows, and the columns after it count changes."
)


@click.command("tables")
@table_argument("path", metavar="[PATH]", required=False)
@endpoint_option
@token_file_option
@click.option("--sizes", is_flag=True, help="Bytes on the service's disk and in the lake.")
@filter_option
@sort_option(_FIGURES)
@json_option
def command(
    *,
    path: str | None,
    endpoint: str | None,
    token_file: Path | None,
    sizes: bool,
    patterns: tuple[str, ...],
    sort: str,
    is_json: bool,
) -> None:
    """List all tables, or describe the one at PATH (database.table)."""
    if sizes and path is not None:
        raise click.UsageError("--sizes lists all tables: give no PATH with it")
    if path is not None and (patterns or sort != "name"):
        raise click.UsageError("--filter and --sort are for lists: give no PATH with them")
    if sizes and sort != "name":
        raise click.UsageError("--sort is for the list without --sizes")
    console = open_console()
    with open_client(endpoint, token=read_token(token_file)) as client:
        if path is not None:
            state = client.table_state(path)
            if is_json:
                print_json(_described(state))
            else:
                _describe(state, console)
            return
        states, damaged = _states_of_tables(client, patterns)
        if sizes:
            lines = [line for state in states for line in _sizes(client, state)]
        else:
            statuses = _statuses(client)
            lines = [_line(client, state, statuses.get(str(state.table.path))) for state in states]
            lines = largest_first(lines, _FIGURES.get(sort))
    if is_json:
        print_json({"tables": lines, "not_served": damaged})
        return
    overview = (
        _sizes_overview(lines, console)
        if sizes
        else _overview(lines, console, with_lag=sort == "lag")
    )
    troubles = [*damaged, *(line["diverged"] for line in lines if line.get("diverged"))]
    scattered = [line["scattered"] for line in lines if line.get("scattered")]
    console.print(
        Group(
            overview,
            *(Text(trouble, style="red") for trouble in troubles),
            *(Text(sentence, style="yellow") for sentence in scattered),
        )
    )


def _frame(console: Console, frame: box.Box) -> box.Box | None:
    """Return a frame for a terminal; a program at the other end of a pipe gets plain columns."""
    return frame if console.is_terminal else None


def _overview(lines: list[dict[str, Any]], console: Console, *, with_lag: bool) -> Group:
    rows = [_row(line, with_lag=with_lag) for line in lines]
    headings = (
        *("table", "buckets", "rows", "in the log", "in the lake", "untiered"),
        *(("lag",) if with_lag else ()),
        "tiering",
    )
    # Narrow: 80 columns are few. Names are folded when they must be, figures never.
    overview = Table(box=_frame(console, box.SIMPLE_HEAD), pad_edge=False, show_edge=False)
    for heading, cells in zip(
        headings, zip(*rows, strict=True) if rows else [()] * len(headings), strict=True
    ):
        if heading == "table":
            overview.add_column(heading, overflow="fold")
        elif heading != "tiering":
            overview.add_column(heading, justify="right", min_width=max(map(len, cells), default=0))
        elif any(cells):
            overview.add_column(heading)
    for row in rows:
        overview.add_row(*row[: len(overview.columns)])
    has_keys = any(line["is_primary_key_table"] for line in lines)
    return Group(overview, *([Text(_OF_KEY_TABLES, style="dim")] if has_keys else []))


def _states_of_tables(
    client: StorageClient, patterns: tuple[str, ...]
) -> tuple[list[TableState], list[str]]:
    """Return the served tables, and a message for each unserved table."""
    states, damaged = [], []
    for path in client.list_tables():
        if not matches(path, patterns):
            continue
        try:
            states.append(client.table_state(path))
        except (TableDamagedError, UnavailableError) as error:
            # One shard of several may be away: the tables of the other shards are shown.
            damaged.append(error.message)
    return states, damaged


def _scattered(status: dict[str, Any] | None) -> str | None:
    """Return advice if the table's rounds write many files for few rows."""
    if status is None:
        return None
    debt = status["tiering"].get("maintenance_debt")
    if not debt or not debt.get("is_scattered"):
        return None
    return (
        f"{status['table']}: {debt['round_files']:,} files for {debt['round_rows']:,} rows,"
        f" {SCATTERED_ADVICE}"
    )


def _line(
    client: StorageClient, state: TableState, status: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a table's line of the list."""
    positions = state.positions.values()
    written = sum(p.high_watermark - p.first_offset for p in positions)
    is_keyed = state.table.is_primary_key_table
    is_tiered = state.table.properties().datalake_enabled
    tiered = sum(max(p.tiered_offset - p.first_offset, 0) for p in positions)
    return {
        "table": str(state.table.path),
        "bucket_count": state.table.bucket_count,
        "is_primary_key_table": is_keyed,
        "row_count": client.count(str(state.table.path)) if is_keyed else written,
        "log_rows": sum(p.high_watermark - p.log_start_offset for p in positions),
        "lake_rows": tiered,
        "untiered_rows": written - tiered,
        "is_tiered": is_tiered,
        "lag_ms": status["lag_ms"] if is_tiered and status else None,
        "freshness_ms": status["freshness_ms"] if is_tiered and status else None,
        "scattered": _scattered(status if is_tiered else None),
        **_round(status if is_tiered else None),
        "diverged": state.lake.diverged or None,
    }


def _row(line: dict[str, Any], *, with_lag: bool) -> tuple[str, ...]:
    figures = ("row_count", "log_rows", "lake_rows", "untiered_rows")
    return (
        line["table"],
        str(line["bucket_count"]),
        *(f"{line[figure]:,}" for figure in figures),
        *([_lag(line)] if with_lag else []),
        _tiering(line),
    )


def _statuses(client: StorageClient) -> dict[str, dict[str, Any]]:
    """Return each table's lag and rounds; empty if the token may not read the status."""
    try:
        status = client.status(detail="brief")
    except ForbiddenError:
        return {}
    progress = {worker["table"]: worker["progress"] for worker in status["workers"]}
    return {
        table["table"]: {**table, "progress": progress.get(table["table"])}
        for table in status["tables"]
    }


def _round(status: dict[str, Any] | None) -> dict[str, Any]:
    """Return the current step of a table's tiering, and its progress."""
    if status is None:
        return {**_NO_ROUND, "failures": None}
    progress = status["progress"] or _NO_ROUND
    step = None if status["progress"] is None else progress["step"] or "in a round"
    return {
        "step": step,
        "rows_done": progress["rows_done"],
        "rows_planned": progress["rows_planned"],
        "failures": status["tiering"].get("failures", 0),
    }


def _lag(line: dict[str, Any]) -> str:
    return "" if line["lag_ms"] is None else age_text(line["lag_ms"])


def _tiering(line: dict[str, Any]) -> str:
    """Return the state of a table's tiering in a few words."""
    if not line["is_tiered"]:
        return "off"
    if line["step"] == "writing" and line["rows_planned"]:
        return f"writing {line['rows_done'] / line['rows_planned']:.0%}"
    if line["step"]:
        return str(line["step"])
    if line["failures"]:
        return f"failed {line['failures']} times"
    is_late = line["lag_ms"] is not None and line["lag_ms"] > line["freshness_ms"]
    return f"late, {age_text(line['lag_ms'])}" if is_late else ""


def _described(state: TableState) -> dict[str, Any]:
    """Return one table as JSON."""
    return {
        **state.table.to_json(),
        "buckets": [
            {
                "bucket": bucket,
                "log_start_offset": p.log_start_offset,
                "high_watermark": p.high_watermark,
                "tiered_offset": p.tiered_offset,
            }
            for bucket, p in sorted(state.positions.items())
        ],
        "diverged": state.lake.diverged or None,
    }


def _describe(state: TableState, console: Console) -> None:
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


def _sizes(client: StorageClient, state: TableState) -> Iterator[dict[str, Any]]:
    """Return the bytes of a table and of the lake tables beside it, a line each."""
    path = str(state.table.path)
    sizes = client.table_sizes(path)
    for name, lake in _lake_tables(state):
        cold, rows = _lake_size(client, name, lake)
        is_main = name == path
        yield {
            "table": name,
            "hot_bytes": sizes.hot_bytes if is_main else 0,
            "cold_bytes": cold,
            # The rows of side tables are also in the log or in the main lake table, or were.
            "doubled_bytes": sizes.doubled_bytes if is_main else cold,
            "lake_rows": rows,
            "lake_to_log_ratio": _ratio(state, sizes, cold, rows),
        }


def _sizes_overview(lines: list[dict[str, Any]], console: Console) -> Table:
    """Return every table's bytes, and the totals."""
    overview = Table(
        box=_frame(console, box.HEAVY_HEAD),
        pad_edge=console.is_terminal,
        caption="hot: log and rows by key. cold: the lake. doubled: log rows also in the lake, and"
        " the side lake tables.",
    )
    overview.add_column("table", no_wrap=True)
    for heading in _SIZE_HEADINGS:
        overview.add_column(heading, justify="right")
    names = ("hot_bytes", "cold_bytes", "doubled_bytes")
    for line in lines:
        ratio = line["lake_to_log_ratio"]
        overview.add_row(
            line["table"],
            *(size_text(line[name]) for name in names),
            f"{line['lake_rows']:,}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    overview.add_section()
    totals = (size_text(sum(line[name] for line in lines)) for name in names)
    overview.add_row("all", *totals, "", "")
    return overview


def _lake_tables(state: TableState) -> list[tuple[str, LakeState | SideLakeState]]:
    """Return name -> state of each of the table's lake tables; the main lake table first."""
    path, lake = str(state.table.path), state.lake
    sides = ((LakeRole.BATCH, lake.batch), (LakeRole.CHANGES, lake.changelog))
    side_tables = [(role.lake_name(path), side) for role, side in sides if side is not None]
    return [(path, lake), *side_tables]


def _lake_size(
    client: StorageClient, name: str, lake: LakeState | SideLakeState
) -> tuple[int, int]:
    """Return bytes and rows of the current lake snapshot, position deletes included."""
    if lake.snapshot_id is None:
        return 0, 0
    # The lake library takes a second to import.
    require("lake", "'streamhouse tables --sizes'")
    from streamhouse.reading.files.planner import open_lake_table  # noqa: PLC0415 - `--help` does not wait for pyiceberg

    return open_lake_table(client.lake_catalog(), name, table_uuid=lake.table_uuid).size()


def _ratio(state: TableState, sizes: TableSizes, cold: int, lake_rows: int) -> float | None:
    """Return the size of a row in the lake, divided by the size of a row in the log."""
    log_rows = sum(p.high_watermark - p.log_start_offset for p in state.positions.values())
    log_bytes = sum(bucket.log_bytes for bucket in sizes.buckets.values())
    if not (log_rows and log_bytes and lake_rows):
        return None
    return round(cold / lake_rows / (log_bytes / log_rows), 4)
