"""`streamhouse import`: an existing Iceberg table becomes the history of a new table.

Under the old name the Iceberg table is adopted: a Streamhouse table goes on with the files in
place. Under a new name the rows are copied.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from streamhouse.cli.option_values import MeasureType, parse_pause_s
from streamhouse.cli.output import json_option, print_json_line
from streamhouse.cli.progress_bar import ProgressBar, quiet_option
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.client import StorageClient
from streamhouse.core.errors import DatabaseNotFoundError
from streamhouse.core.model.lake.facts import parse_properties
from streamhouse.core.model.table import TableInfo, TablePath

if TYPE_CHECKING:
    from streamhouse.reading.imports.table_import import TableImport

__all__ = ["command"]

_COPY_OPTIONS: Final = {
    "primary_key": "--primary-key",
    "bucket_num": "--bucket-num",
    "bucket_key": "--bucket-key",
    "partitioned_by": "--partitioned-by",
    "properties": "--property",
    "follow": "--follow",
    "skip_overwrites": "--skip-overwrites",
}


@click.command("import")
@click.argument("source", metavar="ICEBERG_TABLE")
@click.option(
    "--as",
    "target",
    metavar="DB.TABLE",
    help="The table to make; rows are copied. Default: the same name, which adopts the table.",
)
@click.option(
    "--adopt", is_flag=True, help="Adopt the table though another service tiered to it just now."
)
@click.option("--copy", is_flag=True, help="Refuse anything but copying.")
@click.option("--primary-key", default="", metavar="COLUMNS", help="As in a,b: rows are upserted.")
@click.option("--bucket-num", type=click.IntRange(min=1), help="Default: 1.")
@click.option("--bucket-key", default="", metavar="COLUMNS", help="Equal rows share a bucket.")
@click.option(
    "--partitioned-by",
    metavar="FIELDS",
    help="Lake partitioning, as in 'region, day(at)'. Default: the Iceberg table's.",
)
@click.option("--property", "properties", multiple=True, metavar="KEY=VALUE", help="Of the table.")
@click.option("--follow", is_flag=True, help="Then import appended rows, too, until stopped.")
@click.option(
    "--interval",
    type=MeasureType("duration", parse_pause_s),
    metavar="DURATION",
    default="10s",
    show_default=True,
    help="With --follow: the pause between two looks at the Iceberg table.",
)
@click.option(
    "--skip-overwrites",
    is_flag=True,
    help="Pass over later snapshots that overwrite or delete rows, instead of stopping there.",
)
@endpoint_option
@token_file_option
@click.option("--threads", type=click.IntRange(min=1), help="Default: one per core.")
@quiet_option
@json_option
def command(
    *,
    source: str,
    target: str | None,
    adopt: bool,
    copy: bool,
    primary_key: str,
    bucket_num: int | None,
    bucket_key: str,
    partitioned_by: str | None,
    properties: tuple[str, ...],
    follow: bool,
    interval: str,
    skip_overwrites: bool,
    endpoint: str | None,
    token_file: Path | None,
    threads: int | None,
    is_quiet: bool,
    is_json: bool,
) -> None:
    """Import ICEBERG_TABLE, a table of the service's lake catalog, as a new table.

    Without --as the lake table is adopted: the lake table of a Streamhouse service that is gone, or
    that has dropped the table, goes on as the table of the same name, and no row is copied. With
    --as the rows are copied, each once, also after an interruption and a restart. The Iceberg table
    is only read.
    """
    from streamhouse.reading.imports.table_import import TableImport  # noqa: PLC0415 - `--help` does not wait for pyarrow
    from streamhouse.reading.options.name_lists import parse_expressions, parse_names  # noqa: PLC0415 - `--help` does not wait for pyarrow
    from streamhouse.reading.options.options import SKIP_OPTIONS  # noqa: PLC0415 - `--help` does not wait for pyarrow

    token = read_token(token_file)
    pause_s = parse_pause_s(interval, name="--interval")
    if _is_adoption(source, target, adopt=adopt, copy=copy):
        with open_client(endpoint, token=token) as client:
            return _adopt(client, source, force=adopt, is_json=is_json)
    assert target is not None, "without a target the table is adopted"
    with open_client(endpoint, token=token) as client:
        job = TableImport(
            client,
            source,
            target,
            threads=threads or os.cpu_count() or 1,
            skipped_snapshots=SKIP_OPTIONS if skip_overwrites else (),
        )
        table, dropped_fields = job.prepare(
            primary_key=parse_names(primary_key, name="--primary-key") if primary_key else (),
            bucket_count=bucket_num or 1,
            bucket_key=parse_names(bucket_key, name="--bucket-key") if bucket_key else (),
            partitioned_by=None
            if partitioned_by is None
            else parse_expressions(partitioned_by, name="--partitioned-by"),
            properties=parse_properties(properties, name="--property"),
        )
        for field in dropped_fields:
            click.echo(f"not partitioned by {field}, unknown to Streamhouse", err=True)
        _tell_target(source, table, is_json=is_json)
        stopping = threading.Event()
        if follow:
            # An interrupt as an exception can come in a place that swallows it.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stopping.set())
        if not _import(job, stopping, is_quiet=is_quiet, is_json=is_json) and not is_json:
            click.echo("nothing new")
        while follow and not stopping.wait(pause_s):
            _import(job, stopping, is_quiet=is_quiet, is_json=is_json)
    if stopping.is_set():
        raise click.Abort


def _is_adoption(source: str, target: str | None, *, adopt: bool, copy: bool) -> bool:
    """Return whether the table is adopted in place; raises if the options contradict that."""
    is_same_name = target is None or TablePath.parse(target) == TablePath.parse(source)
    if copy and (is_same_name or adopt):
        raise click.UsageError("--copy makes another table: give it a name with --as")
    if adopt and not is_same_name:
        raise click.UsageError(
            f"an adopted table has the name of its lake table, '{source}': leave out --as, or"
            " --adopt to copy the rows"
        )
    if is_same_name:
        params = click.get_current_context().params
        for name, option in _COPY_OPTIONS.items():
            if params[name] not in (None, "", (), False):
                raise click.UsageError(
                    f"an adopted table keeps its schema and its rows: leave out {option}, or"
                    " copy the rows into another one with --as"
                )
    return is_same_name


def _adopt(client: StorageClient, source: str, *, force: bool, is_json: bool) -> None:
    try:
        table = client.adopt_table(source, force=force)
    except DatabaseNotFoundError:
        client.create_database(TablePath.parse(source).database)
        table = client.adopt_table(source, force=force)
    latest = table.adopted_from[max(table.adopted_from)]
    if is_json:
        print_json_line({"source": source, "table": str(table.path), "offsets": latest})
        return
    ends = ", ".join(f"{bucket}: {end:,}" for bucket, end in sorted(latest.items()))
    click.echo(f"{table.path} goes on with its lake table, from these offsets on: {ends}")


def _tell_target(source: str, table: TableInfo, *, is_json: bool) -> None:
    fields = [str(field) for field in table.descriptor.partitioned_by]
    if is_json:
        print_json_line({"source": source, "table": str(table.path), "partitioned_by": fields})
        return
    by = ", ".join(fields) or "nothing"
    click.echo(f"{source} -> {table.path}: partitioned by {by}")


def _import(job: TableImport, stopping: threading.Event, *, is_quiet: bool, is_json: bool) -> int:
    """Import the table's present rows, with progress; return the number of rows.

    Once `stopping` is set, the import ends after the current step, which is one transaction.
    """
    with ProgressBar("importing", is_quiet=is_quiet, unit="rows") as progress:
        return _imported(job, stopping, progress, is_quiet=is_quiet, is_json=is_json)


def _imported(
    job: TableImport,
    stopping: threading.Event,
    progress: ProgressBar,
    *,
    is_quiet: bool,
    is_json: bool,
) -> int:
    rows, began = 0, time.monotonic()
    for step in job.run(progress):
        rows += step.row_count
        if step.row_count and is_json:
            document = {"snapshot_id": step.snapshot_id, "imported_rows": step.row_count}
            print_json_line({**document, "remaining_rows": step.rows_left})
        elif step.row_count and not is_quiet:
            rate = rows / max(time.monotonic() - began, 1e-3)
            share = rows / (rows + step.rows_left)
            click.echo(
                f"snapshot {step.snapshot_id}: {rows:,} rows imported, {step.rows_left:,} to go"
                f" ({share:.0%}), {rate:,.0f} rows/s"
            )
        if stopping.is_set():
            break
    return rows
