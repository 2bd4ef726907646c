"""`streamhouse restore`: a data directory from a backup."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from streamhouse.cli.output import json_option, print_json
from streamhouse.cli.progress_bar import ProgressBar, quiet_option
from streamhouse.storage_service.operations.backup_files import restore_backup, verify_backup

__all__ = ["command"]

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command("restore")
@click.option("--from", "backup", required=True, type=_DIRECTORY, help="The backup.")
@click.option(
    "--data-dir", type=_DIRECTORY, help="A new or empty directory; without it only verify."
)
@json_option
@quiet_option
def command(*, backup: Path, data_dir: Path | None, is_json: bool, is_quiet: bool) -> None:
    """Verify a backup, and copy it to a data directory from which a service can start.

    A backup with the lake is restored to its original path, because Iceberg knows files by path.
    """
    title = "verifying" if data_dir is None else "restoring"
    with ProgressBar(title, is_quiet=is_quiet) as progress:
        if data_dir is None:
            manifest = verify_backup(backup, progress=progress)
        else:
            manifest = restore_backup(backup, data_dir, progress=progress)
    if is_json:
        print_json(
            {
                "is_restored": data_dir is not None,
                "data_dir": None if data_dir is None else str(data_dir),
                "backed_up_data_dir": manifest["data_dir"],
                "created_at_us": manifest["created_at_us"],
                "files": len(manifest["files"]),
            }
        )
        return
    when = datetime.datetime.fromtimestamp(manifest["created_at_us"] / 1e6, datetime.UTC)
    did = "verified" if data_dir is None else f"restored to {data_dir}"
    click.echo(
        f"{did}: {len(manifest['files'])} files of {manifest['data_dir']} as of"
        f" {when.isoformat(timespec='seconds')}"
    )
