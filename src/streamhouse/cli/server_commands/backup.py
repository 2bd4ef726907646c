"""`streamhouse backup`: a copy of a data directory, from which a service can start."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.progress_bar import ProgressBar, quiet_option
from streamhouse.cli.service_options import open_client, open_owner, read_token, token_file_option
from streamhouse.client import ENDPOINT_VARIABLE, StorageClient
from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.state_file import read_json
from streamhouse.storage_service.engine.backup import (
    STAGING,
    already_staged,
    clear_staging,
    stage_closed,
)
from streamhouse.storage_service.operations.backup_files import write_backup
from streamhouse.storage_service.ownership.journal.restore.journal_file import (
    JournalFile,
    refuse_half_made,
)

__all__ = ["command"]

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command("backup")
@click.option("--data-dir", required=True, type=_DIRECTORY, help="The data directory to back up.")
@click.option(
    "--to",
    "target",
    required=True,
    type=_DIRECTORY,
    help="A new or empty directory for the backup.",
)
@click.option(
    "--with-lake", is_flag=True, help="Also the default Iceberg catalog and its warehouse."
)
@click.option("--endpoint", envvar=ENDPOINT_VARIABLE, help="URL of the service, if it runs.")
@token_file_option
@click.option("--discard-staged", is_flag=True, help="Discard a backup that was interrupted.")
@json_option
@quiet_option
def command(
    *,
    data_dir: Path,
    target: Path,
    with_lake: bool,
    endpoint: str | None,
    token_file: Path | None,
    discard_staged: bool,
    is_json: bool,
    is_quiet: bool,
) -> None:
    """Back up a data directory; its service may run.

    The backup has each table as of one moment: all buckets, the rows by key and the lake state.
    Each of several shards is backed up from its own directory; the endpoint may be any shard's.
    """
    shard_directories = _shard_directories(data_dir)
    if not (data_dir / "service.json").is_file():
        if shard_directories:
            raise InvalidRequestError(
                f"{data_dir} has the directories of several shards; back up each by itself:"
                f" {_commands(shard_directories, target)}"
            )
        raise InvalidRequestError(f"{data_dir} is no data directory: it has no service.json")
    facts: dict[str, Any] = {
        "data_dir": str(data_dir.absolute()),
        "created_at_us": time.time_ns() // 1_000,
        "streamhouse_version": importlib.metadata.version("pyspark-streamhouse"),
        "with_lake": with_lake,
    }
    try:
        directory = DataDirectory.open(data_dir)
    except UnavailableError:
        token = read_token(token_file)
        journal = JournalFile.load(data_dir)
        shard = None if journal is None else journal.shard
        with _open_owner_of(data_dir, shard, endpoint, token=token) as client:
            manifest = _back_up_running(
                client,
                data_dir,
                target,
                facts,
                shard=shard,
                discard_staged=discard_staged,
                is_quiet=is_quiet,
            )
    else:
        try:
            refuse_half_made(directory.path)
            # No other process uses the directory now: a staged backup was interrupted.
            clear_staging(directory)
            stage_closed(directory, with_lake=with_lake)
            with _bar(is_quiet=is_quiet) as progress:
                manifest = write_backup(data_dir / STAGING, target, facts, progress=progress)
        finally:
            clear_staging(directory)
            directory.close()
    files = manifest["files"].values()
    size = sum(file["bytes"] for file in files)
    if is_json:
        print_json({"to": str(target), "files": len(files), "bytes": size})
    else:
        click.echo(f"backed up {len(files)} files, {size:,} bytes, to {target}")
    if shard_directories:
        click.echo(
            "this is one shard; for the other shards:"
            f" {_commands(shard_directories, target.parent)}",
            err=True,
        )


def _bar(*, is_quiet: bool) -> ProgressBar:
    return ProgressBar("backing up", is_quiet=is_quiet)


def _shard_directories(data_dir: Path) -> list[Path]:
    """Return the directories of shards below the directory of `serve --shards`."""
    return sorted(path.parent for path in data_dir.glob("shards/*/service.json"))


def _commands(directories: list[Path], target: Path) -> str:
    """Return the commands for a backup of each directory below `target`."""
    return "; ".join(
        f"streamhouse backup --data-dir {shlex.quote(str(path))} --to"
        f" {shlex.quote(str(target / f'shard-{path.name}'))}"
        for path in directories
    )


@contextlib.contextmanager
def _open_owner_of(
    data_dir: Path, shard: str | None, endpoint: str | None, *, token: str | None
) -> Iterator[StorageClient]:
    """Open a client to the process which uses the data directory of a shard."""
    with open_client(endpoint, token=token) as client:
        if shard is not None:
            with open_owner(client, shard, token=token) as owner:
                yield owner
        elif client.shards():
            # A service of several shards has a journal file in each directory; this directory has
            # none.
            raise _other_process(client, data_dir)
        else:
            yield client


def _other_process(client: StorageClient, data_dir: Path) -> InvalidRequestError:
    return InvalidRequestError(
        f"the service at {client.endpoint} is not the one that uses {data_dir}; name it with"
        " --endpoint"
    )


def _back_up_running(
    client: StorageClient,
    data_dir: Path,
    target: Path,
    facts: dict[str, Any],
    *,
    shard: str | None,
    discard_staged: bool,
    is_quiet: bool,
) -> dict[str, Any]:
    staging = data_dir / STAGING
    if discard_staged:
        client.discard_backup()
        if staging.exists():
            raise _other_process(client, data_dir)
    if staging.exists():
        # The staged files would pass for files that another process stages elsewhere.
        raise already_staged(staging)
    service_id = read_json(data_dir / "service.json").get("service_id")
    staged = client.stage_backup(with_lake=facts["with_lake"])
    try:
        is_named = (staged["service_id"], staged.get("shard")) == (service_id, shard)
        # A standby and a copy have the same names; only one directory has the staged files.
        if not is_named or not (staging / "service.json").is_file():
            raise _other_process(client, data_dir)
        for damaged in staged["damaged_tables"]:
            click.echo(
                f"table '{damaged['table']}' is damaged, here and in the backup:"
                f" {damaged['reason']}",
                err=True,
            )
        facts = {**facts, "tables": staged["tables"]}
        with _bar(is_quiet=is_quiet) as progress:
            return write_backup(staging, target, facts, progress=progress)
    finally:
        client.discard_backup()
