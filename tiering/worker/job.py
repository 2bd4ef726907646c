"""A tiering job as people start it: options in, rounds run, a summary out.

`streamhouse tier` and the script for spark-submit share the job, with a Spark session each.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from streamhouse.client import ENDPOINT_VARIABLE, StorageClient
from streamhouse.core.errors import InvalidRequestError
from streamhouse.core.model.lake.facts import SERVICE_ID_PROPERTY, LakeCatalog
from streamhouse.core.secret_sources import catalog_properties_from, read_secret
from streamhouse.core.traces.exporter_settings import opened_spans
from streamhouse.reading.tail.round_planner import ROWS_PER_ROUND_MAX
from streamhouse.tiering._ports import TaskRunner
from streamhouse.tiering.worker._tables_in_flight import TABLES_IN_FLIGHT

__all__ = ["JobOptions", "job_options", "run_job"]

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a tiering job; without a `catalog` the service names the catalog."""

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    tables: tuple[str, ...] = ()
    is_once: bool = False
    rows_per_round_max: int = ROWS_PER_ROUND_MAX
    tables_in_flight: int = TABLES_IN_FLIGHT
    catalog: LakeCatalog | None = None
    is_quiet: bool = False
    """Whether no progress is drawn."""
    is_json: bool = False
    """Whether the summaries are JSON."""

    @classmethod
    def from_command_line(
        cls,
        *,
        endpoint: str | None,
        token_file: Path | None,
        tables: Sequence[str],
        once: bool,
        max_rows_per_round: int,
        tables_in_flight: int,
        catalog_name: str | None,
        catalog_properties: Sequence[str],
        is_quiet: bool = False,
        is_json: bool = False,
    ) -> JobOptions:
        """Read the values of `job_options`."""
        if is_json and not once:
            raise click.UsageError(
                "--json is for the summaries of --once; else give --log-format json"
            )
        if catalog_properties and catalog_name is None:
            raise InvalidRequestError("--catalog-property needs --catalog NAME")
        catalog = None
        if catalog_name is not None:
            catalog = LakeCatalog(
                name=catalog_name, properties=catalog_properties_from(catalog_properties)
            )
        return cls(
            endpoint=endpoint,
            token=None if token_file is None else read_secret(token_file, kind="token"),
            tables=tuple(tables),
            is_once=once,
            rows_per_round_max=max_rows_per_round,
            tables_in_flight=tables_in_flight,
            catalog=catalog,
            is_quiet=is_quiet,
            is_json=is_json,
        )


def job_options(command: _F) -> _F:
    """Add the options of a tiering job to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: Sequence[Callable[[Any], Any]] = (
    click.option(
        "--once",
        is_flag=True,
        help="Tier everything that is in the log now, due or not, then exit."
        " Default: keep every table as fresh as its table.datalake.freshness.",
    ),
    click.option(
        "--table",
        "tables",
        multiple=True,
        metavar="DB.TABLE",
        help="Only this table; may be given several times. Default: all.",
    ),
    click.option(
        "--endpoint",
        envvar=ENDPOINT_VARIABLE,
        help="URL of the storage service; several with commas between them.",
    ),
    click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File with the bearer token; default: the variable STREAMHOUSE_TOKEN.",
    ),
    click.option(
        "--max-rows-per-round",
        type=click.IntRange(min=1),
        default=ROWS_PER_ROUND_MAX,
        show_default=True,
        help="Most rows that one lake commit adds.",
    ),
    click.option(
        "--tables-in-flight",
        type=click.IntRange(min=1, max=64),
        default=TABLES_IN_FLIGHT,
        show_default=True,
        help="Tables tiered at once; --once takes one after the other.",
    ),
    click.option(
        "--catalog",
        "catalog_name",
        help="Name of the Iceberg catalog; default: the one the service names.",
    ),
    click.option(
        "--catalog-property",
        "catalog_properties",
        multiple=True,
        metavar="KEY=VALUE",
        help="pyiceberg property of --catalog, a secret one as KEY=@file:PATH or KEY=@env:NAME; may"
        " be given several times.",
    ),
    click.option("-q", "--quiet", "is_quiet", is_flag=True, help="Show no progress."),
    click.option(
        "--json", "is_json", is_flag=True, help="With --once: a JSON object a line for each table."
    ),
)


def run_job(options: JobOptions, runner: TaskRunner) -> int:
    """Run the job and return the exit code: 1 when a table could not be tiered.

    Without `is_once` the job runs until SIGTERM or Ctrl-C, ends a running round early, and
    returns 0.
    """
    from streamhouse.lake.lake_tables import IcebergLake  # noqa: PLC0415 - `--help` does not wait for pyiceberg
    from streamhouse.tiering.worker._service import TieringService  # noqa: PLC0415 - `--help` does not wait for pyiceberg
    from streamhouse.tiering.worker._terminal_progress import TerminalProgress  # noqa: PLC0415 - `--help` does not wait for pyiceberg

    stopping = threading.Event()
    with (
        _stopping_on_signals(stopping),
        StorageClient(options.endpoint, token=options.token) as client,
        TerminalProgress(is_quiet=options.is_quiet) as progress,
        opened_spans("streamhouse-tiering") as spans,
    ):
        lake = IcebergLake(_catalog(options, client))
        try:
            service = TieringService(
                client=client,
                lake=lake,
                runner=runner,
                token=options.token,
                tables=options.tables or None,
                rows_per_round_max=options.rows_per_round_max,
                tables_in_flight=options.tables_in_flight,
                observer=progress,
                stopping=stopping,
                spans=spans,
            )
            if not options.is_once:
                for table in options.tables:
                    client.describe_table(table)
                service.run_forever()
                return 0
            summaries = service.run_once()
        finally:
            lake.close()
    for summary in summaries:
        click.echo(json.dumps(summary.to_json()) if options.is_json else summary.text())
    if not summaries and not options.is_json:
        click.echo("no tables to tier")
    return 1 if stopping.is_set() or any(summary.error for summary in summaries) else 0


def _catalog(options: JobOptions, client: StorageClient) -> LakeCatalog:
    named = client.lake_catalog()
    if options.catalog is None:
        return named
    # The id of the service is kept with the user's own catalog, too.
    identity = {k: v for k, v in named.properties.items() if k == SERVICE_ID_PROPERTY}
    return replace(options.catalog, properties={**options.catalog.properties, **identity})


@contextmanager
def _stopping_on_signals(stopping: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {
        number: signal.signal(number, lambda *_: stopping.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
