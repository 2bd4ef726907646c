"""`streamhouse top`: tables, rates and lake lag in a terminal, as the service's page shows them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamhouse.cli.option_values import age_text, size_text
from streamhouse.cli.output import (
    check_reader,
    filter_option,
    json_option,
    largest_first,
    matches,
    open_console,
    sort_option,
)
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.client import StorageClient

__all__ = ["command"]

_FIGURES: Final[dict[str, Callable[[dict[str, Any]], float]]] = {
    "late": lambda table: max(table["lag_ms"] - table["freshness_ms"], 0) * table["is_tiered"],
    "rows": lambda table: table["row_count"],
    "written": lambda table: table["written_rows_per_s"],
    "read": lambda table: table["read_rows_per_s"],
    "log": lambda table: table["log_bytes"],
    "lag": lambda table: table["lag_ms"] if table["is_tiered"] else -1,
}
"""The figures that `--sort` can order by, besides the name."""
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_CHART_CHARACTERS: Final = 24
_WIDE_CHARACTERS: Final = 110
_NAME_CHARACTERS_MIN: Final = 4
# What a terminal without room for all figures leaves out, in this order. A figure is never cut.
_LEFT_OUT: Final = ("wanted", "read/s", "log", "shard", "written/s", "rows")
# The heading and the rule below, the number of tables without a place, the last line.
_FRAME_LINES: Final = 4
_TABLES_MIN: Final = 3
_END: Final = "q or Ctrl-C ends"


@click.command("top")
@endpoint_option
@token_file_option
@click.option("--once", is_flag=True, help="Print one picture and return.")
@filter_option
@sort_option(_FIGURES, default="late")
@json_option
def command(
    *,
    endpoint: str | None,
    token_file: Path | None,
    once: bool,
    patterns: tuple[str, ...],
    sort: str,
    is_json: bool,
) -> None:
    """Watch the rows written, read and tiered; q or Ctrl-C ends the command.

    Late tables come first. In a pipe each picture is printed below the former picture. With --json
    each picture is a line, in the form of docs/http_api.md; with --once a single picture.
    """
    console = open_console()
    with open_client(endpoint, token=read_token(token_file)) as client:

        def fetch() -> dict[str, Any]:
            return _selected(_status(client), patterns, sort)

        status = fetch()
        pause_s = status["sample_interval_ms"] / 1000
        if not (once or is_json) and console.is_terminal:
            _show_live(status, fetch, console, pause_s=pause_s)
            return
        _print(status, console, is_json=is_json)
        while not once:
            time.sleep(pause_s)
            check_reader()
            if not is_json:
                console.print()
            _print(fetch(), console, is_json=is_json)


def _show_live(
    status: dict[str, Any],
    fetch: Callable[[], dict[str, Any]],
    console: Console,
    *,
    pause_s: float,
) -> None:
    """Draw pictures over each other until the key q."""
    first = _fitted_picture(status, console)
    with (
        _keys() as is_end_pressed,
        Live(first, console=console, screen=True, auto_refresh=False) as live,
    ):
        while not is_end_pressed(pause_s):
            live.update(_fitted_picture(fetch(), console), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds, and returns whether the key q was pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # noqa: PLC0415 - Windows lacks the module
    import tty  # noqa: PLC0415 - Windows lacks the module

    descriptor = sys.stdin.fileno()
    mode = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def is_end_pressed(pause_s: float) -> bool:
        end_s = time.monotonic() + pause_s
        while select.select([descriptor], [], [], max(end_s - time.monotonic(), 0))[0]:
            if os.read(descriptor, 1) in b"qQ":
                return True
        return False

    try:
        yield is_end_pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)


def _sleep(pause_s: float) -> bool:
    time.sleep(pause_s)
    return False


def _print(status: dict[str, Any], console: Console, *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps(status))
    else:
        console.print(Group(_tables(status["tables"], status, console), *_notes(status)))


def _status(client: StorageClient) -> dict[str, Any]:
    """Return the full status, or the brief status if that has more of the tables."""
    status = client.status()
    if len(status["tables"]) < status.get("table_count", 0):
        return client.status(detail="brief")
    return status


def _selected(status: dict[str, Any], patterns: Sequence[str], sort: str) -> dict[str, Any]:
    """Return the status with the matching tables, sorted."""
    tables = [table for table in status["tables"] if matches(table["table"], patterns)]
    return {**status, "tables": largest_first(tables, _FIGURES.get(sort))}


def _fitted_picture(status: dict[str, Any], console: Console) -> RenderableType:
    """Return the picture for a screen: the first tables, and notes on half of the lines at most."""
    height = console.height - _FRAME_LINES
    notes = console.render_lines(Group(*_notes(status)), pad=False)
    notes = notes[: max(height // 2, height - len(status["tables"]))]
    count = max(height - len(notes), _TABLES_MIN)
    shown, hidden = status["tables"][:count], status["tables"][count:]
    below: list[RenderableType] = [Text(f"and {len(hidden):,} more tables", style="dim")]
    texts = [Text.assemble(*((s.text, s.style or "") for s in line)) for line in notes]
    return Group(
        _tables(shown, status, console),
        *(below if hidden else []),
        *texts,
        Text(_END, style="dim"),
    )


def _tables(
    tables: Sequence[dict[str, Any]], status: dict[str, Any], console: Console
) -> RenderableType:
    is_wide = console.width >= _WIDE_CHARACTERS
    has_shards = len(status.get("shards", ())) > 1
    headings = (
        *(("shard",) if has_shards else ()),
        *("rows", "written/s", "read/s", "log", "lake lag", "wanted"),
        *(("written/s over time",) if is_wide else ()),
    )
    rows = [_row(table, has_shards=has_shards, is_wide=is_wide) for table in tables]
    picture = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    # Figures keep their width: where the terminal is narrow, names are cut.
    widths = {
        heading: max([len(heading), *(len(row[at]) for row in rows)])
        for at, heading in enumerate(headings)
    }

    def room() -> int:
        return console.width - sum(widths.values()) - 2 * len(widths)

    for heading in _LEFT_OUT:
        if room() < _NAME_CHARACTERS_MIN:
            widths.pop(heading, None)
    picture.add_column(
        "table", no_wrap=True, overflow="ellipsis", max_width=max(room(), _NAME_CHARACTERS_MIN)
    )
    for heading, width in widths.items():
        is_text = heading in ("shard", "written/s over time")
        picture.add_column(
            heading, justify="left" if is_text else "right", no_wrap=True, min_width=width
        )
    for table, row in zip(tables, rows, strict=True):
        cells = zip(headings, row, strict=True)
        picture.add_row(table["table"], *(cell for heading, cell in cells if heading in widths))
    return picture


def _row(table: dict[str, Any], *, has_shards: bool, is_wide: bool) -> list[str | Text]:
    return [
        *([str(table["shard"])] if has_shards else []),
        _short(table["row_count"]),
        _short(table["written_rows_per_s"]),
        _short(table["read_rows_per_s"]),
        size_text(table["log_bytes"]),
        _lag(table),
        age_text(table["freshness_ms"]) if table["is_tiered"] else "",
        *([_chart(table["history"]["written_rows_per_s"])] if is_wide else []),
    ]


def _notes(status: dict[str, Any]) -> list[RenderableType]:
    """Return what is below the tables: problems first."""
    lines: list[RenderableType] = [*_troubles(status)]
    for table in status["tables"]:
        if error := table["tiering"].get("last_error"):
            lines.append(Text(f"{table['table']}: {error}", style="red"))
    lines += _consumers(status)
    for worker in status["workers"]:
        lines.append(
            f"{worker['worker_id']} tiers {worker['table']} since {age_text(worker['round_ms'])}"
            f"{_progress(worker['progress'])}"
        )
    for worker in status["idle_workers"]:
        lines.append(Text(f"{worker['worker_id']} is idle: {worker['reason']}", style="dim"))
    return lines


def _consumers(status: dict[str, Any]) -> list[RenderableType]:
    """Return the table of readers with a reported position, or nothing."""
    readers = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("consumer", "of table"):
        readers.add_column(heading, overflow="fold")
    for heading in ("unread", "lag", "at risk"):
        readers.add_column(heading, justify="right", no_wrap=True)
    shown = {table["table"] for table in status["tables"]}
    in_full = [
        {**consumer, "table": table["table"]}
        for table in status["tables"]
        for consumer in table.get("consumers", ())
    ]
    worst = status.get("consumers", {}).get("worst", ())
    for consumer in [*in_full, *(consumer for consumer in worst if consumer["table"] in shown)]:
        lag = "in the lake" if consumer["lag_ms"] is None else age_text(consumer["lag_ms"])
        at_risk = Text(
            _short(consumer["rows_at_risk"]) if consumer["rows_at_risk"] else "", style="red"
        )
        readers.add_row(
            consumer["name"], consumer["table"], _short(consumer["lag_rows"]), lag, at_risk
        )
    return [readers] if readers.row_count else []


def _troubles(status: dict[str, Any]) -> list[Text]:
    """Return a line for each problem that an operator has to solve."""
    lines = []
    for shard in status.get("shards", ()):
        if not shard["answers"]:
            message = f"shard {shard['shard']} does not answer: its tables are not shown"
            lines.append(Text(message, style="red"))
    for damaged in status.get("damaged_tables", ()):
        lines.append(Text(f"{damaged['table']} is not served: {damaged['reason']}", style="red"))
    for table in status["tables"]:
        lines.extend(Text(why, style="red") for why in table.get("unusable", ()))
        if diverged := table["tiering"].get("diverged"):
            lines.append(Text(diverged, style="red"))
    lines += [Text(stranger, style="red") for stranger in status.get("strangers", ())]
    return lines


def _lag(table: dict[str, Any]) -> Text:
    if not table["is_tiered"]:
        return Text("no lake", style="dim")
    is_late = table["lag_ms"] > table["freshness_ms"]
    return Text(age_text(table["lag_ms"]), style="red" if is_late else "green")


def _progress(progress: dict[str, Any] | None) -> str:
    if progress is None or not progress["step"]:
        return ""
    if progress["step"] != "writing":
        return f", {progress['step']}"
    rows_done, rows_planned = progress["rows_done"], progress["rows_planned"]
    return f", writing {_short(rows_done)} of {_short(rows_planned)} rows"


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1_000:
            return f"{number:,.0f} {unit}" if not unit or number >= 100 else f"{number:,.1f} {unit}"
        number /= 1_000
    return f"{number:,.1f} G"


def _chart(values: list[float]) -> str:
    recent = values[-_CHART_CHARACTERS:]
    top = max([*recent, 1.0])
    return "".join(_BLOCKS[round(value / top * (len(_BLOCKS) - 1))] for value in recent)
