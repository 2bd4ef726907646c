"""`streamhouse adopt`: of two histories of a table, that of the lake goes on."""

from __future__ import annotations

from pathlib import Path

import click

from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.core.model.lake.coverage import BucketDivergence, LakeDivergence

__all__ = ["command"]


@click.command("adopt")
@click.argument("path", metavar="DB.TABLE")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force", is_flag=True, help="Though another service tiered to the lake table just now."
)
@endpoint_option
@token_file_option
def command(
    *, path: str, yes: bool, force: bool, endpoint: str | None, token_file: Path | None
) -> None:
    """Let DB.TABLE, whose lake has other rows than its log, go on with those of the lake.

    Prints first which rows the table keeps and which it loses, and asks. Nothing is deleted: the
    files of the log are set aside in the data directory, where 'streamhouse dump' shows what they
    hold. A table whose adoption was cut off is adopted as 'streamhouse import' does.
    """
    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        found = client.lake_divergence(path)
        if found is not None:
            _print(found)
            if not yes:
                click.confirm(f"Go on with the lake's rows as {path}?", abort=True)
        before = None if found is None else client.describe_table(path).table_id
        table = client.adopt_table(path, force=force, replace=found is not None)
    if table.table_id == before:
        click.echo(f"{table.path} goes on: its lake has the history of its log again")
        return
    ends = table.adopted_from[max(table.adopted_from)]
    said = ", ".join(f"{bucket}: {end:,}" for bucket, end in sorted(ends.items()))
    click.echo(f"{table.path} goes on with its lake table, from these offsets on: {said}")


def _print(found: LakeDivergence) -> None:
    click.echo(f"{found.why}.\n")
    for bucket in found.buckets:
        click.echo(f"bucket {bucket.bucket}: {_kept(bucket)}; {_lost(bucket)}")
    click.echo(f"\nThe log's files are set aside in {found.set_aside} of the data directory.")


def _kept(bucket: BucketDivergence) -> str:
    common = f"kept are offsets 0 to {bucket.common_offset:,}, which both have"
    if not bucket.lake_rows:
        return common
    return (
        f"{common}, and {bucket.common_offset:,} to {bucket.lake_end_offset:,} as the lake has them"
    )


def _lost(bucket: BucketDivergence) -> str:
    if not bucket.log_rows:
        return "the log has nothing more"
    return (
        f"lost to the table are the {bucket.log_rows:,} rows at {bucket.common_offset:,} to"
        f" {bucket.log_end_offset:,} as this log has them"
    )
