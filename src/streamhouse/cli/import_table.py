"""`streamhouse import`: an existing Iceberg table becomes the history of a new table."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamhouse.storage_service.client import ENDPOINT_VARIABLE, StorageClient
from streamhouse.storage_service.model.lake import parse_catalog_properties
from streamhouse.tiering.job import read_token

if TYPE_CHECKING:
    from streamhouse.connector.table_import import TableImport

__all__ = ["command"]


@click.command("import")
@click.argument("source", metavar="ICEBERG_TABLE")
@click.option("--as", "target", required=True, metavar="DB.TABLE", help="The table to make.")
@click.option("--primary-key", default="", metavar="COLUMNS", help="As in a,b: rows are upserted.")
@click.option("--bucket-num", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--bucket-key", default="", metavar="COLUMNS", help="Equal rows share a bucket.")
@click.option(
    "--partitioned-by",
    metavar="FIELDS",
    help="Lake partitioning, as in 'region, day(at)'. Default: the Iceberg table's.",
)
@click.option("--property", "properties", multiple=True, metavar="KEY=VALUE", help="Of the table.")
@click.option("--follow", is_flag=True, help="Then go on with what is appended, until stopped.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="With --follow: seconds between two looks at the Iceberg table.",
)
@click.option(
    "--skip-overwrites",
    is_flag=True,
    help="Pass over later snapshots that overwrite or delete rows, instead of stopping there.",
)
@click.option("--endpoint", envvar=ENDPOINT_VARIABLE, help="URL of the storage service.")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the bearer token; default: the variable STREAMHOUSE_TOKEN.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Default: one per core.")
def command(
    *,
    source: str,
    target: str,
    primary_key: str,
    bucket_num: int,
    bucket_key: str,
    partitioned_by: str | None,
    properties: tuple[str, ...],
    follow: bool,
    interval: float,
    skip_overwrites: bool,
    endpoint: str | None,
    token_file: Path | None,
    threads: int | None,
) -> None:
    """Import ICEBERG_TABLE, a table of the service's lake catalog, as a new table.

    Each row once, however often it is stopped and started again. The Iceberg table is only read.
    """
    # Not at the top: `--help` must not wait for pyarrow.
    from streamhouse.connector.option_values import parse_expressions, parse_names
    from streamhouse.connector.source_options import SKIP_OPTIONS
    from streamhouse.connector.table_import import TableImport

    token = None if token_file is None else read_token(token_file)
    with StorageClient(endpoint, token=token) as client:
        job = TableImport(
            client,
            source,
            target,
            threads=threads or os.cpu_count() or 1,
            skipped_snapshots=SKIP_OPTIONS if skip_overwrites else (),
        )
        table, left = job.prepare(
            primary_key=parse_names(primary_key, key="--primary-key") if primary_key else (),
            bucket_count=bucket_num,
            bucket_key=parse_names(bucket_key, key="--bucket-key") if bucket_key else (),
            partitioned_by=None
            if partitioned_by is None
            else parse_expressions(partitioned_by, key="--partitioned-by"),
            properties=parse_catalog_properties(properties),
        )
        for field in left:
            click.echo(f"not partitioned by {field}, which has no form here", err=True)
        fields = ", ".join(map(str, table.descriptor.partitioned_by)) or "nothing"
        click.echo(f"{source} -> {table.path}: partitioned by {fields}")
        stopping = threading.Event()
        if follow:
            # An interrupt as an exception can come in a place that swallows it.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stopping.set())
        if not _import(job, stopping):
            click.echo("nothing new")
        while follow and not stopping.wait(interval):
            _import(job, stopping)
    if stopping.is_set():
        raise click.Abort


def _import(job: TableImport, stopping: threading.Event) -> int:
    """Import what there is now, and say how it goes; return how many rows that were.

    Once `stopping` is set it ends after the step at hand, which is a transaction.
    """
    rows, began = 0, time.monotonic()
    for step in job.run():
        rows += step.row_count
        if step.row_count:
            rate = rows / max(time.monotonic() - began, 1e-3)
            share = rows / (rows + step.rows_left)
            click.echo(
                f"snapshot {step.snapshot_id}: {rows:,} rows imported, {step.rows_left:,} to go"
                f" ({share:.0%}), {rate:,.0f} rows/s"
            )
        if stopping.is_set():
            break
    return rows
