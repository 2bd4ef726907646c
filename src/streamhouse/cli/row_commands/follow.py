"""`streamhouse follow`: the rows of a table as they arrive, a line each."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Final

import click
import pyarrow as pa

from streamhouse.cli.output import check_reader, json_option
from streamhouse.cli.row_output import header_line, print_lines
from streamhouse.cli.service_options import (
    endpoint_option,
    open_reader,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import columns_option, table_argument
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, RETRACTS_COLUMN
from streamhouse.core.text.rows_as_json import with_change_names

__all__ = ["command"]

# How often a command without new rows looks for its reader, and for an interrupt.
_LOOK_S: Final = 0.25


@click.command("follow")
@table_argument("path")
@click.option(
    "--start",
    default="latest",
    show_default=True,
    metavar="START",
    help="latest, earliest (the log's first row), full (all rows, the lake's first), or a time.",
)
@click.option(
    "-n", "--rows", "rows_max", type=click.IntRange(min=1), help="End after so many rows."
)
@columns_option
@endpoint_option
@token_file_option
@json_option
def command(
    *,
    path: str,
    start: str,
    rows_max: int | None,
    columns: list[str] | None,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Print the rows of TABLE as they arrive, a line each, until Ctrl-C.

    First come the names of the columns, then the rows, with tabs between the fields. With --json
    each row is a JSON object. Of a table with a primary key each change is a row, with
    __change_type.
    """
    remaining, has_header = rows_max, is_json
    # An interrupt as an exception may come while a lock is taken, and nobody would release it.
    stopping = threading.Event()
    former = signal.signal(signal.SIGINT, lambda *_: stopping.set())
    with (
        contextlib.ExitStack() as closing,
        open_reader(endpoint, token=read_token(token_file)) as client,
        client.subscribe(path, start=start, columns=columns) as subscription,
    ):
        closing.callback(signal.signal, signal.SIGINT, former)
        while not stopping.is_set() and remaining != 0:
            for batch in subscription.poll(timeout_s=_LOOK_S):
                rows = _shown(batch.data).slice(0, remaining)
                if not has_header:
                    click.echo(header_line(rows.schema))
                    has_header = True
                count = print_lines(rows, is_json=is_json)
                remaining = None if remaining is None else remaining - count
            check_reader()
    if stopping.is_set():
        raise click.Abort


def _shown(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return changes with their kinds as names in the first column; other rows as they are."""
    if CHANGE_TYPE_COLUMN not in rows.schema.names:
        return rows
    hidden = (CHANGE_TYPE_COLUMN, RETRACTS_COLUMN)
    columns = [name for name in rows.schema.names if name not in hidden]
    return with_change_names(rows).select([CHANGE_TYPE_COLUMN, *columns])
