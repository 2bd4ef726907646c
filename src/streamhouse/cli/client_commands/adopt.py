"""`streamhouse adopt`: a table goes on with the lake's rows where lake and log differ."""

from __future__ import annotations

from pathlib import Path

import click

from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.service_options import (
    endpoint_option,
    open_client,
    read_token,
    token_file_option,
)
from streamhouse.cli.table_names import table_argument
from streamhouse.core.model.lake.coverage import BucketDivergence, LakeDivergence

__all__ = ["command"]


@click.command("adopt")
@table_argument("path", metavar="DB.TABLE")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force", is_flag=True, help="Though another service tiered to the lake table just now."
)
@endpoint_option
@token_file_option
@json_option
def command(
    *,
    path: str,
    yes: bool,
    force: bool,
    endpoint: str | None,
    token_file: Path | None,
    is_json: bool,
) -> None:
    """Let DB.TABLE go on with its lake's rows, where the lake and the log have different rows.

    Prints first the rows kept and the rows lost, and asks. Nothing is deleted: the files of the log
    are set aside in the data directory, and 'streamhouse dump' shows their contents. An interrupted
    adoption is repeated by 'streamhouse import'.
    """
    token = read_token(token_file)
    with open_client(endpoint, token=token) as client:
        divergence = client.lake_divergence(path)
        if divergence is not None:
            if not (yes and is_json):
                _print(divergence, is_json=is_json)
            if not yes:
                click.confirm(f"Go on with the lake's rows as {path}?", abort=True, err=is_json)
        former_id = None if divergence is None else client.describe_table(path).table_id
        table = client.adopt_table(path, force=force, replace=divergence is not None)
    if is_json:
        print_json(table.to_json())
        return
    if table.table_id == former_id:
        click.echo(f"{table.path} goes on: its lake has the history of its log again")
        return
    ends = table.adopted_from[max(table.adopted_from)]
    end_offsets = ", ".join(f"{bucket}: {end:,}" for bucket, end in sorted(ends.items()))
    click.echo(f"{table.path} goes on with its lake table, from these offsets on: {end_offsets}")


def _print(divergence: LakeDivergence, *, is_json: bool) -> None:
    lines = [
        f"{divergence.why}.\n",
        *(f"bucket {b.bucket}: {_kept_rows(b)}; {_lost_rows(b)}" for b in divergence.buckets),
        f"\nThe log's files are set aside in {divergence.set_aside} of the data directory.",
    ]
    for line in lines:
        click.echo(line, err=is_json)


def _kept_rows(bucket: BucketDivergence) -> str:
    common = f"kept are offsets 0 to {bucket.common_offset:,}, which both have"
    if not bucket.lake_rows:
        return common
    return (
        f"{common}, and {bucket.common_offset:,} to {bucket.lake_end_offset:,} as the lake has them"
    )


def _lost_rows(bucket: BucketDivergence) -> str:
    if not bucket.log_rows:
        return "the log has nothing more"
    return (
        f"lost to the table are the {bucket.log_rows:,} rows at {bucket.common_offset:,} to"
        f" {bucket.log_end_offset:,} as this log has them"
    )
