"""`streamhouse backup`: a copy of a data directory that a service can start from."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import click

from streamhouse.cli.connection import open_client, token_file_option
from streamhouse.storage_service.client import ENDPOINT_VARIABLE, StorageClient
from streamhouse.storage_service.engine.backup import STAGING, clear_staging, stage_closed
from streamhouse.storage_service.engine.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.directory.state_file import read_json
from streamhouse.storage_service.errors import InvalidRequestError, UnavailableError
from streamhouse.storage_service.journal.restore.journal_file import refuse_half_made
from streamhouse.storage_service.operations.backup_files import write_backup
from streamhouse.storage_service.secret_sources import read_secret

__all__ = ["command"]

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command("backup")
@click.option("--data-dir", required=True, type=_DIRECTORY, help="What to back up.")
@click.option(
    "--to", "target", required=True, type=_DIRECTORY, help="A new or empty directory to put it in."
)
@click.option(
    "--with-lake", is_flag=True, help="Also the default Iceberg catalog and its warehouse."
)
@click.option("--endpoint", envvar=ENDPOINT_VARIABLE, help="URL of the service, if it runs.")
@token_file_option
@click.option("--discard-staged", is_flag=True, help="Give up a backup that was broken off before.")
def command(
    *,
    data_dir: Path,
    target: Path,
    with_lake: bool,
    endpoint: str | None,
    token_file: Path | None,
    discard_staged: bool,
) -> None:
    """Back up a data directory, while its service runs or not.

    Of each table the backup is one moment: all buckets, the rows by key and the lake state.
    """
    if not (data_dir / "service.json").is_file():
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
        token = None if token_file is None else read_secret(token_file, kind="token")
        with open_client(endpoint, token=token) as client:
            manifest = _of_running(client, data_dir, target, facts, discard_staged=discard_staged)
    else:
        try:
            refuse_half_made(directory.path)
            # Whoever staged something here was broken off: the directory is ours alone now.
            clear_staging(directory)
            stage_closed(directory, with_lake=with_lake)
            manifest = write_backup(data_dir / STAGING, target, facts)
        finally:
            clear_staging(directory)
            directory.close()
    files = manifest["files"].values()
    size = sum(file["bytes"] for file in files)
    click.echo(f"backed up {len(files)} files, {size:,} bytes, to {target}")


def _of_running(
    client: StorageClient,
    data_dir: Path,
    target: Path,
    facts: dict[str, Any],
    *,
    discard_staged: bool,
) -> dict[str, Any]:
    if discard_staged:
        client.discard_backup()
    staged = client.stage_backup(with_lake=facts["with_lake"])
    try:
        if staged["service_id"] != read_json(data_dir / "service.json").get("service_id"):
            raise InvalidRequestError(
                f"the service at {client.endpoint} is not the one that uses {data_dir}; name it"
                " with --endpoint"
            )
        for damaged in staged["damaged_tables"]:
            click.echo(
                f"table '{damaged['table']}' is damaged, here and in the backup:"
                f" {damaged['reason']}",
                err=True,
            )
        return write_backup(
            data_dir / staged["staged"], target, {**facts, "tables": staged["tables"]}
        )
    finally:
        client.discard_backup()
