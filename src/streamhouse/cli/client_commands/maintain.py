"""`streamhouse maintain`: maintains the lake tables of tables now, or prints the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from streamhouse.cli.output import json_option, matches, print_json_line
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
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
@table_argument("tables", metavar="[DB.TABLE]...", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Only print the plan.")
@endpoint_option
@token_file_option
@click.option("--threads", type=click.IntRange(min=1), help="Tasks at once. Default: one per core.")
@json_option
def command(
    *,
    tables: tuple[str, ...],
    dry_run: bool,
    endpoint: str | None,
    token_file: Path | None,
    threads: int | None,
    is_json: bool,
) -> None:
    """Pack small files of the tables' lake tables, fold deletes, expire snapshots, remove orphans.

    DB.TABLE may be a pattern such as 'sales.*'; without any, all tables are maintained.

    While a tiering worker holds a table, the command goes on with the other tables and retries
    once at the end. The exit code is 1 if a table could not be maintained.
    """
    from streamhouse.tiering.maintain.maintenance_report import (  # noqa: PLC0415 - `--help` does not wait for pyiceberg
        plan_json,
        plan_text,
        report_json,
        report_text,
    )
    from streamhouse.tiering.worker.maintain_job import maintain_table, plan_table, why_nothing  # noqa: PLC0415 - `--help` does not wait for pyiceberg
    from streamhouse.tiering.worker.thread_runner import ThreadRunner  # noqa: PLC0415 - `--help` does not wait for pyiceberg

    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        catalog = client.lake_catalog()
        runner = ThreadRunner(threads)

        def maintain(path: str) -> None:
            if reason := why_nothing(client.table_state(path)):
                if is_json:
                    print_json_line({"table": path, "nothing_to_do": reason})
                else:
                    click.echo(f"{path}: nothing to do, {reason}")
            elif dry_run:
                for name, plan in plan_table(client, catalog, runner, path):
                    if is_json:
                        print_json_line({"table": path, **plan_json(name, plan)})
                    else:
                        click.echo(plan_text(name, plan))
            else:
                for name, report in maintain_table(client, catalog, runner, path):
                    if is_json:
                        print_json_line({"table": path, **report_json(name, report)})
                    else:
                        click.echo(report_text(name, report))

        if len(tables) == 1 and not _WILDCARDS & set(tables[0]):
            maintain(str(TablePath.parse(tables[0])))
            return
        failures = _maintain_each(_selected_tables(client, tables), maintain)
    for path, error in failures.items():
        click.echo(f"{path}: {error.message}", err=True)
    if failures:
        raise SystemExit(1)


def _selected_tables(client: StorageClient, patterns: Sequence[str]) -> list[str]:
    """Return the tables that match a pattern; without patterns, all tables."""
    paths = client.list_tables()
    if not patterns:
        return paths
    selected: set[str] = set()
    for pattern in patterns:
        whole = pattern if "." in pattern else f"{DEFAULT_DATABASE}.{pattern}"
        matching = [path for path in paths if matches(path, [whole])]
        if not matching:
            raise NotFoundError(f"there is no table '{pattern}'; 'streamhouse tables' lists them")
        selected.update(matching)
    return sorted(selected)


def _maintain_each(
    paths: Iterable[str], maintain: Callable[[str], None]
) -> dict[str, StreamhouseError]:
    """Maintain each table, and at the end once more each that a worker held; return failures."""
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
        # The table was dropped after it was listed.
        return
    except StreamhouseError as error:
        failures[path] = error
