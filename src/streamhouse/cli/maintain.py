"""`streamhouse maintain`: tidy the lake tables of one table now, or say what that would do."""

from __future__ import annotations

from pathlib import Path

import click

from streamhouse.cli.connection import endpoint_option, open_client, read_token, token_file_option

__all__ = ["command"]


@click.command("maintain")
@click.argument("table", metavar="DB.TABLE")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@endpoint_option
@token_file_option
@click.option("--threads", type=click.IntRange(min=1), help="Tasks at once. Default: one per core.")
def command(
    *,
    table: str,
    dry_run: bool,
    endpoint: str | None,
    token_file: Path | None,
    threads: int | None,
) -> None:
    """Pack small files of DB.TABLE's lake tables, fold deletes, expire snapshots, remove orphans.

    Waits for nobody: while a tiering worker has the table it says so, with exit code 1.
    """
    # Not at the top: `--help` must not wait for pyiceberg.
    from streamhouse.tiering.maintain.maintenance_report import plan_text, report_text
    from streamhouse.tiering.worker.maintain_job import maintain_table, plan_table
    from streamhouse.tiering.worker.thread_runner import ThreadRunner

    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        catalog = client.lake_catalog()
        runner = ThreadRunner(threads)
        if dry_run:
            for name, plan in plan_table(client, catalog, runner, table):
                click.echo(plan_text(name, plan))
            return
        for name, report in maintain_table(client, catalog, runner, table):
            click.echo(report_text(name, report))
