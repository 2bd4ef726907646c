"""`streamhouse maintain`: tidy the lake tables of tables now, or say what that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from streamhouse.cli.output import matches
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.client import StorageClient
from streamhouse.core.errors import (
    NotFoundError,
    StreamhouseError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.table import DEFAULT_DATABASE, TablePath

__all__ = ["command"]

_WILDCARDS = frozenset("*?[")


@click.command("maintain")
@click.argument("tables", metavar="[DB.TABLE]...", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@endpoint_option
@token_file_option
@click.option("--threads", type=click.IntRange(min=1), help="Tasks at once. Default: one per core.")
def command(
    *,
    tables: tuple[str, ...],
    dry_run: bool,
    endpoint: str | None,
    token_file: Path | None,
    threads: int | None,
) -> None:
    """Pack small files of the tables' lake tables, fold deletes, expire snapshots, remove orphans.

    DB.TABLE may be a pattern such as 'sales.*'; without any, all tables are maintained.

    While a tiering worker has a table the command goes on with the others and comes back once. It
    exits with 1 if a table could not be maintained.
    """
    # Not at the top: `--help` must not wait for pyiceberg.
    from streamhouse.tiering.maintain.maintenance_report import plan_text, report_text
    from streamhouse.tiering.worker.maintain_job import maintain_table, plan_table, why_nothing
    from streamhouse.tiering.worker.thread_runner import ThreadRunner

    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        catalog = client.lake_catalog()
        runner = ThreadRunner(threads)

        def maintain(path: str) -> None:
            if reason := why_nothing(client.table_state(path)):
                click.echo(f"{path}: nothing to do, {reason}")
            elif dry_run:
                for name, plan in plan_table(client, catalog, runner, path):
                    click.echo(plan_text(name, plan))
            else:
                for name, report in maintain_table(client, catalog, runner, path):
                    click.echo(report_text(name, report))

        if len(tables) == 1 and not _WILDCARDS & set(tables[0]):
            maintain(str(TablePath.parse(tables[0])))
            return
        failures = _each(_chosen(client, tables), maintain)
    for path, error in failures.items():
        click.echo(f"{path}: {error.message}", err=True)
    if failures:
        raise SystemExit(1)


def _chosen(client: StorageClient, patterns: Sequence[str]) -> list[str]:
    """Return the tables that are named or match; all, if nothing is said."""
    paths = client.list_tables()
    if not patterns:
        return paths
    chosen: set[str] = set()
    for pattern in patterns:
        whole = pattern if "." in pattern else f"{DEFAULT_DATABASE}.{pattern}"
        found = [path for path in paths if matches(path, [whole])]
        if not found:
            raise NotFoundError(f"there is no table '{pattern}'; 'streamhouse tables' lists them")
        chosen.update(found)
    return sorted(chosen)


def _each(paths: Iterable[str], maintain: Callable[[str], None]) -> dict[str, StreamhouseError]:
    """Maintain table after table, those that a worker has once more at the end; return failures."""
    failures: dict[str, StreamhouseError] = {}
    for path in paths:
        _try(path, maintain, failures)
    for path in [p for p, error in failures.items() if isinstance(error, UnavailableError)]:
        del failures[path]
        _try(path, maintain, failures)
    return failures


def _try(path: str, maintain: Callable[[str], None], failures: dict[str, StreamhouseError]) -> None:
    try:
        maintain(path)
    except TableNotFoundError:
        # It was dropped since it was listed.
        return
    except StreamhouseError as error:
        failures[path] = error
